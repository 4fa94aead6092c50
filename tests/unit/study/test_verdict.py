"""Searches, criteria and verdicts of a study: which options are chosen, by which images, and when it passes."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.study import StudyDocument
from podscale.study.grid import TrialGrid
from podscale.study.records import EvaluationPoint, TrialRecord
from podscale.study.result_files import write_results
from podscale.study.result_text import comparison_table, parting_table, summary_sentences
from podscale.study.results import StudyResults, study_results
from podscale.study.seed_statistics import paired_difference
from podscale.study.sweep_series import Trial
from podscale.study.verdict import StudyVerdict, judge_criterion, study_verdict
from tests.support.refusals import invalid, refused

RATE, TRUST = "train.schedule.learning_rate", "train.optimizer.trust_coefficient"
STUDY: dict[str, Any] = {
    "name": "s",
    "run": {"train": {"epochs": 10}},
    "seeds": [1, 2, 3],
    "selection": {"set": {"data.holdout_fraction": 0.1}, "seeds": [101]},
    "variants": [
        {"name": "SGD", "search": {RATE: [0.1, 0.2, 0.4, 0.8]}},
        {"name": "LARS", "set": {"train.optimizer.name": "lars"}, "search": {TRUST: [0.001, 0.01], RATE: [1.0, 2.0]}},
        {"name": "copy", "set": {"train.label_smoothing": 0}, "search_of": "SGD"},
    ],
    "criteria": [{"name": "ahead", "variant": "LARS", "than": "SGD", "above": 0.02}],
}
Top1 = Callable[[Trial], float | None]


def build_study(**changes: Any) -> StudyDocument:
    return StudyDocument.model_validate({**STUDY, **changes})


def results_of(top1: Top1, *, only: Callable[[Trial], bool] = lambda trial: True, **changes: Any) -> StudyResults:
    """Return the results of a study whose trials have these last accuracies; trials that `only` refuses never run."""
    grid = TrialGrid(build_study(**changes))
    records: dict[str, TrialRecord] = {}
    while due := [trial for trial in grid.due_trials(records.get) if only(trial)]:
        for trial in due:
            last = top1(trial)
            curve = () if last is None else (EvaluationPoint(10, 1.0, last / 2), EvaluationPoint(100, 10.0, last))
            ended: Any = "diverged" if last is None else "done"
            records[trial.key] = TrialRecord(
                trial.key, ended, dict(trial.settings), trial.seed, top1=last, loss=1.0, curve=curve, updates=100
            )
    return study_results(grid, records.get)


def rule(trial: Trial) -> str:
    return trial.series.partition(",")[0]


def is_selection(trial: Trial) -> bool:
    return trial.config.data.holdout_fraction is not None


def typical(trial: Trial) -> float:
    """Return 0.70 to 0.72 for LARS, 0.65 to 0.66 for SGD; 0.2 and trust 0.01 with 2.0 are best in the selection."""
    if is_selection(trial):
        good = trial.rate == 0.2 if rule(trial) == "SGD" else trial.choice == {TRUST: 0.01, RATE: 2.0}
        return 0.6 if good else 0.5
    return {"LARS": 0.69, "SGD": 0.645, "copy": 0.6}[rule(trial)] + 0.01 * trial.seed - 0.005 * (rule(trial) != "LARS")


class TestSearch:
    def test_options_are_chosen_by_held_out_images_alone(self) -> None:
        results = results_of(typical)
        choices = {group.line: group.choice for group in results.groups}
        assert choices == {"SGD": {RATE: 0.2}, "LARS": {TRUST: 0.01, RATE: 2.0}, "copy": {RATE: 0.2}}
        for group in results.groups:
            assert [record.seed for record in group.records] == [1, 2, 3]
            assert not any("data.holdout_fraction" in record.settings for record in group.records)
            for _, records in group.candidates:
                assert [record.settings["data.holdout_fraction"] for record in records] == [0.1]
                assert [record.seed for record in records] == [101]
        assert [len(group.candidates) for group in results.groups] == [4, 4, 0]

    def test_a_choice_at_the_edge_of_its_search_is_reported(self) -> None:
        text = "\n".join(summary_sentences(results_of(typical)))
        assert "searched" not in text, "0.2 is inside; of two values none is an edge"
        at_the_end = results_of(lambda trial: trial.rate / 10 if is_selection(trial) else typical(trial))
        assert re.search("SGD: rate 0.8 .* largest .* searched", "\n".join(summary_sentences(at_the_end)))

    def test_no_seed_runs_before_the_whole_search(self) -> None:
        grid = TrialGrid(build_study())
        due = grid.due_trials(lambda key: None)
        assert len(due) == 8
        assert all(is_selection(trial) for trial in due)
        assert len(grid.pending_trials(lambda key: None)) == 9
        results = results_of(typical, only=lambda trial: is_selection(trial) and trial.rate != 0.8)
        assert results.groups[0].choice is None, "one candidate of four is missing"
        assert results.groups[1].choice is not None

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"variants": [*STUDY["variants"][:1], {"name": "b", "search": {RATE: [1.0]}}]}, "variants.search"),
            ({"selection": None}, "selection"),
            ({"seeds": [1, 2]}, "seeds"),
            ({"variants": [{"name": "a", "search_of": "b"}, {"name": "b"}], "criteria": []}, "search_of"),
            ({"grid": {RATE: [1.0, 2.0]}}, f"search.{RATE}"),
            ({"criteria": [{"name": "x", "variant": "LARS", "than": "SDG"}]}, "criteria"),
            ({"criteria": [{"name": "x", "variant": "LARS", "than": "SGD", "at": {RATE: 1}}]}, "criteria.at"),
            ({"criteria": [{"name": "x", "variant": "LARS", "than": "SGD", "above": 0, "equal": 1}]}, "equal"),
            ({"criteria": [{"name": "x", "variant": "LARS", "than": "SGD", "premise": True}]}, "premise"),
            ({"learning_rate": {"at": 1.0}}, "learning_rate"),
        ],
    )
    def test_unfair_studies_are_refused(self, changes: dict[str, Any], field: str) -> None:
        with invalid(field=field):
            build_study(**changes)

    def test_a_sweep_on_the_reported_images_has_no_criteria(self) -> None:
        variants = [{"name": name, "learning_rate": {"at": 0.1, "sweep": {}}} for name in ("LARS", "SGD")]
        with invalid("`search`", field="learning_rate.sweep"):
            build_study(variants=variants)

    def test_a_selection_without_held_out_images_is_refused(self) -> None:
        with refused(field="selection.set"):
            TrialGrid(build_study(selection={"set": {"train.epochs": 5}}))

    def test_different_budgets_are_refused_unless_the_criterion_allows_them(self) -> None:
        longer = {**STUDY["variants"][1], "set": {"train.optimizer.name": "lars", "train.epochs": 12}}
        variants = [STUDY["variants"][0], longer]
        with refused(field="criteria.budget", got="ahead"):
            TrialGrid(build_study(variants=variants))
        TrialGrid(build_study(variants=variants, criteria=[{**STUDY["criteria"][0], "budget": "free"}]))

    def test_an_ensembles_budget_includes_its_collapses(self) -> None:
        ensemble = {"cycles": [4, 3], "collapse": {"epochs": 1.5}}
        members = {"name": "LARS", "set": {"train.epochs": 7, "ensemble": ensemble}}
        TrialGrid(build_study(variants=[{"name": "SGD"}, members]))
        ensemble["collapse"] = {"epochs": 2}
        with refused(field="criteria.budget"):
            TrialGrid(build_study(variants=[{"name": "SGD"}, members]))


class TestStatistics:
    def test_the_interval_of_pairs_excludes_what_they_share(self) -> None:
        first, second = np.array([0.60, 0.70, 0.80]), np.array([0.63, 0.74, 0.83])
        difference = paired_difference(list(second - first))
        expected = 4.302653 * np.std(second - first, ddof=1) / math.sqrt(3)  # t of 2 degrees, 97.5 %
        assert difference.value == pytest.approx(0.1 / 3)
        assert difference.half_width == pytest.approx(expected, rel=2e-3)
        assert not difference.is_noise

    def test_the_table_of_a_study_with_criteria_pairs_the_seeds(self) -> None:
        results = results_of(lambda trial: typical(trial) + 0.1 * trial.seed * (trial.seed < 9))
        table = comparison_table(results, results.groups, "")
        assert [row[1] for row in table.rows[:2]] == ["rate 0.2", "trust coefficient 0.01, rate 2"]
        assert table.rows[1][5] == "+5.00 \u00b1 0.00"
        unpaired = results_of(lambda trial: typical(trial) + 0.1 * trial.seed * (trial.seed < 9), criteria=[])
        assert "within noise" in comparison_table(unpaired, unpaired.groups, "").rows[1][5]


def verdict_of(differences: list[float], **threshold: Any) -> str:
    """Return the verdict of a criterion on pairs with these differences of top-1."""

    def top1(trial: Trial) -> float:
        return 0.5 if is_selection(trial) else 0.5 + (rule(trial) == "LARS") * differences[trial.seed - 1]

    criterion = {"name": "x", "variant": "LARS", "than": "SGD", **threshold}
    return study_verdict(results_of(top1, criteria=[criterion])).verdict


class TestVerdict:
    def test_a_study_passes_by_the_lower_end_of_the_interval(self) -> None:
        verdict = study_verdict(results_of(typical))
        assert verdict.verdict == "passed"
        (result,) = verdict.criteria
        assert (result.variant, result.other, result.n) == ("LARS", "SGD", 3)
        assert result.value == pytest.approx(0.05)
        assert result.half_width == pytest.approx(0.0, abs=1e-9)

    @pytest.mark.parametrize(
        ("differences", "threshold", "expected"),
        [
            ([0.03, 0.031, 0.029], {"above": 0.02}, "passed"),
            ([0.03, 0.04, 0.02], {"above": 0.02}, "undecided"),  # 3.0 +- 2.5 points
            ([0.01, 0.011, 0.009], {"above": 0.02}, "failed"),
            ([0.01, 0.011, 0.009], {"below": 0.02}, "passed"),
            ([0.03, 0.031, 0.029], {"below": 0.02}, "failed"),
            ([0.002, -0.002, 0.001], {"equal": 0.01}, "passed"),  # 0.03 +- 0.52 points
            ([0.03, -0.03, 0.01], {"equal": 0.01}, "undecided"),
            ([0.005, 0.0051, 0.0049], {"equal": 0.01}, "failed"),
            ([0.03, 0.03, 0.03], {}, "reported"),
        ],
    )
    def test_each_threshold(self, differences: list[float], threshold: dict[str, float], expected: str) -> None:
        assert verdict_of(differences, **threshold) == expected

    def test_curves_that_should_be_equal_have_their_distance_at_each_evaluation(self) -> None:
        """LARS is 5 points ahead with two seeds and 5 behind with one; in the middle by half of that."""
        results = results_of(
            lambda trial: 0.6 + 0.05 * (rule(trial) == "LARS") * (1 if trial.seed != 2 else -1),
            criteria=[{"name": "equal", "variant": "LARS", "than": "SGD", "equal": 0.01}],
        )
        table = parting_table(results, study_verdict(results))
        assert table is not None
        assert table.heads == ["epoch", "LARS and SGD"]
        assert table.rows == [["1.0", "2.50"], ["10.0", "5.00"]]
        other = results_of(typical)
        assert parting_table(other, study_verdict(other)) is None, "a criterion of being ahead needs none"

    def test_nothing_is_decided_before_every_seed_ran(self) -> None:
        results = results_of(typical, only=lambda trial: trial.seed != 3)
        verdict = study_verdict(results)
        assert verdict.verdict == "not-run"
        assert (verdict.criteria[0].n, verdict.criteria[0].value) == (2, None)

    def test_a_diverged_training_counts_as_top1_0(self) -> None:
        def top1(trial: Trial) -> float | None:
            return None if rule(trial) == "LARS" and trial.seed == 2 else typical(trial)

        verdict = study_verdict(results_of(top1))
        assert verdict.criteria[0].n == 3
        assert verdict.verdict == "undecided"

    def test_the_best_of_several_is_the_best_in_the_selection_not_in_the_results(self) -> None:
        def top1(trial: Trial) -> float:
            return typical(trial) - (0.1 if is_selection(trial) and rule(trial) == "LARS" else 0.0)

        adam = {"name": "Adam", "search": {RATE: [3.0, 4.0, 5.0, 6.0]}, "set": {"train.optimizer.name": "adam"}}
        criterion = {"name": "x", "variant": "Adam", "than": ["LARS", "SGD"], "above": 0}
        results = results_of(
            lambda trial: 0.5 if rule(trial) == "Adam" else top1(trial),
            variants=[*STUDY["variants"], adam],
            criteria=[criterion],
        )
        assert judge_criterion(results, results.study.criteria[0]).other == "SGD"

    def test_without_its_premise_a_study_decides_nothing(self) -> None:
        premise = {"name": "p", "variant": "copy", "than": "SGD", "above": 0.05, "premise": True}
        assert study_verdict(results_of(typical, criteria=[premise, *STUDY["criteria"]])).verdict == "premise-not-met"
        holds = {**premise, "above": -0.1}
        assert study_verdict(results_of(typical, criteria=[holds, *STUDY["criteria"]])).verdict == "passed"

    def test_one_criterion_is_enough_if_the_document_says_any(self) -> None:
        worse = {"name": "w", "variant": "copy", "than": "SGD", "above": 0}
        criteria = [worse, *STUDY["criteria"]]
        assert study_verdict(results_of(typical, criteria=criteria, passes="any")).verdict == "passed"
        assert study_verdict(results_of(typical, criteria=criteria)).verdict == "failed"
        assert study_verdict(results_of(typical, criteria=[worse], passes="any")).verdict == "failed"

    def test_steps_are_counted_to_the_accuracy_of_the_other(self) -> None:
        criterion = {"name": "x", "variant": "LARS", "than": "SGD", "measure": "steps", "below": 0.9}
        (result,) = study_verdict(results_of(typical, criteria=[criterion])).criteria
        # LARS reaches SGD's 0.65 to 0.67 on the straight line from (10 steps, half of its last top-1) to (100, last)
        last, goal = np.array([0.70, 0.71, 0.72]), np.array([0.65, 0.66, 0.67])
        ratios = (10 + 90 * (goal - last / 2) / (last / 2)) / 100
        assert result.value == pytest.approx(float(np.mean(ratios)))
        assert result.verdict == "passed"
        assert result.criterion == "ratio of steps < 0.9 at 95 %"
        more = {**criterion, "below": None, "above": 0.5}
        (result,) = study_verdict(results_of(typical, criteria=[more])).criteria
        assert result.criterion == "ratio of steps > 0.5 at 95 %"
        slower = {**criterion, "variant": "SGD", "than": "LARS"}
        assert study_verdict(results_of(typical, criteria=[slower])).verdict == "failed"

    def test_a_baseline_that_diverged_has_no_accuracy_to_reach(self) -> None:
        def top1(trial: Trial) -> float | None:
            return None if rule(trial) == "SGD" and trial.seed == 2 else typical(trial)

        criterion = {"name": "x", "variant": "LARS", "than": "SGD", "measure": "steps", "below": 0.9}
        (diverged,) = study_verdict(results_of(top1, criteria=[criterion])).criteria
        (slower,) = study_verdict(
            results_of(typical, criteria=[{**criterion, "variant": "SGD", "than": "LARS"}])
        ).criteria
        assert (diverged.verdict, diverged.value) == (slower.verdict, slower.value) == ("failed", None)
        assert "diverged" in diverged.sentence
        assert "diverged" not in slower.sentence


def written(verdict: StudyVerdict, results: StudyResults, folder: Path) -> dict[str, Any]:
    write_results(results, folder, [])
    content: dict[str, Any] = json.loads((folder / "s.verdict.json").read_text())
    assert content["verdict"] == verdict.verdict
    return content


class TestVerdictFile:
    def test_a_generator_can_read_it(self, tmp_path: Path) -> None:
        results = results_of(typical, papers=["You 2017"])
        content = written(study_verdict(results), results, tmp_path)
        assert (content["format"], content["study"], content["papers"]) == (1, "s", ["You 2017"])
        assert content["trials"] == {"done": 17, "left": 0}
        assert content["trainings"] == {"done": 9, "expected": 9}
        assert content["criteria"][0]["value"] == pytest.approx(0.05)
        assert content["criteria"][0]["sentence"] in content["sentence"]
        assert content["sentence"] in (tmp_path / "s.md").read_text()

    def test_a_study_that_has_not_run_says_so(self, tmp_path: Path) -> None:
        results = results_of(typical, only=lambda trial: False)
        content = written(study_verdict(results), results, tmp_path)
        assert content["verdict"] == "not-run"
        assert content["criteria"][0]["value"] is None
        assert content["protocol"]["launch"] is None
