"""A small SVG chart module: lines, bars, a stacked bar, a heat map and the reliability diagram.

No script: values show on hover by CSS and by SVG titles, so that the file works in a sandbox. Colours are classes and
CSS variables (style.css), so that light and dark pages share one drawing.
"""

from podscale.evaluate.report.charts.bars import class_bars, ranked_counts, stacked_bar
from podscale.evaluate.report.charts.heatmap import heatmap
from podscale.evaluate.report.charts.lines import Series, line_chart
from podscale.evaluate.report.charts.reliability import reliability_diagram
from podscale.evaluate.report.charts.schedule import curves_of, schedule_chart

__all__ = [
    "Series",
    "class_bars",
    "curves_of",
    "heatmap",
    "line_chart",
    "ranked_counts",
    "reliability_diagram",
    "schedule_chart",
    "stacked_bar",
]
