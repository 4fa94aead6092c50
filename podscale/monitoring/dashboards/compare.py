"""Compare runs: one row and one line a run."""

from podscale.monitoring.dashboards.frame import Board
from podscale.monitoring.dashboards.panels import Query, columns, lines
from podscale.monitoring.dashboards.queries import (
    BY_RUN,
    GOODPUT,
    IMAGES,
    IMAGES_PER_RANK,
    MFU,
    SHOWN,
    SPENT,
    largest,
    newest,
    series,
    total,
)

NONE = "Nothing trained in this time"
TRAINED = total("train_images", BY_RUN)
RANKS = newest("train_world_size", BY_RUN)
PEAKS = f"sum by ({BY_RUN}) (last_over_time({series('train_peak_flops')}[{SHOWN}]))"
STEP = total("train_step_duration_seconds", f"{BY_RUN}, le", suffix="_bucket")
RESTARTED = f"sum by ({BY_RUN}) (max by ({BY_RUN}, cause) (max_over_time({series('train_restarts')}[{SHOWN}])))"
DONE = f"{newest('train_completed_steps', BY_RUN)} / {newest('train_planned_steps', BY_RUN)}"
WAITED = total("train_phase_seconds", BY_RUN, 'phase="data_wait"')

TABLE = [
    columns(
        "Runs",
        "The chosen runs over the time shown, those that have ended in it too. Images per second and MFU are over all"
        " of a run's wall time, with its stops; accuracy, loss and progress are the last that were seen.",
        {
            "Ranks": (RANKS, "none"),
            "Batch": (newest("train_global_batch_size", BY_RUN), "none"),
            "Images/s": (f"{TRAINED} / {SPENT}", "none"),
            "Per chip": (f"{TRAINED} / {SPENT} / {RANKS}", "none"),
            "MFU": (f"{total('train_model_flops', BY_RUN)} / {SPENT} / {PEAKS}", "percentunit"),
            "Update p50": (f"histogram_quantile(0.5, {STEP}) >= 0", "s"),
            "Data wait": (f"{WAITED} / ({total('train_phase_seconds', BY_RUN)} > 0)", "percentunit"),
            "Goodput": (GOODPUT, "percentunit"),
            "Restarts": (RESTARTED, "none"),
            "Done": (
                f"{newest('train_completed_steps', BY_RUN)} / {newest('train_planned_steps', BY_RUN)}",
                "percentunit",
            ),
            "Epoch": (newest("train_epoch", BY_RUN), "none"),
            "Loss": (newest("train_loss", BY_RUN), "none"),
            "Top-1": (newest("eval_top1_ratio", BY_RUN), "percentunit"),
        },
        empty="-",
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
