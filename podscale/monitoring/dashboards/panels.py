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

with warnings.catch_warnings():  # it recommends Grafana 12's second schema, which older servers cannot read
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
    "kube_pod_created": "kube-state-metrics",
    "kube_pod_status_scheduled_time": "kube-state-metrics",
    "kube_pod_container_state_started": "kube-state-metrics",
    "kueue_pending_workloads": "Kueue's controller, where jobs queue",
    "kueue_quota_reserved_wait_time_seconds": "Kueue's controller, where jobs queue",
    "kueue_evicted_workloads_total": "Kueue's controller, where jobs queue",
}
"""Third-party metrics by name (histograms without suffix), with their exporter."""

TEXT_COLOR: Mapping[float | None, str] = {None: "text"}
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
"""Colours of phases and states on every dashboard."""
_NAMES = sorted([*(entry.series for entry in METRICS), *THIRD_PARTY_METRICS], key=len, reverse=True)
_NAME = re.compile(rf"(?<![\w:])({'|'.join(_NAMES)})(?:_bucket|_sum|_count)?(?=[{{\[) ]|$)")


@dataclass(frozen=True)
class PanelQuery:
    """One query of a panel.

    Args:
        instant: Only its value at the end of the displayed time.
        dashed: Drawn as a limit.
    """

    expression: str
    legend: str = "{{run}}"
    instant: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Field:
    """Display of a panel's values (Grafana's field config).

    Args:
        no_value: Text shown without data.
        min: Lower end of the axis of lines and bars; None for the smallest value.
        max: Upper end of the axis.
        soft_max: Upper end of the axis while all values are below it.
    """

    unit: str
    no_value: str
    min: float | None = 0
    max: float | None = None
    soft_max: float | None = None
    decimals: int | None = None


class _PanelBuilder(Protocol):
    """Methods that all panel builders have."""

    def title(self, title: str) -> Self: ...
    def description(self, description: str) -> Self: ...
    def datasource(self, datasource: shared.DataSourceRef) -> Self: ...
    def targets(self, targets: list[Any]) -> Self: ...
    def unit(self, unit: str) -> Self: ...
    def no_value(self, no_value: str) -> Self: ...
    def max(self, max_val: float) -> Self: ...
    def decimals(self, decimals: float) -> Self: ...
    def links(self, links: list[Any]) -> Self: ...
    def span(self, w: int) -> Self: ...
    def height(self, h: int) -> Self: ...
    def override_by_name(self, name: str, properties: list[model.DynamicConfigValue]) -> Self: ...


P = TypeVar("P", bound=_PanelBuilder)
Panel = Builder[model.Panel]


def metric_names(expression: str) -> list[str]:
    """Return the distinct metrics of a query, in order."""
    return list(dict.fromkeys(_NAME.findall(expression)))


def time_series_panel(
    title: str,
    text: str,
    *queries: PanelQuery,
    field: Field,
    alert: str = "",
    stacked: bool = False,
    limit: float | None = None,
) -> timeseries.Panel:
    """Build a panel of values over time. `alert` is the alert that it explains, `limit` a dashed red line."""
    panel = _set_common_options(timeseries.Panel(), title, text, queries, field, alert).span(8).height(8)
    panel.legend(common.VizLegendOptions().show_legend(True).display_mode(shared.LegendDisplayMode.LIST))
    panel.tooltip(common.VizTooltipOptions().mode(shared.TooltipDisplayMode.MULTI).sort(shared.SortOrder.DESCENDING))
    panel.line_width(1).span_nulls(False).fill_opacity(70 if stacked else 10)
    panel.show_points(shared.VisibilityMode.AUTO)
    if field.min is not None:
        panel.min(field.min)
    if field.soft_max is not None:
        panel.axis_soft_max(field.soft_max)
    if stacked:
        panel.stacking(common.StackingConfig().mode(shared.StackingMode.NORMAL).group("A")).line_width(0)
    if limit is not None:
        panel.thresholds(_thresholds({None: "transparent", limit: "red"}))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(shared.GraphThresholdsStyleMode.DASHED))
    for index, query in enumerate(queries):
        if query.dashed:
            panel.override_by_query(_ref_id(index), _dashed_style())
    return panel


def stat_panel(
    title: str,
    text: str,
    query: PanelQuery,
    *,
    field: Field,
    alert: str = "",
    thresholds: Mapping[float | None, str] = TEXT_COLOR,
) -> stat.Panel:
    """Build a panel with one number per run and its history behind it.

    Args:
        alert: Alert that the panel explains.
        thresholds: Colour of values from each threshold on; that of None applies below all others.
    """
    panel = _set_common_options(stat.Panel(), title, text, [query], field, alert).span(3).height(4)
    panel.graph_mode(shared.BigValueGraphMode.NONE if query.instant else shared.BigValueGraphMode.AREA)
    panel.color_mode(shared.BigValueColorMode.VALUE).reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.thresholds(_thresholds(thresholds))
    return panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))


