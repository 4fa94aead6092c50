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

IDLE = "Nothing trained in this time"
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
        "Images per second over the number of ranks; a rank drives one chip.",
        PanelQuery(IMAGES_PER_RANK),
        field=Field("count:images/s", IDLE),
    ),
    stat_panel(
        "MFU",
        "Model FLOP/s over the devices' dense peak in the precision used. Empty where the hardware table has no peak.",
        PanelQuery(MFU),
        field=Field("percentunit", NO_PEAK, decimals=1),
    ),
    stat_panel(
        "Median step",
        "Half of all steps were faster.",
        PanelQuery(quantile_query(0.5, "train_step_duration_seconds", BY_RUN)),
        field=Field("s", IDLE),
    ),
    stat_panel(
        "Waiting for data",
        "Share of the ranks' time in which the loop had no batch.",
        PanelQuery(DATA_WAIT),
        field=Field("percentunit", IDLE, decimals=1),
        alert="PodscaleDataStarved",
        thresholds={None: "green", 0.1: "orange", DEFAULT_THRESHOLDS["dataWaitShare"]: "red"},
    ),
    stat_panel(
        "Ranks", "Ranks of the run.", PanelQuery(max_query("train_world_size", BY_RUN)), field=Field("none", IDLE)
    ),
    stat_panel(
        "Done",
        "Steps done, over all restarts, of those planned.",
        PanelQuery(PROGRESS),
        field=Field("percentunit", IDLE, decimals=0),
    ),
    stat_panel(
        "Time left",
        "Steps left over the steps per second now; without restarts and evaluations to come.",
        PanelQuery(SECONDS_LEFT),
        field=Field("s", "Done, or standing still", decimals=1),
    ),
]
SPEED_PANELS = [
    time_series_panel(
        "Images per second",
        "All ranks together; dashed: what the run's claim names, where it names it.",
        PanelQuery(IMAGES),
        PanelQuery(max_query("train_target_images_per_second", BY_RUN), "{{run}} target", dashed=True),
        field=Field("count:images/s", IDLE),
        alert="PodscaleThroughputRegressed",
    ).span(12),
    time_series_panel(
        "Images per second and chip",
        "Falls with more ranks where the links or the loaders are the limit.",
        PanelQuery(IMAGES_PER_RANK),
        field=Field("count:images/s", IDLE),
    ).span(12),
    time_series_panel(
        "Duration of a step",
        "Quantiles over the chosen ranks, from the histogram's buckets: as fine as those are.",
        *(
            PanelQuery(
                quantile_query(portion, "train_step_duration_seconds", BY_RUN, ranks=True), f"{{{{run}}}} {name}"
            )
            for portion, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
        ),
        field=Field("s", IDLE),
    ).span(12),
    time_series_panel(
        "Where the time goes",
        "Share of the chosen ranks' wall time by phase.",
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
        "Depth of each chosen rank's queue; at 0 the loop waits for data. Not of the loader dali.",
        PanelQuery(
            f"min by ({BY_RANK}) ({series_selector('train_data_queue_depth', ranks=True)})", "{{run}} rank {{rank}}"
        ),
        field=Field("none", "Nothing trained in this time with a loader that tells"),
    ),
]
BOARD = Dashboard(
    "throughput",
    "Throughput",
    "How fast runs train, how far they are, and where the time of a step goes.",
    {"Now": NOW_PANELS, "Speed": SPEED_PANELS, "Machine": MACHINE_PANELS},
    ranks=True,
)
