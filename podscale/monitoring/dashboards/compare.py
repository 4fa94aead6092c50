"""Compare runs: one row and one line a run."""

from podscale.monitoring.dashboards.frame import Board
from podscale.monitoring.dashboards.panels import Query, columns, lines
from podscale.monitoring.dashboards.queries import (
    BY_RUN,
    DATA_WAIT,
    GOODPUT,
    IMAGES,
    IMAGES_PER_RANK,
    MFU,
    PROGRESS,
    largest,
    quantile,
    series,
)

NONE = "Nothing trained in this time"

TABLE = [
    columns(
        "Runs",
        "The chosen runs at the end of the time shown; a run that has ended by then is not in it.",
        {
            "Ranks": (largest("train_world_size", BY_RUN), "none"),
            "Batch": (largest("train_global_batch_size", BY_RUN), "none"),
            "Images/s": (IMAGES, "count:images/s"),
            "Per chip": (IMAGES_PER_RANK, "count:images/s"),
            "MFU": (MFU, "percentunit"),
            "Median update": (quantile(0.5, "train_step_duration_seconds", BY_RUN), "s"),
            "Waiting for data": (DATA_WAIT, "percentunit"),
            "Goodput": (GOODPUT, "percentunit"),
            "Restarts": (f"sum by ({BY_RUN}) ({series('train_restarts')})", "none"),
            "Done": (PROGRESS, "percentunit"),
            "Epoch": (largest("train_epoch", BY_RUN), "none"),
            "Loss": (largest("train_loss", BY_RUN), "none"),
            "Top-1": (largest("eval_top1_ratio", BY_RUN), "percentunit"),
        },
        empty=NONE,
    )
]
LINES = [
    lines("Images per second", "All ranks of each run.", Query(IMAGES), unit="count:images/s", empty=NONE),
    lines("Images per second and chip", "Per rank.", Query(IMAGES_PER_RANK), unit="count:images/s", empty=NONE),
    lines(
        "MFU",
        "Model FLOP/s over the devices' peak.",
        Query(MFU),
        unit="percentunit",
        empty="No peak is known for these devices",
    ),
    lines("Loss", "Of the last logged update.", Query(largest("train_loss", BY_RUN)), unit="none", empty=NONE),
    lines(
        "Top-1",
        "Accuracy of the newest evaluation.",
        Query(largest("eval_top1_ratio", BY_RUN)),
        unit="percentunit",
        empty="Not evaluated yet",
        largest=1,
    ),
    lines("Epoch", "Passes over the training split.", Query(largest("train_epoch", BY_RUN)), unit="none", empty=NONE),
]
BOARD = Board(
    "compare",
    "Compare runs",
    "Runs beside each other. Lines are over the time of day: of runs that ran at different times, choose a span that"
    " holds both.",
    {"Side by side": TABLE, "Over time": LINES},
    events=False,
    span="now-24h",
)
