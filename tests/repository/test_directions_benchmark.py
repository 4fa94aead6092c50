"""Pages of `benchmarks.directions`: tables and pictures of recorded steps (test_benchmarks trains its small form)."""

import math
from pathlib import Path

import pytest

from benchmarks import directions
from benchmarks.directions import GRADIENT, SLOPE, CloseUp, Rows, close_up_table, points_of


def rows_of(push: list[float | None], base_rate: float | None = None) -> Rows:
    """Return recorded steps whose loss is the number of the step."""
    value = {"length": 0.01, "angle": 0.5, "slope_left": -0.2, "beta": 0.7, "momentum": 0.9, "base_rate": base_rate}
    value |= {"gradient": 3.0, "clipped": 0.0}
    return [{**value, "loss": float(step), "push": one} for step, one in enumerate(push, start=1)]


def test_single_steps_begin_before_the_first_run_has_its_value() -> None:
    series = {"with": rows_of([None, None, 1.25, 0.5]), "without": rows_of([None, None, None, 0.0])}
    caption, _, heads, _, *lines = close_up_table(CloseUp(("with", "without"), "push", "the push", 3), series)
    assert "second" in caption
    assert heads == (
        "| step | with: loss | with: step / weights | with: push / gradient "
        "| without: loss | without: step / weights | without: push / gradient |"
    )
    assert lines == [
        "| 2 | 2.00 | 0.0100 |  | 2.00 | 0.0100 |  |",
        "| 3 | 3.00 | 0.0100 | 1.2500 | 3.00 | 0.0100 |  |",
        "| 4 | 4.00 | 0.0100 | 0.5000 | 4.00 | 0.0100 | 0.0000 |",
    ]


def test_a_picture_has_medians_within_its_limits_or_the_share_of_the_steps() -> None:
    rows: Rows = [
        {"slope_left": float(step), "gradient": float(step), "clipped": float(step % 5 < 2)} for step in range(60)
    ]
    [clipped] = [each for each in directions.FAMILIES["nlcg"].pictures if each.value == "clipped"]
    assert points_of(SLOPE, rows)[:2] == [(7.0, 2.0), (12.0, 2.0)]
    assert points_of(GRADIENT, rows)[:2] == [(7.0, math.log10(7.0)), (12.0, math.log10(12.0))]
    assert points_of(clipped, rows)[0] == (14.5, pytest.approx(0.4))
    assert points_of(GRADIENT, [{"gradient": None}]) == []


@pytest.mark.parametrize("name", directions.FAMILIES)
def test_a_page_has_the_pictures_of_its_family(name: str, tmp_path: Path) -> None:
    runs = directions.FAMILIES[name].runs
    trained = {run: (rows_of([None] * 20 + [0.5] * 40, 0.25), 0.5) for run in runs}
    directions.write_page(tmp_path, name, ["# Head", ""], trained)
    page = (tmp_path / f"{name}-direction.md").read_text(encoding="utf-8")
    assert ("base-rate" in page) == (name == "nlcg"), "the base rate over the steps"
    assert ("Single steps" in page) == (name == "neumann")
    for picture in directions.FAMILIES[name].pictures:
        file = f"{name}-direction-{picture.value.replace('_', '-')}.svg"
        assert f"]({file})" in page
        assert next(iter(runs)) in (tmp_path / file).read_text(encoding="utf-8"), "a line for each run"
