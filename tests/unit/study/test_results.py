"""Results of a study: spread, differences, critical batch, table, charts and page."""

import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from podscale.components import steps
from podscale.evaluation.history import parse_history
from podscale.study import StudyDocument, result_files
from podscale.study.blocks import BulletBlock, DotBlock, LineBlock, TableBlock
from podscale.study.critical_batch import critical_batch
from podscale.study.grid import TrialGrid
from podscale.study.records import EvaluationPoint, TrialRecord
from podscale.study.result_files import measurement_conditions, render_csv, result_blocks, write_results
from podscale.study.result_text import comparison_table, range_table, summary_sentences, trial_table
from podscale.study.results import StudyResults, study_results
from podscale.study.seed_statistics import mean_deviation_percent, mean_difference
from podscale.study.trial import build_record, trial_outcome
from podscale.training.trainer import NONFINITE_MESSAGE
from tests.support.golden import assert_golden

PAGE = Path(__file__).with_suffix(".txt")
LINES = (
    {"kind": "step", "step": 1, "epoch": 1.0, "loss": 2.0, "time": 1.0},
    {"kind": "step", "step": 2, "epoch": 1.5, "loss": 1.5, "time": 2.0},
    {"kind": "step", "step": 3, "epoch": 2.2, "loss": 1.1, "time": 3.0},
    {"kind": "evaluation", "step": 3, "epoch": 2.2, "top1": 0.6, "top5": 0.9, "loss": 1.0, "time": 4.0},
    {"kind": "event", "event": "done", "step": 3, "skipped_updates": 1, "time": 5.0},
)


