"""Studies before they run: documents, trials and their order, learning rates, the time box."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podscale.errors import ABSENT
from podscale.pipelines import presets
from podscale.study import StudyDocument, read_study
from podscale.study.budget import TrialCosts, plan_study
from podscale.study.grid import TrialGrid
from podscale.study.records import EvaluationPoint, RecordStore, TrialRecord, trial_key
from podscale.study.sweep_series import SweepSeries, Trial
from tests.support.refusals import invalid, refused

RUN = {"train": {"epochs": 10}, "launch": {"processes": 1}}


def study(**section: Any) -> StudyDocument:
    return StudyDocument.model_validate({"name": "s", "run": RUN, "seeds": [1, 2, 3], **section})


def swept(**section: Any) -> StudyDocument:
    """Study of two variants at three batches; the first sweeps its rate, the second uses that of the smallest batch."""
    rate = {"at": 0.1, "batch": 64, "rule": "linear", "sweep": {"factors": [0.5, 1, 2], "widen": 2}}
    variants = [
        {"name": "swept", "learning_rate": rate},
        {"name": "ruled", "learning_rate": {"at": "swept", "batch": 64, "rule": "sqrt"}},
    ]
    return study(**{"variants": variants, "grid": {"train.global_batch": [64, 256, 1024]}, **section})


def record(trial: Trial, top1: float | None, **more: Any) -> TrialRecord:
    ended: Any = "done" if top1 is not None else "diverged"
    return TrialRecord(trial.key, ended, dict(trial.settings), trial.seed, top1=top1, **more)


class Known:
    """Records by a function of the trial; `get` learns of each trial when the grid makes it."""

    def __init__(self, grid: TrialGrid, top1: Callable[[Trial], float | None], **more: Any) -> None:
        self.records: dict[str, TrialRecord] = {}
        for _ in range(20):
            due = grid.due_trials(self.get)
            self.records |= {trial.key: record(trial, top1(trial), **more) for trial in due}
            if not due:
                return
        raise AssertionError("a study ends")

    def get(self, key: str) -> TrialRecord | None:
        return self.records.get(key)


def nothing(key: str) -> TrialRecord | None:
    return None


def series(grid: TrialGrid, variant: str, batch: int) -> SweepSeries:
    return grid.build_series(variant, (("train.global_batch", batch),))


class TestDocument:
    @pytest.mark.parametrize("name", presets.study_names())
    def test_every_study_that_comes_along_is_valid(self, name: str) -> None:
        path = presets.resolve_study(name)
        result = read_study(path, {}, presets.resolve_preset)
        assert result.name == name
        assert len(result.seeds) >= 3
        grid = TrialGrid(result)
        assert len(grid.due_trials(nothing)) >= 3
        head = path.read_text().split("\n\n")[0].splitlines()
        assert all(line.startswith("#") for line in head)
        assert any(f"podscale study {name}" in line for line in head), "the head shows the command"

    @pytest.mark.parametrize(
        ("text", "field", "got", "says"),
        [
            ("name: s\nrun: digits\nvarants: []\n", "varants", ABSENT, "variants"),
            ("name: s\nrun: digits\nseeds: [1, 1]\n", "seeds", (1, 1), "s.yaml"),
            ("name: s\nrun: digits\ngrid: {train.batch: [1, 2]}\n", "grid", "train.batch", "docs/reference/options.md"),
            ("name: s\nrun: digits\nset: {run.seed: 3}\n", "run.seed", ABSENT, ""),
            ("name: s\nrun: digits\nx: train.epochs\n", "x", "train.epochs", "grid"),
            (
                "name: s\nrun: digits\nlearning_rate: {rule: linear, at: 0.1}\n",
                "learning_rate.rule",
                "linear",
                "`batch`",
            ),
            ("name: s\nrun: digits\nlearning_rate: {at: b}\n", "learning_rate.at", "b", "variant"),
            ("name: s\nrun: digits\nchoose: updates\n", "target", ABSENT, "choose=updates"),
            ("name: s\nrun: digitz\n", "digitz", ABSENT, "digits"),
        ],
    )
    def test_invalid_documents_are_refused(self, tmp_path: Path, text: str, field: str, got: object, says: str) -> None:
        path = tmp_path / "s.yaml"
        path.write_text(text)
        with refused(says, field=field, got=got):
            read_study(path, {}, presets.resolve_preset)

    def test_rates_that_follow_each_other_in_a_circle_are_refused(self) -> None:
        variants = [{"name": a, "learning_rate": {"at": b}} for a, b in ("xy", "yx")]
        with invalid("x -> y -> x", field="learning_rate.at", got="x"):
            study(variants=variants)

    def test_an_invalid_trial_is_refused_before_anything_runs(self) -> None:
        with refused("train.optimizer.momentum", "study s", field="train.optimizer.momentun"):
            TrialGrid(study(variants=[{"name": "a", "set": {"train.optimizer.momentun": 0.5}}]))
        with refused("study s", field="train.epochs"):
            TrialGrid(study(variants=[{"name": "a", "set": {"train.epochs": 5}}], grid={"train.epochs": [1, 2]}))

    def test_the_run_next_to_the_study_with_changes_on_top(self, tmp_path: Path) -> None:
        (tmp_path / "own.yaml").write_text("train: {epochs: 3, optimizer: {name: sgd, momentum: 0.5}}\n")
        path = tmp_path / "s.yaml"
        path.write_text("name: s\nrun: own.yaml\nset: {train.optimizer: {momentum: 0.7}, train.epochs: 4}\n")
        config = TrialGrid(read_study(path, {"train.epochs": 5}, presets.resolve_preset)).series[0].config
        assert (config.train.epochs, config.train.optimizer.name) == (5, "sgd")
        assert config.train.optimizer.momentum == 0.7, "a section sets only what it names"


class TestExpansion:
    def test_variants_times_grid_times_seeds(self) -> None:
        variants = [{"name": name, "set": {"train.optimizer.name": name}} for name in ("sgd", "lars")]
        grid = TrialGrid(study(variants=variants, grid={"train.global_batch": [64, 256], "train.epochs": [1, 2]}))
        assert len(grid.series) == 8
        trials = grid.due_trials(nothing)
        assert len(trials) == len({trial.key for trial in trials}) == 24
        assert {(c.config.train.optimizer.name, c.config.train.global_batch) for c in trials} == {
            (name, batch) for name in ("sgd", "lars") for batch in (64, 256)
        }

    def test_the_order_is_seed_by_seed_and_the_cheapest_first(self) -> None:
        grid = TrialGrid(study(grid={"train.global_batch": [64, 1024, 256]}))
        trials = grid.due_trials(nothing)
        assert [(trial.seed, trial.config.train.global_batch) for trial in trials] == [
            (seed, batch) for seed in (1, 2, 3) for batch in (1024, 256, 64)
        ]

    def test_a_cell_is_known_by_what_changes_its_numbers(self) -> None:
        one = TrialGrid(study()).series[0].config
        assert one.run.id == trial_key(one)
        assert trial_key(TrialGrid(study(set={"launch.threads": 2})).series[0].config) == one.run.id
        assert trial_key(TrialGrid(study(set={"train.epochs": 11})).series[0].config) != one.run.id
        assert trial_key(TrialGrid(study(name="other")).series[0].config) == one.run.id, "studies share their trials"


class TestRates:
    @pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 1.6), ("sqrt", 0.4)])
    def test_rules(self, rule: str, expected: float) -> None:
        rate = {"at": 0.1, "batch": 64, "rule": rule}
        grid = TrialGrid(study(learning_rate=rate, set={"train.global_batch": 1024}))
        assert [trial.rate for trial in grid.due_trials(nothing)] == [expected] * 3

    def test_a_table(self) -> None:
        section = {"table": {64: 0.1, 256: 0.7}}
        grid = TrialGrid(study(learning_rate=section, grid={"train.global_batch": [64, 256]}))
        assert {trial.config.train.global_batch: trial.rate for trial in grid.due_trials(nothing)} == {
            64: 0.1,
            256: 0.7,
        }
        with refused("64, 256", field="learning_rate.table", got=512):
            TrialGrid(study(learning_rate=section, grid={"train.global_batch": [64, 512]}))

    def test_a_sweep_is_widened_towards_its_best_rate(self) -> None:
        grid = TrialGrid(swept())

        def rates(top1: Callable[[Trial], float | None]) -> list[float]:
            return series(grid, "swept", 256).sweep_rates(Known(grid, top1).get)

        assert series(grid, "swept", 256).sweep_rates(nothing) == [0.2, 0.4, 0.8]
        assert rates(lambda trial: 1 / (1 + abs(trial.rate - 0.4))) == [0.2, 0.4, 0.8]
        assert rates(lambda trial: trial.rate / 100) == [0.2, 0.4, 0.8, 1.6, 3.2]
        assert rates(lambda trial: 1 - trial.rate / 100) == [0.05, 0.1, 0.2, 0.4, 0.8]

    def test_a_rate_that_diverged_is_not_the_best(self) -> None:
        grid = TrialGrid(swept())
        known = Known(grid, lambda trial: None if trial.rate > 0.5 else trial.rate)
        assert series(grid, "swept", 256).chosen_rate(known.get) == 0.4
        assert series(grid, "swept", 256).chosen_rate(nothing) is None

    def test_among_equal_accuracies_the_smaller_loss_decides(self) -> None:
        grid, records = TrialGrid(swept()), {}
        for trial in grid.due_trials(nothing):
            records[trial.key] = record(trial, 0.9, loss=0.3 + abs(trial.rate - 0.4))
        assert series(grid, "swept", 256).chosen_rate(records.get) == 0.4

    def test_the_mean_over_the_seeds_of_the_sweep_decides(self) -> None:
        rate = {"at": 0.1, "sweep": {"factors": [1, 2], "widen": 0, "seeds": 2}}
        grid = TrialGrid(study(learning_rate=rate))
        top1 = {(0.1, 1): 0.9, (0.1, 2): 0.1, (0.2, 1): 0.6, (0.2, 2): 0.6}
        known = Known(grid, lambda trial: top1.get((trial.rate, trial.seed), 0.0))
        assert grid.series[0].chosen_rate(known.get) == 0.2
        assert [trial.seed for trial in grid.series[0].seed_trials({"train.schedule.learning_rate": 0.2})] == [1, 2, 3]

    def test_the_fewest_steps_to_the_target_may_decide(self) -> None:
        rate = {"at": 0.1, "sweep": {"factors": [1, 2, 4], "widen": 0}}
        grid = TrialGrid(study(learning_rate=rate, choose="updates", target=0.5))
        ends = {0.1: (40, 0.9), 0.2: (20, 0.6), 0.4: (10, 0.4)}  # the last never reaches the target
        records = {
            trial.key: record(
                trial, ends[trial.rate][1], curve=(EvaluationPoint(ends[trial.rate][0], 1.0, ends[trial.rate][1]),)
            )
            for trial in grid.due_trials(nothing)
        }
        assert grid.series[0].chosen_rate(records.get) == 0.2

    def test_a_rate_may_follow_another_variants(self) -> None:
        grid = TrialGrid(swept())
        assert series(grid, "ruled", 1024).chosen_rate(nothing) is None
        known = Known(grid, lambda trial: 1 / (1 + abs(trial.rate - 0.2)))
        assert series(grid, "swept", 64).chosen_rate(known.get) == 0.2
        assert [series(grid, "ruled", batch).chosen_rate(known.get) for batch in (64, 256, 1024)] == [0.2, 0.4, 0.8]
        assert [[c.variant.name for c in wave] for wave in grid.waves()] == [["swept"] * 3, ["ruled"] * 3]
        with refused("train.global_batch=64", field="learning_rate.at", got="swept"):
            TrialGrid(swept(grid={"train.global_batch": [256]}))


class TestTimeBox:
    def test_without_measurements_a_guess_or_nothing(self) -> None:
        grid = TrialGrid(study(grid={"train.global_batch": [64, 256]}))
        assert plan_study(grid, nothing, jobs=1, time_box_seconds=None).seconds is None
        assert plan_study(
            TrialGrid(study(cell_seconds=10.0)), nothing, jobs=2, time_box_seconds=None
        ).seconds == pytest.approx(15.0)

    def test_the_estimate_is_of_the_planned_trials_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first trial that does not fit ends the plan: a shorter one after it is left out, and not counted."""
        costs = {256: 10.0, 64: 25.0}
        monkeypatch.setattr(TrialCosts, "seconds", lambda self, trial: costs[trial.config.train.global_batch])
        grid = TrialGrid(study(grid={"train.global_batch": [64, 256]}))
        made = plan_study(grid, nothing, jobs=1, time_box_seconds=30.0)
        assert [trial.config.train.global_batch for trial in made.planned_trials] == [256]
        assert made.excluded_trials[1].config.train.global_batch == 256
        assert made.seconds == pytest.approx(10.0)

    def test_what_does_not_fit_is_the_last_and_is_named(self) -> None:
        grid = TrialGrid(study(grid={"train.global_batch": [64, 256]}, cell_seconds=10.0))
        made = plan_study(grid, nothing, jobs=1, time_box_seconds=35.0)
        assert [(trial.seed, trial.config.train.global_batch) for trial in made.planned_trials] == [
            (1, 256),
            (1, 64),
            (2, 256),
        ]
        assert [(trial.seed, trial.config.train.global_batch) for trial in made.excluded_trials] == [
            (2, 64),
            (3, 256),
            (3, 64),
        ]
        assert made.counts_by_series == {"as it is, batch 256": (2, 1), "as it is, batch 64": (1, 2)}

    def test_estimates_come_from_the_nearest_measured_cell(self) -> None:
        grid = TrialGrid(study(grid={"train.global_batch": [64, 256]}, cell_seconds=99.0))
        records = {
            trial.key: record(trial, 0.9, seconds=2 * cpu, cpu_seconds=cpu)
            for trial, cpu in zip(grid.due_trials(nothing), (2.0, 4.0), strict=False)
        }
        assert [trial.config.train.global_batch for trial in grid.due_trials(nothing)[:2]] == [256, 64]
        made = plan_study(grid, records.get, jobs=1, time_box_seconds=None, cores=2)
        assert (made.done_trials, made.measured) == (2, 2)
        assert made.seconds == pytest.approx(2 * 4.0 + 2 * 8.0)

    def test_a_cell_measured_on_a_busy_machine_costs_its_cpu_seconds(self) -> None:
        """One trial took nine wall seconds on a busy machine; the ratio of the other trials is used."""
        grid = TrialGrid(study(seeds=[1, 2, 3, 4], grid={"train.global_batch": [64]}))
        trials = grid.due_trials(nothing)
        records = {
            trial.key: record(trial, 0.9, seconds=seconds, cpu_seconds=3.0)
            for trial, seconds in zip(trials, (9.0, 4.5, 4.5), strict=False)
        }
        made = plan_study(grid, records.get, jobs=1, time_box_seconds=None, cores=2)
        assert (made.wall_cpu_ratio, made.seconds) == (pytest.approx(1.5), pytest.approx(4.5))
        busy = plan_study(grid, records.get, jobs=1, time_box_seconds=None, cores=2, ended={trials[0].key})
        assert (busy.wall_cpu_ratio, busy.ended, busy.seconds) == (pytest.approx(3.0), 1, pytest.approx(9.0)), (
            "the ratio is recent again"
        )
        on_gpus = plan_study(grid, records.get, jobs=1, time_box_seconds=None, cores=0)
        assert (on_gpus.wall_cpu_ratio, on_gpus.seconds) == (None, pytest.approx(9.0)), (
            "from the first: no other is nearer"
        )

    def test_the_newest_records_say_how_fast_the_machine_is(self) -> None:
        grid = TrialGrid(study(seeds=list(range(1, 10)), grid={"train.global_batch": [64]}))
        records = {
            trial.key: record(trial, 0.9, seconds=seconds, cpu_seconds=2.0, date=date)
            for trial, seconds, date in zip(
                grid.due_trials(nothing),
                [40.0] * 3 + [2.0] * 5,
                [f"2026-11-{day:02}" for day in (1, 2, 3, 9, 8, 7, 6, 5)],
                strict=False,
            )
        }  # fmt: skip
        assert plan_study(grid, records.get, jobs=1, time_box_seconds=None, cores=2).wall_cpu_ratio == pytest.approx(
            1.0
        )

    def test_jobs_cannot_be_faster_than_the_cores(self) -> None:
        """Alone on both cores, a trial took half its CPU seconds of wall time; beside another it gets one core."""
        grid = TrialGrid(study(grid={"train.global_batch": [64]}))
        first = grid.due_trials(nothing)[0]
        records = {first.key: record(first, 0.9, seconds=1.5, cpu_seconds=3.0)}
        single, beside = (
            plan_study(grid, records.get, jobs=jobs, time_box_seconds=None, cores=2).seconds for jobs in (1, 2)
        )
        assert (single, beside) == (pytest.approx(2 * 1.5), pytest.approx(2 * 3.0 / 2))

    def test_trials_of_an_unknown_rate_are_counted(self) -> None:
        made = plan_study(TrialGrid(swept()), nothing, jobs=1, time_box_seconds=None)
        assert len(made.planned_trials) == 3 * 3 + 3 * 2 + 3 * 3  # sweeps, their further seeds, the series that follow
        assert made.widening == 6


class TestRecords:
    def test_a_record_is_stored_and_dropped(self, tmp_path: Path) -> None:
        trial = TrialGrid(study()).due_trials(nothing)[0]
        made = record(trial, 0.5, curve=(EvaluationPoint(5, 1.0, 0.3, 2.0), EvaluationPoint(10, 2.0, 0.5)))
        RecordStore(str(tmp_path)).add(made)
        fresh = RecordStore(str(tmp_path))
        assert fresh.get(trial.key) == made
        fresh.delete(trial.key)
        assert RecordStore(str(tmp_path)).get(trial.key) is None

    @pytest.mark.parametrize(
        ("target", "expected"), [(0.3, (5.0, 1.0)), (0.4, (7.5, 1.5)), (0.15, (2.5, 0.5)), (0.6, None)]
    )
    def test_the_target_is_reached_between_evaluations(self, target: float, expected: tuple[float, float]) -> None:
        curve = (EvaluationPoint(5, 1.0, 0.3), EvaluationPoint(10, 2.0, 0.5), EvaluationPoint(15, 3.0, 0.45))
        result = TrialRecord("c", "done", {}, 1, curve=curve).steps_to_target(target)
        assert result == (pytest.approx(expected) if expected else None)
