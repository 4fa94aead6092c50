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

UNPACKED = "Nothing packed in this time"
IDLE = "Nothing trained in this time"
PACKED = (
    f"sum by ({BY_RUN}) ({series_selector('shard_images')}) / "
    f"sum by ({BY_RUN}) ({series_selector('shard_planned_images')})"
)

NOW_PANELS = [
    stat_panel(
        "Packed",
        "Images packed, of those planned.",
        PanelQuery(PACKED),
        field=Field("percentunit", UNPACKED, decimals=0),
    ),
    stat_panel(
        "Packing",
        "Images packed per second, over both splits.",
        PanelQuery(rate_query("shard_images", BY_RUN)),
        field=Field("count:images/s", UNPACKED),
    ),
    stat_panel(
        "Shards finished",
        "Shards finished in the time shown.",
        PanelQuery(integer_increase_query("shard_shards", BY_RUN), instant=True),
        field=Field("none", UNPACKED),
    ),
    stat_panel(
        "Images rejected",
        "Images not taken, in the time shown.",
        PanelQuery(integer_increase_query("shard_rejects", BY_RUN), instant=True),
        field=Field("none", UNPACKED),
        thresholds={None: "green", 1: "orange"},
    ),
    stat_panel(
        "Waiting for data",
        "Share of the ranks' time in which the loop had no batch.",
        PanelQuery(DATA_WAIT),
        field=Field("percentunit", IDLE, decimals=1),
        thresholds={None: "green", 0.1: "orange", DEFAULT_THRESHOLDS["dataWaitShare"]: "red"},
    ).span(6),
    stat_panel(
        "Records replaced",
        "Records that could not be decoded in training, in the time shown.",
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
        "From the source, and to shards.",
        PanelQuery(rate_query("shard_bytes", f"{BY_RUN}, direction"), "{{run}} {{direction}}"),
        field=Field("Bps", UNPACKED),
    ).span(12),
    bar_gauge_panel(
        "Images rejected, by reason",
        "In the time shown.",
        PanelQuery(f"sort_desc({integer_increase_query('shard_rejects', 'reason')})", "{{reason}}", instant=True),
        field=Field("none", "No image was rejected"),
    ).span(12),
    time_series_panel(
        "Where the packers' time goes",
        "Share of their wall time, by phase.",
        PanelQuery(fraction_query("shard_phase_seconds", "", "phase"), "{{phase}}"),
        field=Field("percentunit", UNPACKED, max=1),
        stacked=True,
    ).span(12),
]
INPUT_PANELS = [
    time_series_panel(
        "Waiting for data, by rank",
        "Share of each chosen rank's time in which the loop had no batch; dashed: from where on the run is starved.",
        PanelQuery(
            fraction_query("train_phase_seconds", BY_RANK, "", 'phase="data_wait"', ranks=True), "{{run}} rank {{rank}}"
        ),
        field=Field("percentunit", IDLE),
        alert="PodscaleDataStarved",
        limit=DEFAULT_THRESHOLDS["dataWaitShare"],
    ),
    time_series_panel(
        "Batches ready",
        "Depth of each chosen rank's queue; at 0 the loop waits. Not of the loader dali.",
        PanelQuery(
            f"min by ({BY_RANK}) ({series_selector('train_data_queue_depth', ranks=True)})", "{{run}} rank {{rank}}"
        ),
        field=Field("none", "Nothing trained in this time with a loader that tells"),
    ),
    time_series_panel(
        "Records replaced, by reason",
        "Records a second that could not be used, over the chosen ranks.",
        PanelQuery(rate_query("train_samples_skipped", f"{BY_RUN}, reason", ranks=True), "{{run}} {{reason}}"),
        field=Field("count:images/s", IDLE, soft_max=1),
    ),
]
BOARD = Dashboard(
    "data",
    "Data",
    "Packing of photographs into shards, and how long training waits for them.",
    {"Now": NOW_PANELS, "Sharding": SHARDING_PANELS, "Input of training": INPUT_PANELS},
    ranks=True,
)
