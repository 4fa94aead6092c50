"""Throughput dashboard: rates, progress, and step time by phase."""

from podscale.monitoring.dashboards.frame import (
    BY_RANK,
    BY_RUN,
    DATA_WAIT,
    FLOPS,
    IMAGES,
    IMAGES_PER_RANK,
    MFU,
    PROGRESS,
    SECONDS_LEFT,
    Dashboard,
    fraction_query,
    max_query,
    quantile_query,
    series_selector,
)
from podscale.monitoring.dashboards.panels import Field, PanelQuery, stat_panel, time_series_panel
from podscale.monitoring.rule_types import DEFAULT_THRESHOLDS

IDLE = "No training in this time range"
NO_PEAK = "No peak is known for this device"

NOW_PANELS = [
    stat_panel(
        "Images/s",
        "Images trained on per second, summed over all ranks.",
        PanelQuery(IMAGES),
        field=Field("count:images/s", IDLE),
        alert="PodscaleTrainingStalled",
    ),
    stat_panel(
        "Images/s per chip",
        "Images per second over the number of ranks. Each rank drives one chip.",
        PanelQuery(IMAGES_PER_RANK),
        field=Field("count:images/s", IDLE),
    ),
    stat_panel(
        "MFU",
        "Model FLOP/s over the devices' dense peak in the precision used. Empty if the hardware table has no peak.",
        PanelQuery(MFU),
        field=Field("percentunit", NO_PEAK, decimals=1),
    ),
    stat_panel(
        "Median step",
        "Median duration of a step.",
        PanelQuery(quantile_query(0.5, "train_step_duration_seconds", BY_RUN)),
        field=Field("s", IDLE),
    ),
    stat_panel(
        "Waiting for data",
        "Fraction of the ranks' time spent waiting for a batch.",
        PanelQuery(DATA_WAIT),
        field=Field("percentunit", IDLE, decimals=1),
        alert="PodscaleDataStarved",
        thresholds={None: "green", 0.1: "orange", DEFAULT_THRESHOLDS["dataWaitShare"]: "red"},
    ),
    stat_panel(
        "Ranks", "World size of the run.", PanelQuery(max_query("train_world_size", BY_RUN)), field=Field("none", IDLE)
    ),
    stat_panel(
        "Done",
        "Fraction of the planned steps that are completed, over all launches.",
        PanelQuery(PROGRESS),
        field=Field("percentunit", IDLE, decimals=0),
    ),
    stat_panel(
        "Time left",
        "Steps left over the current steps per second. Future restarts and evaluations are not included.",
        PanelQuery(SECONDS_LEFT),
        field=Field("s", "Done, or no progress", decimals=1),
    ),
]
SPEED_PANELS = [
    time_series_panel(
        "Images per second",
        "Sum over all ranks. Dashed: the throughput in the run document's claim, if it has one.",
        PanelQuery(IMAGES),
        PanelQuery(max_query("train_target_images_per_second", BY_RUN), "{{run}} target", dashed=True),
        field=Field("count:images/s", IDLE),
        alert="PodscaleThroughputRegressed",
    ).span(12),
    time_series_panel(
        "Images per second and chip",
        "Falls with more ranks if the network or the loaders are the bottleneck.",
        PanelQuery(IMAGES_PER_RANK),
        field=Field("count:images/s", IDLE),
    ).span(12),
    time_series_panel(
        "Duration of a step",
        "Quantiles over the selected ranks. The histogram's buckets limit their resolution.",
        *(
            PanelQuery(
                quantile_query(portion, "train_step_duration_seconds", BY_RUN, ranks=True), f"{{{{run}}}} {name}"
            )
            for portion, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
        ),
        field=Field("s", IDLE),
    ).span(12),
    time_series_panel(
        "Wall time by phase",
        "Fraction of the selected ranks' wall time.",
        PanelQuery(fraction_query("train_phase_seconds", "", "phase", ranks=True), "{{phase}}"),
        field=Field("percentunit", IDLE, max=1),
        stacked=True,
    ).span(12),
]
MACHINE_PANELS = [
    time_series_panel(
        "Model FLOP/s",
        "Floating-point operations of the model, forward and backward, over all ranks.",
        PanelQuery(FLOPS),
        field=Field("flops", IDLE),
    ),
    time_series_panel(
        "MFU",
        "Model FLOP/s over the dense peak of all devices in the precision used.",
        PanelQuery(MFU),
        field=Field("percentunit", NO_PEAK),
    ),
    time_series_panel(
        "Batches ready",
        "Batches in each selected rank's queue. At 0 the rank waits for data. The loader dali does not export it.",
        PanelQuery(
            f"min by ({BY_RANK}) ({series_selector('train_data_queue_depth', ranks=True)})", "{{run}} rank {{rank}}"
        ),
        field=Field("none", "No training in this time range with a loader that exports it"),
    ),
]
BOARD = Dashboard(
    "throughput",
    "Throughput",
    "Speed of runs, progress, and the time of a step by phase.",
    {"Now": NOW_PANELS, "Speed": SPEED_PANELS, "Machine": MACHINE_PANELS},
    ranks=True,
)
