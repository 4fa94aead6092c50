"""Data dashboard: packing of images into shards, and data wait of the ranks."""

from podscale.monitoring.dashboards.frame import (
    BY_RANK,
    BY_RUN,
    DATA_WAIT,
    Dashboard,
    fraction_query,
    integer_increase_query,
    rate_query,
    series_selector,
)
from podscale.monitoring.dashboards.panels import Field, PanelQuery, bar_gauge_panel, stat_panel, time_series_panel
from podscale.monitoring.rule_types import DEFAULT_THRESHOLDS

UNPACKED = "No sharding in this time range"
IDLE = "No training in this time range"
PACKED = (
    f"sum by ({BY_RUN}) ({series_selector('shard_images')}) / "
    f"sum by ({BY_RUN}) ({series_selector('shard_planned_images')})"
)

NOW_PANELS = [
    stat_panel(
        "Packed",
        "Fraction of the planned images that are packed.",
        PanelQuery(PACKED),
        field=Field("percentunit", UNPACKED, decimals=0),
    ),
    stat_panel(
        "Packing",
        "Images packed per second, both splits.",
        PanelQuery(rate_query("shard_images", BY_RUN)),
        field=Field("count:images/s", UNPACKED),
    ),
    stat_panel(
        "Shards finished",
        "Shards finished in the time range shown.",
        PanelQuery(integer_increase_query("shard_shards", BY_RUN), instant=True),
        field=Field("none", UNPACKED),
    ),
    stat_panel(
        "Images rejected",
        "Images rejected in the time range shown.",
        PanelQuery(integer_increase_query("shard_rejects", BY_RUN), instant=True),
        field=Field("none", UNPACKED),
        thresholds={None: "green", 1: "orange"},
    ),
    stat_panel(
        "Waiting for data",
        "Fraction of the ranks' time spent waiting for a batch.",
        PanelQuery(DATA_WAIT),
        field=Field("percentunit", IDLE, decimals=1),
        thresholds={None: "green", 0.1: "orange", DEFAULT_THRESHOLDS["dataWaitShare"]: "red"},
    ).span(6),
    stat_panel(
        "Records replaced",
        "Records that training could not decode in the time range shown.",
        PanelQuery(integer_increase_query("train_samples_skipped", BY_RUN), instant=True),
        field=Field("none", IDLE),
        thresholds={None: "green", 1: "orange"},
    ).span(6),
]
SHARDING_PANELS = [
    time_series_panel(
        "Images packed",
        "Images packed per second, by split.",
        PanelQuery(rate_query("shard_images", f"{BY_RUN}, split"), "{{run}} {{split}}"),
        field=Field("count:images/s", UNPACKED),
    ).span(12),
    time_series_panel(
        "Bytes read and written",
        "Bytes per second read from the source, and written to shards.",
        PanelQuery(rate_query("shard_bytes", f"{BY_RUN}, direction"), "{{run}} {{direction}}"),
        field=Field("Bps", UNPACKED),
    ).span(12),
    bar_gauge_panel(
        "Images rejected, by reason",
        "Images rejected in the time range shown.",
        PanelQuery(f"sort_desc({integer_increase_query('shard_rejects', 'reason')})", "{{reason}}", instant=True),
        field=Field("none", "No image was rejected"),
    ).span(12),
    time_series_panel(
        "Packing time by phase",
        "Fraction of the packing processes' wall time.",
        PanelQuery(fraction_query("shard_phase_seconds", "", "phase"), "{{phase}}"),
        field=Field("percentunit", UNPACKED, max=1),
        stacked=True,
    ).span(12),
]
INPUT_PANELS = [
    time_series_panel(
        "Waiting for data, by rank",
        "Fraction of each selected rank's time spent waiting for a batch. Dashed: limit of the alert.",
        PanelQuery(
            fraction_query("train_phase_seconds", BY_RANK, "", 'phase="data_wait"', ranks=True), "{{run}} rank {{rank}}"
        ),
        field=Field("percentunit", IDLE),
        alert="PodscaleDataStarved",
        limit=DEFAULT_THRESHOLDS["dataWaitShare"],
    ),
    time_series_panel(
        "Batches ready",
        "Batches in each selected rank's queue. At 0 the rank waits. The loader dali does not export it.",
        PanelQuery(
            f"min by ({BY_RANK}) ({series_selector('train_data_queue_depth', ranks=True)})", "{{run}} rank {{rank}}"
        ),
        field=Field("none", "No training in this time range with a loader that exports it"),
    ),
    time_series_panel(
        "Records replaced, by reason",
        "Records per second that could not be used, summed over the selected ranks.",
        PanelQuery(rate_query("train_samples_skipped", f"{BY_RUN}, reason", ranks=True), "{{run}} {{reason}}"),
        field=Field("count:images/s", IDLE, soft_max=1),
    ),
]
BOARD = Dashboard(
    "data",
    "Data",
    "Packing of images into shards, and the time that training waits for images.",
    {"Now": NOW_PANELS, "Sharding": SHARDING_PANELS, "Training input": INPUT_PANELS},
    ranks=True,
)
