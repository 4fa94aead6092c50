"""What benchmarks/ensemble compares, and what it makes of the figures; its trainings are not run here."""

from pathlib import Path

import pytest

from benchmarks.ensemble.cases import FAMILIES, Family, comparison
from benchmarks.ensemble.picture import picture
from benchmarks.ensemble.rows import BEST, LONG, MEAN, RESTARTS, TOGETHER, Row, Spread, differences, points, rows
from benchmarks.ensemble.table import section
from podscale.evaluation.ensemble_scores import Combination, EnsembleScores, ScoreSummary, SingleModel
from podscale.runs.predictions import COMBINE_METHODS
from podscale.training.schedules import step_table


def answered(top1: float, passes: int = 1) -> ScoreSummary:
    return ScoreSummary(
        top1=top1, top1_interval=(0, 1), top5=1.0, loss=2 * (1 - top1), passes=passes, images_per_second=None
    )


def evaluated(shares: list[float], together: float) -> EnsembleScores:
    """An evaluation of models with these accuracies, the combination of all ways having one."""
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
            answered=answered(share),
            average=None,
        )
        for share in shares
    ]
    combined = [
        Combination(way=way, answered=answered(together, 2), statistics_seconds=None) for way in COMBINE_METHODS
    ]
    return EnsembleScores(
        combine="probabilities", members=members, combined=combined, disagreement=[], epochs=4.0, baseline=None
    )


def seed(long: float, members: list[float], together: float) -> dict[str, Row]:
    singles = evaluated([long, 0.5, 0.5], 0.5)
    return rows(evaluated(members, together), evaluated([0.4, 0.6], 0.55), singles)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_all_sides_take_the_same_epochs(family: Family) -> None:
    sides = comparison(family, 3, Path("/work"), family.source or "photographs.tar")
    in_cycles = sides.cycles.train.epochs + sum(member.train.epochs for member in sides.members)
    restarted = sum(restart.train.epochs for restart in sides.restarts)
    assert len(sides.members) == len(sides.restarts) == 3
    assert in_cycles == sides.ending.train.epochs == sides.single.train.epochs == pytest.approx(restarted)
    seeds = [config.run.seed for config in (*sides.members, *sides.restarts, sides.single)]
    assert len(set(seeds)) == len(seeds)
    assert len({config.run.id for config in sides.trained}) == len(sides.trained)
    others = comparison(family, 4, Path("/work"), "x").trained
    assert not {config.run.seed for config in sides.trained} & {config.run.seed for config in others}


def test_one_long_run_ends_as_a_member_does() -> None:
    """Rates of the last two epochs, with the peak of the first cycle; before, the decay has come to its end."""
    sides = comparison(FAMILIES["digits"], 1, Path("/work"), "digits")
    member, ending = (step_table(config.train, 1438)[:, 0] for config in (sides.members[0], sides.ending))
    assert ending[-len(member) :] == pytest.approx(member, rel=0.05)
    assert ending[-len(member) - 1] < 1e-3 * ending.max()


def test_differences_are_those_of_the_same_seed() -> None:
    seen = [seed(0.8, [0.7, 0.9], 0.9), seed(0.6, [0.6, 0.5], 0.8)]
    assert [one[BEST].top1 for one in seen] == [0.9, 0.6]
    assert [one[MEAN].top1 for one in seen] == pytest.approx([0.8, 0.55])
    found = differences(seen)
    assert LONG not in found
    assert found[TOGETHER] == pytest.approx([10, 20])
    spread = Spread.of(found[TOGETHER])
    assert (spread.mean, spread.half) == (pytest.approx(15), pytest.approx(12.71 * 50**0.5 / 2**0.5))
    assert (seen[0][TOGETHER].passes, seen[0][RESTARTS].epochs, points(seen[0][LONG])) == (2, 4.0, 80.0)


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ([0.02, 0.021, 0.022], "The effect appears"),
        ([-0.02, 0.0, 0.03], "The effect does not appear"),
        ([-0.02, -0.021, -0.022], "The opposite appears"),
    ],
)
def test_the_page_says_what_the_differences_decide(gains: list[float], words: str) -> None:
    seen = [seed(0.8, [0.7, 0.8], 0.8 + gain) for gain in gains]
    family = FAMILIES["digits"]
    page = "\n".join(section(family, comparison(family, 1, Path("/work"), "digits"), seen, "p.svg"))
    assert words in page
    assert "n = 3" in page
    assert f"| {TOGETHER} | 4 | 2 |" in page
    drawn = picture("title", differences(seen))
    assert drawn.count('class="fill quiet"') == 3 * (len(seen[0]) - 1)
