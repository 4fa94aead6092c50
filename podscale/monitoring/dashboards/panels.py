"""Panel builders in a common style: lines, single values, bars, heat maps and tables."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as shared
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heat_model
from grafana_foundation_sdk.models import prometheus as prometheus_model

from podscale.monitoring.rule_types import RUNBOOKS_TOKEN
from podscale.telemetry.catalogue import METRICS

THIRD_PARTY_METRICS = {
    "DCGM_FI_DEV_GPU_UTIL": "NVIDIA's DCGM exporter, on nodes with GPUs",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "NVIDIA's DCGM exporter with profiling metrics, on data-centre GPUs",
    "DCGM_FI_DEV_POWER_USAGE": "NVIDIA's DCGM exporter, on nodes with GPUs",
    "DCGM_FI_DEV_GPU_TEMP": "NVIDIA's DCGM exporter, on nodes with GPUs",
    "DCGM_FI_DEV_XID_ERRORS": "NVIDIA's DCGM exporter, on nodes with GPUs",
    "duty_cycle": "GKE's TPU device plugin, on nodes with TPUs",
    "memory_used": "GKE's TPU device plugin, on nodes with TPUs",
    "kube_pod_container_status_restarts_total": "kube-state-metrics",
    "kube_pod_container_status_waiting_reason": "kube-state-metrics",
    "kube_pod_status_phase": "kube-state-metrics",
    "kueue_pending_workloads": "Kueue's controller, where jobs queue",
    "kueue_quota_reserved_wait_time_seconds": "Kueue's controller, where jobs queue",
    "kueue_evicted_workloads_total": "Kueue's controller, where jobs queue",
}
"""Third-party metrics by name (of a histogram, without suffix), with their exporter."""


with warnings.catch_warnings():  # it warns in favour of Grafana 12's second schema, which older servers cannot read
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import (
        bargauge,
        common,
        dashboard,
        heatmap,
        prometheus,
        stat,
        table,
        timeseries,
    )

DATASOURCE = shared.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLORS = {
    "productive": "green",
    "forward_backward": "green",
    "optimizer": "blue",
    "h2d": "light-blue",
    "data_wait": "orange",
    "allreduce_wait": "purple",
    "checkpoint": "yellow",
    "checkpoint_save": "yellow",
    "checkpoint_restore": "light-yellow",
    "evaluation": "light-green",
    "init": "light-blue",
    "compile": "blue",
    "redo": "red",
    "recovery": "dark-red",
    "idle": "gray",
    "other": "gray",
}
"""Colours of phases and states, the same on every dashboard."""
_NAMES = sorted([*(entry.series for entry in METRICS), *THIRD_PARTY_METRICS], key=len, reverse=True)
_NAME = re.compile(rf"(?<![\w:])({'|'.join(_NAMES)})(?:_bucket|_sum|_count)?(?=[{{\[) ]|$)")


@dataclass(frozen=True)
class PanelQuery:
    """One query of a panel.

    Args:
        instant: only its value at the end of the displayed time.
        dashed: drawn as a limit.
    """

    expression: str
    legend: str = "{{run}}"
    instant: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class ThresholdStep:
    """Colour of values from `value` on."""

    value: float
    color: str


class _PanelBuilder(Protocol):
    """Common interface of all panel builders."""

    def title(self, title: str) -> Self: ...
    def description(self, description: str) -> Self: ...
    def datasource(self, datasource: shared.DataSourceRef) -> Self: ...
    def targets(self, targets: list[Any]) -> Self: ...
    def unit(self, unit: str) -> Self: ...
    def no_value(self, no_value: str) -> Self: ...
    def links(self, links: list[Any]) -> Self: ...
    def span(self, w: int) -> Self: ...
    def height(self, h: int) -> Self: ...
    def override_by_name(self, name: str, properties: list[model.DynamicConfigValue]) -> Self: ...


P = TypeVar("P", bound=_PanelBuilder)
Panel = Builder[model.Panel]
"""A panel of any kind."""


def metric_names(expression: str) -> list[str]:
    """Return the metrics that a query names, in order, each once."""
    return list(dict.fromkeys(_NAME.findall(expression)))


def time_series_panel(
    title: str,
    text: str,
    *queries: PanelQuery,
    unit: str,
    empty: str,
    alert: str = "",
    span: int = 8,
    stacked: bool = False,
    steps: Sequence[ThresholdStep] = (),
    largest: float | None = None,
    smallest: float | None = 0,
    ceiling: float | None = None,
    points: bool = False,
) -> timeseries.Panel:
    """Build a panel of values over time.

    `steps` are drawn as dashed limits, `alert` names the alert that the panel explains. The axis ends at `largest`, and
    at `ceiling` while all values are below it.
    """
    panel = _set_common_options(timeseries.Panel(), title, text, queries, unit, empty, span, 8, alert)
    panel.legend(common.VizLegendOptions().show_legend(True).display_mode(shared.LegendDisplayMode.LIST))
    panel.tooltip(common.VizTooltipOptions().mode(shared.TooltipDisplayMode.MULTI).sort(shared.SortOrder.DESCENDING))
    panel.line_width(1).span_nulls(False).fill_opacity(70 if stacked else 10)
    panel.show_points(shared.VisibilityMode.ALWAYS if points else shared.VisibilityMode.AUTO)
    if smallest is not None:
        panel.min(smallest)
    if largest is not None:
        panel.max(largest)
    if ceiling is not None:
        panel.axis_soft_max(ceiling)
    if stacked:
        panel.stacking(common.StackingConfig().mode(shared.StackingMode.NORMAL).group("A")).line_width(0)
    if steps:
        panel.thresholds(_thresholds(steps))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(shared.GraphThresholdsStyleMode.DASHED))
    for place, query in enumerate(queries):
        if query.dashed:
            panel.override_by_query(
                _ref_id(place), [*_custom_style(), model.DynamicConfigValue("custom.fillOpacity", 0)]
            )
    return panel


def stat_panel(
    title: str,
    text: str,
    query: PanelQuery,
    *,
    unit: str,
    empty: str,
    alert: str = "",
    span: int = 3,
    steps: Sequence[ThresholdStep] = (),
    base: str = "text",
    decimals: int | None = None,
) -> stat.Panel:
    """Build a panel with one number per run and its history behind it, coloured by `steps`."""
    panel = _set_common_options(stat.Panel(), title, text, [query], unit, empty, span, 4, alert)
    panel.graph_mode(shared.BigValueGraphMode.NONE if query.instant else shared.BigValueGraphMode.AREA)
    panel.color_mode(shared.BigValueColorMode.VALUE).reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.thresholds(_thresholds(steps, base))
    panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    return panel if decimals is None else panel.decimals(decimals)


def bar_gauge_panel(
    title: str, text: str, query: PanelQuery, *, unit: str, empty: str, span: int = 8, largest: float | None = None
) -> bargauge.Panel:
    """Build a panel with one horizontal bar per series."""
    panel = _set_common_options(bargauge.Panel(), title, text, [query], unit, empty, span, 8)
    panel.orientation(shared.VizOrientation.HORIZONTAL).display_mode(shared.BarGaugeDisplayMode.BASIC)
    panel.name_placement(shared.BarGaugeNamePlacement.LEFT).min_viz_height(16).max_viz_height(32)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).show_unfilled(True).min(0)
    panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
    return panel if largest is None else panel.max(largest)


def heat(
    title: str, text: str, query: PanelQuery, *, unit: str, empty: str, limits: tuple[float, float], span: int = 24
) -> heatmap.Panel:
    """Build a heat map with one row per series, from green at the lower limit to red at the upper."""
    panel = _set_common_options(heatmap.Panel(), title, text, [query], unit, empty, span, 8)
    colors = heatmap.HeatmapColorOptions().mode(heat_model.HeatmapColorMode.SCHEME).scheme("RdYlGn").steps(64)
    panel.calculate(False).color(colors.min(limits[0]).max(limits[1])).cell_gap(1).show_legend()
    panel.rows_frame(heatmap.RowsHeatmapOptions().layout(shared.HeatmapCellLayout.UNKNOWN).value("value"))
    return panel.cell_values(heatmap.CellValues().unit(unit)).y_axis(heatmap.YAxisConfig().axis_label("rank"))


def table_panel(
    title: str, text: str, queries: Mapping[str, tuple[str, str]], *, empty: str, span: int = 24
) -> table.Panel:
    """Build a table with one row per run: each column has heading, query and unit."""
    asked = [PanelQuery(expression, "", instant=True) for expression, _ in queries.values()]
    panel = _set_common_options(table.Panel(), title, text, asked, "none", empty, span, 8, as_table=True).min_width(80)
    headings = {f"Value #{_ref_id(place)}": heading for place, heading in enumerate(queries)}
    order = {name: place for place, name in enumerate(["namespace", "run", *headings])}
    panel.transformations(
        [
            model.DataTransformerConfig(id_val="merge", options={}),
            model.DataTransformerConfig(
                id_val="organize",
                options={"excludeByName": {"Time": True}, "indexByName": order, "renameByName": headings},
            ),
        ]
    )
    for heading, (_, unit) in queries.items():
        panel.override_by_name(heading, [model.DynamicConfigValue("unit", unit)])
    return panel


def _set_common_options(
    panel: P,
    title: str,
    text: str,
    queries: Sequence[PanelQuery],
    unit: str,
    empty: str,
    span: int,
    height: int,
    alert: str = "",
    *,
    as_table: bool = False,
) -> P:
    """Set title, description (which ends with the metrics), unit, and text for no data."""
    asked = list(dict.fromkeys(name for query in queries for name in metric_names(query.expression)))
    metrics = f"Metric{'s' if len(asked) > 1 else ''}: {', '.join(f'`{name}`' for name in asked)}"
    panel.title(title).description(f"{text}\n\n{metrics}").datasource(DATASOURCE).unit(unit).no_value(empty)
    panel.span(span).height(height)
    if alert:
        link = dashboard.DashboardLink(f"What to do about {alert}").type(model.DashboardLinkType.LINK)
        panel.links([link.url(f"{RUNBOOKS_TOKEN}{alert}.md").target_blank(True)])
    panel.targets([_build_target(query, _ref_id(place), as_table) for place, query in enumerate(queries)])
    for name, color in COLORS.items():
        if any(f"{{{{{label}}}}}" == query.legend for query in queries for label in ("phase", "state")):
            panel.override_by_name(name, [_fixed_color(color)])
    return panel


def _build_target(query: PanelQuery, letter: str, as_table: bool) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(letter).datasource(DATASOURCE).expr(query.expression)
    target.editor_mode(prometheus_model.QueryEditorMode.CODE)
    kind = prometheus_model.PromQueryFormat.TABLE if as_table else prometheus_model.PromQueryFormat.TIME_SERIES
    target.format(kind).legend_format(query.legend or "__auto")
    return target.instant() if query.instant else target.range()


def _ref_id(index: int) -> str:
    return "ABCDEFGHIJKLMNOP"[index]


def _fixed_color(color: str) -> model.DynamicConfigValue:
    return model.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})


def _custom_style() -> list[model.DynamicConfigValue]:
    return [
        _fixed_color("red"),
        model.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
        model.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
    ]


def _thresholds(steps: Sequence[ThresholdStep], base: str = "transparent") -> dashboard.ThresholdsConfig:
    # The first step has no value: it applies below all others.
    found = [model.Threshold(value=None, color=base), *(model.Threshold(value=s.value, color=s.color) for s in steps)]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(found)
