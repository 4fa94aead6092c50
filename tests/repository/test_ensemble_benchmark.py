"""Runs and tables of benchmarks/ensemble, without its training."""

from pathlib import Path

import pytest

from benchmarks.ensemble.cases import TASKS, Task, build_comparison
from benchmarks.ensemble.page import picture, section
from benchmarks.ensemble.results import BEST, ENSEMBLE, LONG, MEAN, RESTARTS, ScoreRow, differences, points, rows
from benchmarks.measure import MeanInterval
from podscale.evaluation.ensemble_scores import Combination, EnsembleScores, ScoreSummary, SingleModel
from podscale.runs.predictions import COMBINE_METHODS
from podscale.training.schedules import step_table


def scores(top1: float, passes: int = 1) -> ScoreSummary:
    return ScoreSummary(
        top1=top1, top1_interval=(0, 1), top5=1.0, loss=2 * (1 - top1), passes=passes, images_per_second=None
    )


def evaluated(member_top1: list[float], ensemble_top1: float) -> EnsembleScores:
    """Return an evaluation of models with these accuracies."""
    members = [
        SingleModel(
            name="m",
            directory="m",
            model="resnet18",
            model_sha256="",
            started_from=None,
            started_epoch=None,
            epochs_before=0.0,
            epochs=2.0,
            answered=scores(top1),
            average=None,
        )
        for top1 in member_top1
    ]
    combined = [
        Combination(way=way, answered=scores(ensemble_top1, 2), statistics_seconds=None) for way in COMBINE_METHODS
    ]
    return EnsembleScores(
        combine="probabilities", members=members, combined=combined, disagreement=[], epochs=4.0, baseline=None
    )


def seed(long: float, members: list[float], ensemble: float) -> dict[str, ScoreRow]:
    singles = evaluated([long, 0.5, 0.5], 0.5)
    return rows(evaluated(members, ensemble), evaluated([0.4, 0.6], 0.55), singles)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_all_alternatives_train_for_the_same_epochs(task: Task) -> None:
    runs = build_comparison(task, 3, Path("/work"), task.source or "photographs.tar")
    in_cycles = runs.cycles.train.epochs + sum(member.train.epochs for member in runs.members)
    restarted = sum(restart.train.epochs for restart in runs.restarts)
    assert len(runs.members) == len(runs.restarts) == 3
    assert in_cycles == runs.ending.train.epochs == runs.single.train.epochs == pytest.approx(restarted)
    seeds = [config.run.seed for config in (*runs.members, *runs.restarts, runs.single)]
    assert len(set(seeds)) == len(seeds)
    assert len({config.run.id for config in runs.trained}) == len(runs.trained)
    others = build_comparison(task, 4, Path("/work"), "x").trained
    assert not {config.run.seed for config in runs.trained} & {config.run.seed for config in others}


def test_one_long_run_ends_as_a_member_does() -> None:
    """The last two epochs have the rates of a member, after a decay to almost zero."""
    runs = build_comparison(TASKS["digits"], 1, Path("/work"), "digits")
    member, ending = (step_table(config.train, 1438)[:, 0] for config in (runs.members[0], runs.ending))
    assert ending[-len(member) :] == pytest.approx(member, rel=0.05)
    assert ending[-len(member) - 1] < 1e-3 * ending.max()


def test_differences_are_those_of_the_same_seed() -> None:
    by_seed = [seed(0.8, [0.7, 0.9], 0.9), seed(0.6, [0.6, 0.5], 0.8)]
    assert [rows[BEST].top1 for rows in by_seed] == [0.9, 0.6]
    assert [rows[MEAN].top1 for rows in by_seed] == pytest.approx([0.8, 0.55])
    gains = differences(by_seed)
    assert LONG not in gains
    assert gains[ENSEMBLE] == pytest.approx([10, 20])
    interval = MeanInterval.of(gains[ENSEMBLE])
    assert (interval.mean, interval.half) == (pytest.approx(15), pytest.approx(12.71 * 50**0.5 / 2**0.5))
    assert (by_seed[0][ENSEMBLE].passes, by_seed[0][RESTARTS].epochs, points(by_seed[0][LONG])) == (2, 4.0, 80.0)


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ([0.02, 0.021, 0.022], "The effect appears"),
        ([-0.02, 0.0, 0.03], "The effect does not appear"),
        ([-0.02, -0.021, -0.022], "The opposite appears"),
    ],
)
def test_the_page_states_the_conclusion_of_the_differences(gains: list[float], words: str) -> None:
    by_seed = [seed(0.8, [0.7, 0.8], 0.8 + gain) for gain in gains]
    task = TASKS["digits"]
    page = "\n".join(section(task, build_comparison(task, 1, Path("/work"), "digits"), by_seed, "p.svg"))
    assert words in page
    assert "n = 3" in page
    assert f"| {ENSEMBLE} | 4 | 2 |" in page
    drawn = picture("title", differences(by_seed))
    assert drawn.count('class="fill quiet"') == 3 * (len(by_seed[0]) - 1)
