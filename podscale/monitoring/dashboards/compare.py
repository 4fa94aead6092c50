"""Comparison dashboard: one row and one line per run."""

from podscale.monitoring.dashboards.frame import (
    BY_RUN,
    GOODPUT,
    IMAGES,
    IMAGES_PER_RANK,
    MFU,
    RANGE,
    WALL_SECONDS,
    Dashboard,
    increase_query,
    last_query,
    max_query,
    series_selector,
)
from podscale.monitoring.dashboards.panels import Field, PanelQuery, table_panel, time_series_panel

NONE = "No training in this time range"
TRAINED = increase_query("train_images", BY_RUN)
RANKS = last_query("train_world_size", BY_RUN)
PEAKS = f"sum by ({BY_RUN}) (last_over_time({series_selector('train_peak_flops')}[{RANGE}]))"
STEP = increase_query("train_step_duration_seconds", f"{BY_RUN}, le", suffix="_bucket")
RESTARTED = (
    f"sum by ({BY_RUN}) (max by ({BY_RUN}, cause) (max_over_time({series_selector('train_restarts')}[{RANGE}])))"
)
DONE = f"{last_query('train_completed_steps', BY_RUN)} / {last_query('train_planned_steps', BY_RUN)}"
PHASE_SECONDS = increase_query("train_phase_seconds", BY_RUN)
DATA_WAIT_SECONDS = increase_query("train_phase_seconds", BY_RUN, 'phase="data_wait"')

TABLE_PANELS = [
    table_panel(
        "Runs",
        "The selected runs in the time range shown, including finished ones. Images per second and MFU are averages"
        " over the run's wall time, including interruptions. Accuracy, loss and progress are the last values seen.",
        {
            "Ranks": (RANKS, "none"),
            "Batch": (last_query("train_global_batch_size", BY_RUN), "none"),
            "Images/s": (f"{TRAINED} / {WALL_SECONDS}", "none"),
            "Per chip": (f"{TRAINED} / {WALL_SECONDS} / {RANKS}", "none"),
            "MFU": (f"{increase_query('train_model_flops', BY_RUN)} / {WALL_SECONDS} / {PEAKS}", "percentunit"),
            "Step p50": (f"histogram_quantile(0.5, {STEP}) >= 0", "s"),
            "Data wait": (f"{DATA_WAIT_SECONDS} / ({PHASE_SECONDS} > 0)", "percentunit"),
            "Goodput": (GOODPUT, "percentunit"),
            "Restarts": (RESTARTED, "none"),
            "Done": (DONE, "percentunit"),
            "Epoch": (last_query("train_epoch", BY_RUN), "none"),
            "Loss": (last_query("train_loss", BY_RUN), "none"),
            "Top-1": (last_query("eval_top1_ratio", BY_RUN), "percentunit"),
        },
        no_value="-",
    )
]
LINE_PANELS = [
    time_series_panel(
        "Images per second", "Sum over all ranks of each run.", PanelQuery(IMAGES), field=Field("count:images/s", NONE)
    ),
    time_series_panel(
        "Images per second and chip",
        "Images per second over the number of ranks.",
        PanelQuery(IMAGES_PER_RANK),
        field=Field("count:images/s", NONE),
    ),
    time_series_panel(
        "MFU",
        "Model FLOP/s over the devices' dense peak.",
        PanelQuery(MFU),
        field=Field("percentunit", "No peak is known for these devices"),
    ),
    time_series_panel(
        "Loss",
        "Training loss of the last logged step.",
        PanelQuery(max_query("train_loss", BY_RUN)),
        field=Field("none", NONE),
    ),
    time_series_panel(
        "Top-1",
        "Accuracy of the newest evaluation.",
        PanelQuery(max_query("eval_top1_ratio", BY_RUN)),
        field=Field("percentunit", "Not evaluated yet", max=1),
    ),
    time_series_panel(
        "Epoch",
        "Passes over the training split.",
        PanelQuery(max_query("train_epoch", BY_RUN)),
        field=Field("none", NONE),
    ),
]
BOARD = Dashboard(
    "compare",
    "Compare runs",
    "Runs side by side. The time axis is the time of day: to compare runs from different times, choose a time range"
    " that contains both.",
    {"Side by side": TABLE_PANELS, "Over time": LINE_PANELS},
    events=False,
    span="now-24h",
)
