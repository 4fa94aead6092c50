"""Throughput: how fast, how far, and where an update's time goes."""

from podscale.monitoring.dashboards.frame import Board
from podscale.monitoring.dashboards.panels import Query, Step, figure, lines
from podscale.monitoring.dashboards.queries import (
    BY_RANK,
    BY_RUN,
    DATA_WAIT,
    FLOPS,
    IMAGES,
    IMAGES_PER_RANK,
    LEFT,
    MFU,
    PROGRESS,
    largest,
    quantile,
    series,
    share,
)
from podscale.monitoring.thresholds import DEFAULTS

IDLE = "Nothing trained in this time"
NO_PEAK = "No peak is known for this device"
STARVED = [Step(0.1, "orange"), Step(DEFAULTS["dataWaitShare"], "red")]

NOW = [
    figure(
        "Images/s",
        "Images trained on per second, summed over all ranks.",
        Query(IMAGES),
        unit="count:images/s",
        empty=IDLE,
        alert="PodscaleTrainingStalled",
    ),
    figure(
        "Images/s per chip",
        "Images per second over the number of ranks; a rank drives one chip.",
        Query(IMAGES_PER_RANK),
        unit="count:images/s",
        empty=IDLE,
    ),
    figure(
        "MFU",
        "Model FLOP/s over the devices' dense peak in the precision used. Empty where the hardware table has no peak.",
        Query(MFU),
        unit="percentunit",
        empty=NO_PEAK,
        decimals=1,
    ),
    figure(
        "Median update",
        "Half of all updates were faster.",
        Query(quantile(0.5, "train_step_duration_seconds", BY_RUN)),
        unit="s",
        empty=IDLE,
    ),
    figure(
        "Waiting for data",
        "Share of the ranks' time in which the loop had no batch.",
        Query(DATA_WAIT),
        unit="percentunit",
        empty=IDLE,
        alert="PodscaleDataStarved",
        base="green",
        steps=STARVED,
        decimals=1,
    ),
    figure("Ranks", "Ranks of the run.", Query(largest("train_world_size", BY_RUN)), unit="none", empty=IDLE),
    figure(
        "Done",
        "Updates done, over all restarts, of those planned.",
        Query(PROGRESS),
        unit="percentunit",
        empty=IDLE,
        decimals=0,
    ),
    figure(
        "Time left",
        "Updates left over the updates per second now; without restarts and evaluations to come.",
        Query(LEFT),
        unit="s",
        empty="Done, or standing still",
        decimals=1,
    ),
]
SPEED = [
    lines(
        "Images per second",
        "All ranks together; dashed: what the run's claim names, where it names it.",
        Query(IMAGES),
        Query(largest("train_target_images_per_second", BY_RUN), "{{run}} target", dashed=True),
        unit="count:images/s",
        empty=IDLE,
        alert="PodscaleThroughputRegressed",
        span=12,
    ),
    lines(
        "Images per second and chip",
        "Falls with more ranks where the links or the loaders are the limit.",
        Query(IMAGES_PER_RANK),
        unit="count:images/s",
        empty=IDLE,
        span=12,
    ),
    lines(
        "Duration of an update",
        "Quantiles over the chosen ranks, from the histogram's buckets: as fine as those are.",
        *(
            Query(quantile(portion, "train_step_duration_seconds", BY_RUN, ranks=True), f"{{{{run}}}} {name}")
            for portion, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
        ),
        unit="s",
        empty=IDLE,
        span=12,
    ),
    lines(
        "Where the time goes",
        "Share of the chosen ranks' wall time by phase.",
        Query(share("train_phase_seconds", "", "phase", ranks=True), "{{phase}}"),
        unit="percentunit",
        empty=IDLE,
        span=12,
        stacked=True,
        largest=1,
    ),
]
MACHINE = [
    lines(
        "Model FLOP/s",
        "Floating-point operations of the model, forward and backward, over all ranks.",
        Query(FLOPS),
        unit="flops",
        empty=IDLE,
    ),
    lines(
        "MFU",
        "Model FLOP/s over the dense peak of all devices in the precision used.",
        Query(MFU),
        unit="percentunit",
        empty=NO_PEAK,
    ),
    lines(
        "Batches ready",
        "Depth of each chosen rank's queue; at 0 the loop waits for data. Not of the loader dali.",
        Query(f"min by ({BY_RANK}) ({series('train_data_queue_depth', ranks=True)})", "{{run}} rank {{rank}}"),
        unit="none",
        empty="Nothing trained in this time with a loader that tells",
    ),
]
BOARD = Board(
    "throughput",
    "Throughput",
    "How fast runs train, how far they are, and where the time of an update goes.",
    {"Now": NOW, "Speed": SPEED, "Machine": MACHINE},
    ranks=True,
)
