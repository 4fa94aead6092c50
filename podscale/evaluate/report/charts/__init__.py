"""A small SVG chart module: lines, bars, a stacked bar, a heat map and the reliability diagram.

No script: values show on hover by CSS and by SVG titles, so that the file works in a sandbox. Colours are classes and
CSS variables (style.css), so that light and dark pages share one drawing.
"""

from podscale.evaluate.report.charts.bars import class_bar_chart, ranked_count_chart, stacked_bar_chart
from podscale.evaluate.report.charts.heatmap import heatmap
from podscale.evaluate.report.charts.lines import LineSeries, line_chart
from podscale.evaluate.report.charts.reliability import reliability_diagram
from podscale.evaluate.report.charts.schedule import schedule_chart, schedule_curves

__all__ = [
    "LineSeries",
    "class_bar_chart",
    "heatmap",
    "line_chart",
    "ranked_count_chart",
    "reliability_diagram",
    "schedule_chart",
    "schedule_curves",
    "stacked_bar_chart",
]
