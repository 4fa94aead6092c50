"""Ranks dashboard: slow ranks, waiting ranks and stalled ranks."""

from podscale.monitoring.dashboards.frame import (
    BUSY_FRACTION,
    BY_RANK,
    BY_RUN,
    Dashboard,
    fraction_query,
    max_query,
    series_selector,
)
from podscale.monitoring.dashboards.panels import Field, Panel, PanelQuery, heatmap_panel, stat_panel, time_series_panel
from podscale.monitoring.rule_types import DEFAULT_THRESHOLDS

NONE = "No training in this time range"
ALIKE = "The ranks have not been compared yet"
RANK = "rank {{rank}}"
SECONDS_SINCE_STEP = f"time() - {max_query('train_last_step_timestamp_seconds', BY_RANK, ranks=True)}"


def _phase_panel(title: str, text: str, phase: str) -> Panel:
    return time_series_panel(
        title,
        text,
        PanelQuery(fraction_query("train_phase_seconds", BY_RANK, "", f'phase="{phase}"', ranks=True), RANK),
        field=Field("percentunit", NONE),
    ).span(6)


NOW_PANELS = [
    stat_panel(
        "Slowest rank",
        "The rank that was busy longest in the last interval.",
        PanelQuery(max_query("train_straggler_rank", BY_RUN), instant=True),
        field=Field("none", ALIKE),
    ).span(6),
    stat_panel(
        "Straggler ratio",
        "Busy time of the slowest rank over that of the fastest rank.",
        PanelQuery(max_query("train_straggler_ratio", BY_RUN)),
        field=Field("none", ALIKE, decimals=2),
        thresholds={None: "green", 1.1: "orange", DEFAULT_THRESHOLDS["stragglerRatio"]: "red"},
    ).span(6),
    stat_panel(
        "Ranks seen",
        "Ranks whose metrics were scraped. Fewer than the run's world size means that ranks are lost.",
        PanelQuery(f"count by ({BY_RUN}) ({series_selector('train_last_step_timestamp_seconds')})"),
        field=Field("none", NONE),
        alert="PodscaleMetricsAbsent",
    ).span(6),
    stat_panel(
        "Longest time without a step",
        "Longest time since the last step of any rank.",
        PanelQuery(f"max by ({BY_RUN}) ({SECONDS_SINCE_STEP})"),
        field=Field("s", NONE, decimals=1),
    ).span(6),
]
BUSY_PANELS = [
    heatmap_panel(
        "Busy time of a step over that of the fastest rank",
        "Time in which a rank works before it waits for others. A straggler is a row that stays red. Images per second"
        " do not show it, because in synchronous training they are the same on all ranks.",
        PanelQuery(f"({BUSY_FRACTION}) / on ({BY_RUN}) group_left () min by ({BY_RUN}) ({BUSY_FRACTION})", "{{rank}}"),
        field=Field("none", NONE),
        limits=(1, 1.5),
    ),
    time_series_panel(
        "Busy time of a step",
        "Time in which a rank works before it waits for others.",
        PanelQuery(BUSY_FRACTION, RANK),
        field=Field("s", NONE),
    ).span(12),
    time_series_panel(
        "Straggler ratio",
        "Busy time of the slowest rank over that of the fastest rank. Dashed: limit of the alert.",
        PanelQuery(max_query("train_straggler_ratio", BY_RUN)),
        field=Field("none", ALIKE, min=None),
        alert="PodscaleStraggler",
        limit=DEFAULT_THRESHOLDS["stragglerRatio"],
    ).span(12),
]
PHASE_PANELS = [
    _phase_panel("Waiting for data", "High if the rank's loader or disk is slow.", "data_wait"),
    _phase_panel("Forward and backward", "High if the rank's device is slow or throttled.", "forward_backward"),
    _phase_panel("Waiting for other ranks", "Low on the straggler, high on all other ranks.", "allreduce_wait"),
    _phase_panel("Optimizer", "Time of the optimizer step, about the same on all ranks.", "optimizer"),
]
STATE_PANELS = [
    time_series_panel(
        "Memory",
        "Memory of each rank's process and of its device.",
        PanelQuery(
            f"max by ({BY_RANK}, kind) ({series_selector('train_memory_bytes', ranks=True)})", "rank {{rank}} {{kind}}"
        ),
        field=Field("bytes", NONE),
    ).span(12),
    time_series_panel(
        "Time since the last step",
        "Grows on all ranks while they wait for one. Dashed: the time after which a rank reports a hang.",
        PanelQuery(SECONDS_SINCE_STEP, RANK),
        PanelQuery(max_query("train_hang_limit_seconds", BY_RUN, ranks=True), "hang limit", dashed=True),
        field=Field("s", NONE),
        alert="PodscaleTrainingStalled",
    ).span(12),
]
BOARD = Dashboard(
    "ranks",
    "Ranks",
    "The ranks of one run side by side: slow ranks, waiting ranks and stalled ranks.",
    {
        "Now": NOW_PANELS,
        "Busy time": BUSY_PANELS,
        "Phases, fraction of each rank's time": PHASE_PANELS,
        "State": STATE_PANELS,
    },
    runs=False,
    ranks=True,
)
