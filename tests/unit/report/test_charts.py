"""Charts: round ticks, decimation that keeps extremes, marks at the data."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podscale.report import markup
from podscale.report.charts.bars import heatmap, ranked_count_chart, stacked_bar_chart
from podscale.report.charts.lines import (
    MAX_POINTS,
    RIGHT,
    WIDTH,
    LineSeries,
    Scale,
    XAxis,
    YAxis,
    decimate,
    line_chart,
    line_drawing,
    linear_ticks,
    round_outwards,
)
from podscale.report.charts.standalone import DotRow, dots_drawing


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_inside_and_not_too_many(low: float, span: float) -> None:
    ticks = linear_ticks(low, low + span)
    assert 2 <= len(ticks) <= 7
    assert low - span * 1e-6 <= ticks[0]
    assert ticks[-1] <= low + span * (1 + 1e-6)
    steps = [b - a for a, b in pairwise(ticks)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-5)
    mantissa = float(f"{steps[0]:.3e}".split("e")[0])
    assert min(abs(mantissa - nice) for nice in (1, 2, 5, 10)) < 0.01


def test_the_range_is_widened_to_ticks() -> None:
    assert round_outwards(0.13, 2.31) == pytest.approx((0, 2.5))
    low, high = round_outwards(3.0, 3.0)
    assert low < 3 < high


def test_a_logarithmic_scale_has_powers_of_ten() -> None:
    scale = Scale(0.02, 300, 0, 100, log=True)
    assert scale.ticks() == pytest.approx([0.1, 1, 10, 100])
    assert scale(300) == pytest.approx(100)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=3000), st.integers(0, 2999))
def test_decimation_keeps_ends_and_extremes_in_order(values: list[float], spike: int) -> None:
    values[spike % len(values)] = 1e6
    points = [(float(i), value) for i, value in enumerate(values)]
    decimated = decimate(points, MAX_POINTS)
    assert len(decimated) <= MAX_POINTS + 2
    assert decimated[0] == points[0]
    assert decimated[-1] == points[-1]
    assert {max(values), min(values)} <= {y for _, y in decimated}
    assert [x for x, _ in decimated] == sorted({x for x, _ in decimated})


def test_a_line_goes_through_its_points() -> None:
    drawn = line_chart("t", [LineSeries("a", [(0, 0.0), (5, 10.0), (10, 5.0)])], y=YAxis(limits=(0, 10)))
    path = re.search(r'd="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', drawn)
    assert path is not None
    x0, y0, x1, y1, x2, y2 = (float(v) for v in path.groups())
    assert (x0 + x2) / 2 == pytest.approx(x1)
    assert (y0 + y1) / 2 == pytest.approx(y2)
    assert y1 < y0  # y grows downwards in SVG
    assert "10 at epoch 5" in drawn


def test_a_single_point_and_a_constant_are_drawn() -> None:
    assert "<circle" in line_chart("t", [LineSeries("a", [(1, 0.5)])])
    assert "NaN" not in line_chart("t", [LineSeries("a", [(1, 0.5), (2, 0.5)])])


def test_a_wide_loss_is_drawn_logarithmically() -> None:
    drawn = line_chart("t", [LineSeries("a", [(1, 100.0), (2, 0.01)])], y=YAxis(log=True))
    assert ">0.1<" in drawn
    assert ">10<" in drawn


def test_marked_values_without_a_point_lie_within_the_axis() -> None:
    """A batch at which no line reached the target still has its place."""
    drawn = line_drawing([LineSeries("a", [(64, 2.0), (256, 1.0)])], x=XAxis(ticks=[64, 256, 1438], log=True))
    places = [float(v) for v in re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="middle"', drawn)]
    assert len(places) == 3
    assert places == sorted(places)
    assert places[-1] < WIDTH - RIGHT


def test_dots_are_drawn_at_their_values() -> None:
    drawn = dots_drawing(
        [DotRow("a", [90.0, 100.0]), DotRow("b", [97.0], 2), DotRow("c", [], 3, "diverged")], x_range=(0, 100)
    )
    low, high, other = (float(x) for x in re.findall(r'cx="([\d.]+)"', drawn))
    assert (other - low) / (high - low) == pytest.approx(0.7, abs=1e-3)
    means = [float(x) for x in re.findall(r'x1="([\d.]+)"[^>]* class="line', drawn)]
    assert means == pytest.approx([(low + high) / 2, other], abs=0.01)
    level = re.search(r'x1="([\d.]+)"[^>]* class="level"', drawn)
    assert level is not None
    assert float(level[1]) == means[0]
    assert ">diverged<" in drawn


def test_shares_of_the_bar_add_up() -> None:
    widths = re.findall(r'width="([\d.]+)" height="34"', stacked_bar_chart("t", [("a", 3.0), ("b", 1.0)]))
    assert [float(w) for w in widths] == pytest.approx([748.5, 248.5])


def test_the_heat_map_has_a_cell_a_pair() -> None:
    drawn = heatmap("t", ["a", "b", "c"], [[5, 0, 1], [0, 0, 0], [2, 0, 3]])
    assert drawn.count('class="cell"') == 9
    assert drawn.count('class="right"') == 2
    assert drawn.count('class="wrong"') == 2
    assert "a predicted as c: 1 of 6" in drawn


def test_a_thousand_classes_are_one_path() -> None:
    drawn = ranked_count_chart("t", list(range(1, 1001)), "split train")
    assert len(drawn) < 40_000
    for part in ("largest 1\u202f000", "median 500", "smallest 1"):
        assert part in drawn


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (markup.format_percent(0.97216, 2), "97.22\u202f%"),
        (markup.format_percent(None), "\u2013"),
        (markup.format_integer(1281167), "1\u202f281\u202f167"),
        (markup.format_rate(3.14159), "3.14"),
        (markup.format_rate(12345.6), "12\u202f346"),
        (markup.format_seconds(0.0123), "12.3 ms"),
        (markup.format_seconds(0.9996), "1.0 s"),
        (markup.format_seconds(59.6), "1 min 00 s"),
        (markup.format_seconds(250), "4 min 10 s"),
        (markup.format_seconds(3600 * 2 + 300), "2 h 05 min"),
        (markup.format_size(1_470_000), "1.47 MB"),
        (markup.format_size(999_600), "1 MB"),
        (markup.format_short(9999.7), "10k"),
        (markup.format_short(0.00002), "2e-5"),
        (markup.format_short(1_500_000), "1.5M"),
        (markup.format_short(0.5), "0.5"),
    ],
)
def test_numbers_are_formatted(shown: str, text: str) -> None:
    assert shown == text
