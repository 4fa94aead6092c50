"""Pretraining of a study: its trials, their order, and what happens to their models."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from podscale.errors import ABSENT, InputError
from podscale.runs import RunDirectory
from podscale.study import StudyDocument, runner
from podscale.study.grid import TrialGrid
from podscale.study.records import GetRecord, RecordStore, TrialOutcome, TrialRecord
from podscale.study.result_files import render_markdown, result_blocks
from podscale.study.results import study_results
from podscale.study.runner import RunningTrial, StudyRunner
from podscale.study.sweep_series import Trial
from tests.support.refusals import invalid, refused

RATE, CLASSES, START = "train.schedule.learning_rate", "data.only_classes", "train.start_from.run"
STUDY: dict[str, Any] = {
    "name": "s",
    "run": {"train": {"epochs": 10}},
    "set": {CLASSES: ["5", "6", "7"]},
    "seeds": [1, 2, 3],
    "selection": {"seeds": [101]},
    "pretraining": [{"name": "other digits", "set": {CLASSES: ["0", "1"], "train.epochs": 20}}],
    "grid": {"data.images_per_class": [5, 10]},
    "variants": [
        {"name": "scratch", "search": {RATE: [0.1, 0.2]}},
        {"name": "tuned", "start_from": "other digits", "search": {RATE: [0.1, 0.2]}},
        {"name": "probe", "start_from": "other digits", "set": {"train.freeze": ["*", "!head"]}, "search_of": "tuned"},
    ],
}


def build(**changes: Any) -> TrialGrid:
    return TrialGrid(StudyDocument.model_validate({**STUDY, **changes}))


def nothing(key: str) -> TrialRecord | None:
    return None


def record(trial: Trial, ended: TrialOutcome = "done") -> TrialRecord:
    top1 = 0.5 if ended == "done" else None
    return TrialRecord(trial.key, ended, dict(trial.settings), trial.seed, top1=top1, loss=1.0, updates=7)


def run_all(grid: TrialGrid) -> tuple[list[Trial], GetRecord]:
    """Return all trials in the order in which one job would run them, and their records."""
    records: dict[str, TrialRecord] = {}
    order = []
    while due := grid.due_trials(records.get):
        order.append(due[0])
        records[due[0].key] = record(due[0])
    return order, records.get


def test_each_seed_starts_from_the_pretraining_of_its_seed() -> None:
    order, _ = run_all(build())
    pretraining = {trial.key: trial for trial in order if trial.series == "other digits"}
    assert sorted(trial.seed for trial in pretraining.values()) == [1, 2, 3, 101]
    for trial in pretraining.values():
        assert trial.config.data.only_classes == ("0", "1")
        assert trial.config.train.epochs == 20
        assert trial.config.data.images_per_class is None, "it does not vary with the grid"
        assert trial.config.data.holdout_fraction is None, "nor with the selection"
    for trial in order:
        if trial.series.startswith("scratch") or trial.key in pretraining:
            assert START not in trial.settings
            continue
        first = pretraining[trial.settings[START]]
        assert first.seed == trial.seed
        assert order.index(first) < order.index(trial)
        assert trial.config.train.start_from.run == first.key
    assert len(order) == 4 + 2 * (2 * (2 + 3) + 3)


def test_it_runs_before_all_that_need_it_and_later_seeds_need_not_wait_for_the_choice() -> None:
    grid = build()
    due = grid.due_trials(nothing)
    assert {trial.series.partition(",")[0] for trial in due} == {"scratch", "other digits"}
    assert [(trial.seed, trial.priority) for trial in due if trial.series == "other digits"] == [
        (101, -1), (1, -1), (2, 0), (3, 1),
    ]  # fmt: skip
    assert [trial.seed for trial in due[:2]] == [101, 1]
    waiting = [trial for trial in grid.unfinished_trials(nothing) if trial not in due]
    assert {(trial.series.partition(",")[0], trial.seed) for trial in waiting} == {("tuned", 101)}
    assert len(due) + len(grid.pending_trials(nothing)) == 4 + 2 * (2 * (2 + 3) + 3)


def test_its_series_is_in_an_earlier_wave_and_has_a_task_of_its_own() -> None:
    grid = build()
    waves = [[series.name.partition(",")[0] for series in wave] for wave in grid.waves()]
    assert waves == [["scratch", "scratch", "other digits"], ["tuned", "tuned"], ["probe", "probe"]]
    assert grid.all_series[-1].name == "other digits"
    assert {trial.seed for trial in grid.due_trials(nothing, grid.all_series[-1:])} == {1, 2, 3, 101}
    assert "other digits" not in [series.name for series in grid.series], "the results do not compare it"


def test_the_page_has_its_accuracy_and_its_trainings() -> None:
    grid = build()
    _, get = run_all(grid)
    results = study_results(grid, get)
    assert len(results.records) == 4 + 2 * (2 * (2 + 3) + 3)
    assert {group.line for group in results.groups} == {"scratch", "tuned", "probe"}
    assert "| other digits | 7 | 4 | 50.00 \u00b1 0.00 % |" in render_markdown(
        results, list(result_blocks(results)), []
    )


@pytest.mark.parametrize(
    ("changes", "field", "got", "named"),
    [
        ({"variants": [{"name": "a", "start_from": "other digit"}]}, "pretraining", "other digits", "start_from"),
        ({"pretraining": []}, "start_from", "other digits", "tuned"),
        ({"pretraining": [*STUDY["pretraining"], {"name": "more"}]}, "pretraining", "more", "start_from"),
        ({"pretraining": [*STUDY["pretraining"]] * 2}, "pretraining", "other digits", ""),
        ({"pretraining": [{"name": "scratch"}]}, "pretraining", "scratch", ""),
        ({"pretraining": [{"name": "other digits", "set": {"run.seed": 1}}]}, "run.seed", ABSENT, ""),
        (
            {"variants": [{"name": "a", "start_from": "other digits"}, {"name": "b", "start_from": "other digit"}]},
            "start_from",
            "other digit",
            "other digits?",
        ),
        (
            {"variants": [{"name": "a", "start_from": "other digits", "set": {"train.start_from": "x"}}]},
            "train.start_from",
            ABSENT,
            "other digits",
        ),
        ({"grid": {START: ["x", "y"]}}, START, ABSENT, "tuned"),
        ({"selection": {"set": {START: "x"}, "seeds": [101]}}, START, ABSENT, "tuned"),
        (
            {"variants": [{"name": "a", "start_from": "other digits", "search": {"train.start_from.epoch": [1, 2]}}]},
            "train.start_from.epoch",
            ABSENT,
            "other digits",
        ),
    ],
)
def test_a_document_that_does_not_fit_is_refused(changes: dict[str, Any], field: str, got: object, named: str) -> None:
    with invalid(named, field=field, got=got):
        build(**changes)


def trained(grid: TrialGrid, store: RecordStore, ended: TrialOutcome = "done") -> list[Path]:
    """Add the records of all pretraining, with their run directories; return these."""
    paths = []
    for trial in grid.pretraining_trials.values():
        store.add(record(trial, ended))
        paths.append(RunDirectory.for_config(trial.config).path)
        paths[-1].mkdir(parents=True)
    return paths


@pytest.fixture
def grid(tmp_path: Path) -> TrialGrid:
    return build(set={**STUDY["set"], "run.workspace": str(tmp_path)})


@pytest.fixture
def outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, TrialOutcome]:
    """Let trials finish at once with a run directory, and return how those of each series end; default: done."""
    outcomes: dict[str, TrialOutcome] = {}

    def start(self: StudyRunner, trial: Trial) -> None:
        first = trial.pretraining
        assert first is None or RunDirectory.for_config(first.config).path.exists(), "its model is there"
        RunDirectory.for_config(trial.config).path.mkdir(parents=True)
        self._running.append(RunningTrial(trial, subprocess.Popen(["true"]), tmp_path / "log", 0.0, is_fresh=False))

    def build_record(trial: Trial, *rest: Any, images: int) -> TrialRecord:
        return record(trial, outcomes.get(trial.series, "done"))

    monkeypatch.setattr(StudyRunner, "_shard_set", lambda self, config: ("", 1))
    monkeypatch.setattr(StudyRunner, "_start_trial", start)
    monkeypatch.setattr(runner, "trial_outcome", lambda code, error, history: "done")
    monkeypatch.setattr(runner, "build_record", build_record)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.001)
    return outcomes


def test_each_trial_finds_its_model_and_the_end_of_the_study_removes_them(
    tmp_path: Path, outcomes: dict[str, TrialOutcome]
) -> None:
    same = {"name": "the other digits, compared as well", "set": STUDY["pretraining"][0]["set"]}
    grid = build(grid={}, set={"run.workspace": str(tmp_path)}, variants=[*STUDY["variants"], same])
    first = StudyRunner(grid, RecordStore(grid.workspace), jobs=2, series=grid.series[-1:])
    first.run()
    assert len(list((tmp_path / "runs").iterdir())) == 3, "models that the rest of the study starts from"
    rest = StudyRunner(grid, first.records, jobs=2)
    rest.run()
    assert len(rest.ended) == 1 + 2 * (2 + 3) + 3
    assert not list((tmp_path / "runs").iterdir())


def test_a_study_ends_as_soon_as_its_pretraining_diverges(grid: TrialGrid, outcomes: dict[str, TrialOutcome]) -> None:
    outcomes["other digits"] = "diverged"
    study = StudyRunner(grid, RecordStore(grid.workspace), jobs=1)
    with refused("diverged", field="other digits, rate 0.1, seed 101", kind=InputError):
        study.run()
    assert len(study.ended) == 1


def test_models_stay_until_no_trial_is_left(grid: TrialGrid) -> None:
    store = RecordStore(grid.workspace)
    paths = trained(grid, store)
    runner = StudyRunner(grid, store, jobs=1, time_box_seconds=-1.0)  # no trial starts
    runner.run()
    assert all(path.exists() for path in paths)
    for trial in run_all(grid)[0]:
        store.add(record(trial))
    runner.run()
    assert not any(path.exists() for path in paths)


def test_a_model_that_is_gone_is_trained_again_if_a_trial_needs_it(
    grid: TrialGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StudyRunner, "_shard_set", lambda self, config: ("", 1))
    store = RecordStore(grid.workspace)
    first, *others = trained(grid, store)
    first.rmdir()
    runner = StudyRunner(grid, store, jobs=1)
    runner.prepare()
    assert [trial.seed for trial in grid.due_trials(store.get) if trial.series == "other digits"] == [1]
    for trial in run_all(grid)[0]:
        store.add(record(trial))
    others[0].rmdir()
    runner.prepare()
    assert grid.due_trials(store.get) == [], "all that started from it have their records"


def test_the_pod_of_the_pretraining_trains_a_model_again_that_is_gone(
    grid: TrialGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several pods would, if each waited for a trial of its own to need the model."""
    monkeypatch.setattr(StudyRunner, "_shard_set", lambda self, config: ("", 1))
    store = RecordStore(grid.workspace)
    trained(grid, store)[0].rmdir()
    pretraining = grid.all_series[-1:]
    StudyRunner(grid, store, jobs=1, series=pretraining).prepare()
    assert [trial.seed for trial in grid.due_trials(store.get, pretraining)] == [1]


def test_a_study_ends_if_its_pretraining_diverged(grid: TrialGrid) -> None:
    store = RecordStore(grid.workspace)
    trained(grid, store, "diverged")
    with refused("diverged", field="other digits, rate 0.1, seed 101", kind=InputError):
        StudyRunner(grid, store, jobs=1).prepare()