def assert_contains(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text


def history(*lines: Any) -> Any:
    return parse_history([json.dumps(line).encode() for line in lines])


class TestStatistics:
    def test_a_difference_has_its_interval(self) -> None:
        first, other = [0.60, 0.61, 0.62], [0.65, 0.66, 0.67]
        assert mean_deviation_percent(first) == "61.00 \u00b1 1.00 %"
        results = mean_difference(first, other)
        assert results is not None
        pooled = math.sqrt((np.var(first, ddof=1) + np.var(other, ddof=1)) / 2)
        assert results.value == pytest.approx(np.mean(other) - np.mean(first))
        assert results.half_width == pytest.approx(2.776 * pooled * math.sqrt(2 / 3), rel=2e-3)
        assert str(results) == "+5.00 \u00b1 2.27"
        assert str(mean_difference(first, [0.61, 0.63])) == "+1.00 \u00b1 3.35 (within noise)"
        assert mean_difference(first, []) is None
        assert mean_difference([0.5], [0.6]) is not None

    @pytest.mark.parametrize(("least", "critical"), [(100.0, 256.0), (37.0, 900.0)])
    def test_the_fit_recovers_the_critical_batch(self, least: float, critical: float) -> None:
        batches = (64, 128, 256, 512, 1024, 2048)
        exact = {batch: least * (1 + critical / batch) for batch in batches}
        results = critical_batch(exact)
        assert results.batch == pytest.approx(critical)
        assert results.least_steps == pytest.approx(least)
        assert results.least_images == pytest.approx(least * critical)
        for batch, updates in exact.items():  # the equation as McCandlish 2018 writes it
            images = updates * batch
            assert (updates / results.least_steps - 1) * (images / results.least_images - 1) == pytest.approx(1.0)
        noisy = {batch: updates * (1.05 if i % 2 else 0.95) for i, (batch, updates) in enumerate(exact.items())}
        results = critical_batch(noisy)
        rows = np.array([[1 / s, 1 / b / s] for b, s in noisy.items()])
        by_hand = np.linalg.solve(rows.T @ rows, rows.T @ np.ones(len(rows)))
        assert results.batch == pytest.approx(by_hand[1] / by_hand[0])
        assert 0.03 < results.error < 0.07

    def test_insufficient_data_are_reported(self) -> None:
        assert "2 of 3" in critical_batch({64: 100, 128: 50}, [256]).reason
        perfect = critical_batch({64: 401, 128: 200, 256: 99})
        assert perfect.batch is None
        assert "256" in perfect.reason, "the largest batch"
        assert perfect.linear_to == 256
        flat = critical_batch({64: 90, 128: 95, 256: 100})
        assert flat.batch is None
        assert "64" in flat.reason, "the smallest batch"
        assert (flat.linear_to, flat.useful_to) == (64, 64)
        wild = critical_batch({64: 400, 128: 20, 256: 300, 512: 30})
        assert wild.batch is None
        assert "%" in wild.reason, "the error of the fit"

    def test_measurements_are_reported_without_a_model(self) -> None:
        results = critical_batch({64: 800, 128: 400, 256: 205, 512: 150, 1024: 149, 2048: 148})
        assert (results.linear_to, results.useful_to) == (256, 512)


STUDY: dict[str, Any] = {
    "name": "s",
    "title": "A study",
    "question": "What holds?",
    "run": {"train": {"epochs": 10}},
    "grid": {"train.global_batch": [64, 256, 1024]},
    "target": 0.5,
    "variants": [
        {"name": "one", "learning_rate": {"at": 0.1, "sweep": {"factors": [1, 2], "widen": 0}}},
        {"name": "two", "set": {"train.optimizer.name": "lars"}, "learning_rate": {"at": 1.0}},
    ],
}
TOP1 = {("one", 64): 0.9, ("one", 256): 0.9, ("one", 1024): 0.6, ("two", 64): 0.9, ("two", 256): 0.9}
UPDATES = {64: 500, 256: 200, 1024: 125}


def results_of(**changes: Any) -> StudyResults:
    """Results of a study whose first line loses accuracy at 1,024 and whose second diverges there at one seed."""
    grid = TrialGrid(StudyDocument.model_validate({**STUDY, **changes}))
    records: dict[str, TrialRecord] = {}
    for _ in range(3):
        for trial in grid.due_trials(records.get):
            variant, batch = trial.series.partition(",")[0], trial.config.train.global_batch
            bad = (variant, batch, trial.seed) == ("two", 1024, 2)
            top1 = TOP1.get((variant, batch), 0.9) + 0.01 * (trial.seed - 2) - (0.2 if trial.rate == 0.2 else 0.0)
            half = UPDATES[batch]
            curve = (EvaluationPoint(half, 5.0, 0.5, 1.0), EvaluationPoint(2 * half, 10.0, top1, 0.5))
            records[trial.key] = TrialRecord(
                trial.key,
                "diverged" if bad else "done",
                dict(trial.settings),
                trial.seed,
                code="c" * 40,
                top1=None if bad else top1,
                loss=None if bad else 0.5,
                training_loss=1.25,
                updates=2 * half,
                curve=() if bad else curve,
                cpu_seconds=30.0,
            )
    return study_results(grid, records.get)


class TestGroups:
    def test_accuracy_is_kept_up_to_a_batch_size(self) -> None:
        results = results_of()
        assert results.unfinished_trials == 0
        assert results.lines == ["one", "two"]
        assert results.holds_up_to("one") == 256
        assert results.holds_up_to("two") == 256, "a diverged training is not noise"

    def test_one_seed_gives_no_estimate_of_noise(self) -> None:
        results = results_of(seeds=[1])
        assert results.holds_up_to("one") is None
        assert not any("keeps" in line or "noise" in line for line in summary_sentences(results))

    def test_the_critical_batch_uses_batches_that_reached_the_target_with_every_seed(self) -> None:
        results = results_of()
        one, two = results.critical_batch("one"), results.critical_batch("two")
        assert one is not None
        assert two is not None
        assert one.batch == pytest.approx(256.0, rel=0.05)
        assert one.least_steps == pytest.approx(100.0, rel=0.05)
        assert (two.batch, two.reason.startswith("2 of 3 ")) == (None, True)
        assert results_of(target=None).critical_batch("one") is None

    def test_curves_are_means_over_the_seeds(self) -> None:
        group = results_of().groups_of_line("one")[0]
        assert group.rate == 0.1
        assert group.curve() == [(5.0, 0.5, 0.0), (10.0, pytest.approx(0.9), pytest.approx(0.01))]

    def test_a_grid_of_two_options_has_a_line_for_each_of_the_other(self) -> None:
        variants = [{"name": "one"}]
        grid = {"train.global_batch": [64, 256, 1024], "model.width": [8, 16]}
        results = results_of(grid=grid, variants=variants, target=None)
        assert results.lines == ["width 8", "width 16"]
        assert results.xs == [64, 256, 1024]


class TestBlocks:
    def test_a_comparison_marks_only_differences_within_noise(self) -> None:
        results = results_of()
        table = comparison_table(results, results.groups_at(1024), "batch 1,024")
        heads = ["", "rate", "steps", "n", "steps to 50.0\u202f%", "epochs"]
        assert list(table.heads[:6]) == heads
        one, two = table.rows
        assert one[:7] == ["one", "0.1", "250", "3", "125 \u00b1 0", "5.0 \u00b1 0.0", "60.00 \u00b1 1.00 %"]
        assert two[3] == "2 (1 diverged)"
        assert two[7].startswith("+30.00 \u00b1 ")
        assert "noise" not in two[7]

    def test_the_members_of_an_ensemble_are_beside_their_average(self) -> None:
        """A record of an older version has no members, so it does not count."""
        results = results_of(grid={}, target=None)
        one, two = results.groups
        assert "top-1 of a member" not in comparison_table(results, [one, two], "").heads
        assert "members" not in render_csv(results).splitlines()[0]
        members = [(0.80, 0.84), (0.81, 0.87), ()]
        records = [replace(record, members=top1s) for record, top1s in zip(two.records, members, strict=True)]
        results = replace(results, groups=[one, replace(two, records=records)])
        table = comparison_table(results, results.groups, "")
        at = list(table.heads).index("top-1 of a member")
        assert table.heads[at - 1] == "top-1, mean and deviation"
        assert [row[at] for row in table.rows] == ["", "83.00 \u00b1 1.41 % (2 of 3)"]
        assert {len(row) for row in table.rows} == {len(table.heads)}
        rows = list(csv.DictReader(io.StringIO(render_csv(results))))
        assert [row["members"] for row in rows[-3:]] == ["0.8 0.84", "0.81 0.87", ""]

    def test_the_summary_begins_with_the_best_result(self) -> None:
        glance = list(summary_sentences(results_of()))
        best, one, _, critical, no_critical = glance
        assert_contains(best, "batch 1,024", "two", "90.00 \u00b1 1.41 %", "n = 2")
        assert_contains(one, "one: 90.00 \u00b1 1.00 % at 64", "batch 256")
        assert_contains(critical, "one: ", " 260 ")
        assert_contains(no_critical, "two: ", "50.0", "2 of 3")
        table = list(result_blocks(results_of()))
        assert isinstance(table[1], BulletBlock)
        assert [block.name for block in table if isinstance(block, LineBlock)] == [
            "accuracy",
            "epochs",
            "steps",
            "curves",
        ]

    def test_a_line_that_rises_over_the_axis_has_both_ends_in_the_summary(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(TOP1, ("one", 64), 0.3)
        glance = list(summary_sentences(results_of()))
        assert_contains(glance[1], "one: 30.00 \u00b1 1.00 % at 64", "60.00 \u00b1 1.00 % at 1,024")

    def test_an_axis_that_is_no_batch_has_both_ends_in_the_summary(self) -> None:
        grid = {"model.width": [8, 16], "train.global_batch": [256]}
        glance = list(summary_sentences(results_of(grid=grid, variants=[{"name": "one"}], target=None)))
        assert_contains(glance[0], "batch 256: ", "90.00 \u00b1 1.00 % at 8", "90.00 \u00b1 1.00 % at 16", "noise")

    def test_results_without_an_axis_are_drawn_as_rows_of_dots(self, tmp_path: Path) -> None:
        results = results_of(grid={"train.global_batch": [1024]}, target=None)
        rows = next(block for block in result_blocks(results) if isinstance(block, DotBlock)).rows
        assert [(row.name, row.values, row.note) for row in rows] == [
            ("one", pytest.approx([59.0, 60.0, 61.0]), "60.00 \u00b1 1.00 %"),
            ("two", pytest.approx([89.0, 91.0]), "90.00 \u00b1 1.41 %"),
        ]
        write_results(results, tmp_path, [])
        assert (tmp_path / "s-accuracy.svg").read_text().count("<circle") == 5
        assert (tmp_path / "s.html").read_text().count("dot pale") == 5

    def test_many_lines_are_distinguishable(self) -> None:
        variants = [{"name": f"v{i}"} for i in range(9)]
        charts = [block for block in result_blocks(results_of(variants=variants)) if isinstance(block, LineBlock)]
        for chart in charts:
            assert len({(line.colour, line.dashed) for line in chart.series}) == 9
        assert not any(line.spread for line in charts[-1].series), "nine bands would hide each other"

    def test_no_axis_of_accuracy_exceeds_100_percent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(TOP1, ("one", 64), 0.995)
        accuracy = next(block for block in result_blocks(results_of()) if isinstance(block, LineBlock))
        assert accuracy.y.limits == (50, 100)

    def test_lines_are_followed_over_the_full_range(self) -> None:
        table = range_table(results_of())
        assert list(table.heads) == ["", "64", "256", "1,024", "from 64 to 1,024"]
        assert table.rows[0][1:4] == ["90.00 \u00b1 1.00 %", "90.00 \u00b1 1.00 %", "60.00 \u00b1 1.00 %"]
        assert table.rows[0][4] == "-30.00 \u00b1 2.27"

    def test_an_unfinished_study_is_marked(self) -> None:
        grid = TrialGrid(StudyDocument.model_validate(STUDY))
        results = study_results(grid, lambda key: None)
        (sentence,) = summary_sentences(results)
        assert "21 trials" in sentence
        tables = [block for block in result_blocks(results) if isinstance(block, TableBlock)]
        assert not re.search(r"\d", tables[0].rows[0][1]), "no rate is chosen"


class TestPublished:
    def test_all_result_files_are_written(self, tmp_path: Path) -> None:
        table = write_results(results_of(), tmp_path, ["Command: `podscale study s`"])
        assert {path.name for path in table} == {path.name for path in tmp_path.iterdir()}
        text = (tmp_path / "s.md").read_text()
        assert_golden(PAGE, text.partition("| trial |")[0])
        for name in ("accuracy", "epochs", "steps", "curves"):
            assert f"(s-{name}.svg)" in text
            assert (tmp_path / f"s-{name}.svg").read_text().startswith("<svg")
        assert "level tinted c1" in (tmp_path / "s-steps.svg").read_text(), "the critical batch is marked"
        assert 'class="bar c1"' in (tmp_path / "s-accuracy.svg").read_text()
        assert 'class="band c1"' in (tmp_path / "s-curves.svg").read_text()
        page = (tmp_path / "s.html").read_text()
        assert page.count("<svg") == 4
        assert "batch 256" in page

    def test_the_results_of_a_component_refer_to_no_file_beside_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(result_files, "_recorded_results", lambda study: (results_of(), tmp_path / "results"))
        page, text = (SimpleNamespace(path=str(tmp_path / name)) for name in ("page", "text"))
        steps.findings(StudyDocument.model_validate(STUDY).model_dump_json(), page, text)
        markdown = Path(text.path).read_text()
        assert ": 21, 10 CPU minutes" in markdown
        assert ".svg" not in markdown
        assert Path(page.path).read_bytes() == (tmp_path / "results" / "s.html").read_bytes()

    def test_the_command_names_no_folder_of_this_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        command = "podscale study s.yaml --out results/learning --set 'a.b=[1, 2]'"
        typed = command.replace("s.yaml", "/home/me/s.yaml") + " --set data.source=/home/me/photos.tar"
        monkeypatch.setenv("PODSCALE_COMMAND", typed)
        assert f"`{command} --set data.source=photos.tar`" in measurement_conditions()[0]

    def test_trainings_of_unknown_cost_are_not_counted_as_free(self) -> None:
        results = results_of()
        first, *others = (replace(record, cpu_seconds=60.0) for record in results.records)
        free = [replace(record, cpu_seconds=0.0) for record in others[:2]]
        for records, numbers in (([first, *others], [21, 21]), ([first, *free], [3, 1, 2])):
            table = trial_table(cast(StudyResults, SimpleNamespace(records=records)))
            assert [int(number) for number in re.findall(r"\d+", table.caption)] == numbers

    def test_the_csv_file_has_a_row_for_each_trial(self) -> None:
        rows = list(csv.DictReader(io.StringIO(render_csv(results_of()))))
        assert len(rows) == 21  # two rates at three batches, two more seeds of one of them, three seeds of the other
        row = next(row for row in rows if row["train.optimizer.name"] == "lars" and row["train.global_batch"] == "256")
        assert (row["updates_to_target"], row["epochs_to_target"]) == ("200.0", "5.0")


class TestMeasuring:
    def test_a_training_is_read_from_its_log(self) -> None:
        trial = TrialGrid(StudyDocument.model_validate(STUDY)).due_trials(lambda key: None)[0]
        table = build_record(trial, "done", "", history(*LINES), images=100)
        assert (table.updates, table.top1, table.loss, table.masked, table.images) == (3, 0.6, 1.0, 1, 100)
        assert table.training_loss == pytest.approx(1.3)
        assert table.curve == (EvaluationPoint(3, 2.2, 0.6, 1.0),)
        assert build_record(trial, "diverged", "why", history(*LINES[:4]), images=100).top1 is None

    def test_only_divergence_is_a_result(self) -> None:
        assert trial_outcome(0, "", history(*LINES)) == "done"
        assert trial_outcome(1, f"9 steps in a row {NONFINITE_MESSAGE} (train", history(*LINES[:3])) == "diverged"
        assert trial_outcome(0, "", history(*LINES[:3], {**LINES[3], "loss": None}, LINES[4])) == "diverged"
        assert trial_outcome(1, "was killed by SIGSEGV", history(*LINES[:3])) is None
        assert trial_outcome(75, "stopped on request", history(*LINES[:3])) is None
