"""SVG charts: lines, bars, a stacked bar, a heat map and the reliability diagram.

Values show on hover by CSS and SVG titles instead of scripts, so that the file works in a sandbox. Colours are CSS
classes and variables (style.css), so that light and dark pages share one drawing.
"""

from podscale.report.charts.bars import (
    class_bar_chart,
    heatmap,
    ranked_count_chart,
    reliability_diagram,
    stacked_bar_chart,
)
from podscale.report.charts.lines import LineSeries, ReferenceLine, XAxis, YAxis, line_chart
from podscale.report.charts.standalone import schedule_chart, schedule_curves

__all__ = [
    "LineSeries",
    "ReferenceLine",
    "XAxis",
    "YAxis",
    "class_bar_chart",
    "heatmap",
    "line_chart",
    "ranked_count_chart",
    "reliability_diagram",
    "schedule_chart",
    "schedule_curves",
    "stacked_bar_chart",
]