def bar_gauge_panel(title: str, text: str, query: PanelQuery, *, field: Field) -> bargauge.Panel:
    """Build a panel with one horizontal bar per series."""
    panel = _set_common_options(bargauge.Panel(), title, text, [query], field).span(8).height(8)
    panel.orientation(shared.VizOrientation.HORIZONTAL).display_mode(shared.BarGaugeDisplayMode.BASIC)
    panel.name_placement(shared.BarGaugeNamePlacement.LEFT).min_viz_height(16).max_viz_height(32)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).show_unfilled(True).min(0)
    return panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))


def heatmap_panel(
    title: str, text: str, query: PanelQuery, *, field: Field, limits: tuple[float, float]
) -> heatmap.Panel:
    """Build a heat map with one row per series, from green at the lower limit to red at the upper."""
    panel = _set_common_options(heatmap.Panel(), title, text, [query], field).span(24).height(8)
    colors = heatmap.HeatmapColorOptions().mode(heat_model.HeatmapColorMode.SCHEME).scheme("RdYlGn").steps(64)
    panel.calculate(False).color(colors.min(limits[0]).max(limits[1])).cell_gap(1).show_legend()
    panel.rows_frame(heatmap.RowsHeatmapOptions().layout(shared.HeatmapCellLayout.UNKNOWN).value("value"))
    return panel.cell_values(heatmap.CellValues().unit(field.unit)).y_axis(heatmap.YAxisConfig().axis_label("rank"))


def table_panel(title: str, text: str, columns: Mapping[str, tuple[str, str]], *, no_value: str) -> table.Panel:
    """Build a table with one row per run; columns map a heading to its query and unit."""
    queries = [PanelQuery(expression, "", instant=True) for expression, _ in columns.values()]
    query_format = prometheus_model.PromQueryFormat.TABLE
    panel = _set_common_options(table.Panel(), title, text, queries, Field("none", no_value), query_format=query_format)
    headings = {f"Value #{_ref_id(index)}": heading for index, heading in enumerate(columns)}
    order = {name: index for index, name in enumerate(["namespace", "run", *headings])}
    organize = {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": headings}
    panel.transformations(
        [
            model.DataTransformerConfig(id_val="merge", options={}),
            model.DataTransformerConfig(id_val="organize", options=organize),
        ]
    )
    for heading, (_, unit) in columns.items():
        panel.override_by_name(heading, [model.DynamicConfigValue("unit", unit)])
    return panel.min_width(80).span(24).height(8)


def _set_common_options(
    panel: P,
    title: str,
    text: str,
    queries: Sequence[PanelQuery],
    field: Field,
    alert: str = "",
    query_format: prometheus_model.PromQueryFormat = prometheus_model.PromQueryFormat.TIME_SERIES,
) -> P:
    """Set title, description (with the metrics' names), field config, queries, and a link to the alert's runbook."""
    names = list(dict.fromkeys(name for query in queries for name in metric_names(query.expression)))
    metrics = f"Metric{'s' if len(names) > 1 else ''}: {', '.join(f'`{name}`' for name in names)}"
    panel.title(title).description(f"{text}\n\n{metrics}").datasource(DATASOURCE)
    panel.unit(field.unit).no_value(field.no_value)
    if field.max is not None:
        panel.max(field.max)
    if field.decimals is not None:
        panel.decimals(field.decimals)
    if alert:
        link = dashboard.DashboardLink(f"What to do about {alert}").type(model.DashboardLinkType.LINK)
        panel.links([link.url(f"{RUNBOOKS_TOKEN}{alert}.md").target_blank(True)])
    panel.targets([_build_target(query, _ref_id(index), query_format) for index, query in enumerate(queries)])
    if any(query.legend in ("{{phase}}", "{{state}}") for query in queries):
        for name, color in COLORS.items():
            panel.override_by_name(name, [_fixed_color(color)])
    return panel


def _build_target(
    query: PanelQuery, ref_id: str, query_format: prometheus_model.PromQueryFormat
) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref_id).datasource(DATASOURCE).expr(query.expression)
    target.editor_mode(prometheus_model.QueryEditorMode.CODE)
    target.format(query_format).legend_format(query.legend or "__auto")
    return target.instant() if query.instant else target.range()


def _ref_id(index: int) -> str:
    return "ABCDEFGHIJKLMNOP"[index]


def _fixed_color(color: str) -> model.DynamicConfigValue:
    return model.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})


def _dashed_style() -> list[model.DynamicConfigValue]:
    return [
        _fixed_color("red"),
        model.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
        model.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
        model.DynamicConfigValue("custom.fillOpacity", 0),
    ]


def _thresholds(colors: Mapping[float | None, str]) -> dashboard.ThresholdsConfig:
    steps = [model.Threshold(value=value, color=color) for value, color in colors.items()]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)
