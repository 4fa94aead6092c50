"""Health dashboard: wall time by state, checkpoints, and convergence of the run."""

from grafana_foundation_sdk.models.common import VisibilityMode

from podscale.monitoring.dashboards.frame import (
    BY_RUN,
    BY_STATE,
    CHECKPOINT_AGE,
    GOODPUT,
    RANGE,
    RECENT_GOODPUT,
    RECENT_RANGE,
    RECENT_WALL_SECONDS,
    RESTARTS,
    UNPRODUCTIVE,
    Dashboard,
    integer_increase_query,
    max_query,
    rate_query,
    series_selector,
    total_increase_query,
)
from podscale.monitoring.dashboards.panels import Field, PanelQuery, bar_gauge_panel, stat_panel, time_series_panel
from podscale.monitoring.rule_types import DEFAULT_THRESHOLDS

NONE = "No training in this time range"
UNSAVED = "No checkpoint yet"
NOT_STARTED = "No launch has done a step"
UNMEASURED = "Not evaluated yet"
WALL_BY_STATE = f"sum by (state) ({total_increase_query('train_wall_seconds', BY_STATE, RANGE)})"
BADPUT = f"sum by (state) ({total_increase_query('train_wall_seconds', BY_STATE, RECENT_RANGE, UNPRODUCTIVE)})"
STARTUP_BY_PART = max_query("train_startup_seconds", f"{BY_RUN}, part")
STARTUP_TARGET_SECONDS = 180
"""Longest start that a run should have, seconds. A run that restarts every three hours, as Llama 3 did on 16,384 GPUs,
then spends less than 2 % of its time on starts."""
CHECKPOINT_DURATION = "train_checkpoint_duration_seconds"

NOW_PANELS = [
    stat_panel(
        "Goodput",
        "Fraction of the wall time in the time range shown that was spent on steps that were kept.",
        PanelQuery(GOODPUT, instant=True),
        field=Field("percentunit", NONE, decimals=1),
        thresholds={None: "red", DEFAULT_THRESHOLDS["goodputShare"]: "orange", 0.9: "green"},
    ),
    stat_panel(
        "Restarts",
        "Launches after the first, since the run began.",
        PanelQuery(RESTARTS),
        field=Field("none", NONE),
        alert="PodscaleRestartLoop",
        thresholds={None: "green", 1: "orange", DEFAULT_THRESHOLDS["restartsPerHour"]: "red"},
    ),
    stat_panel(
        "Checkpoint age",
        "Time since the newest complete checkpoint. A crash now would lose this much work.",
        PanelQuery(CHECKPOINT_AGE),
        field=Field("s", UNSAVED, decimals=1),
    ),
    stat_panel(
        "Failed checkpoints",
        "Checkpoints that could not be written in the time range shown.",
        PanelQuery(integer_increase_query("train_checkpoint_failures", BY_RUN), instant=True),
        field=Field("none", NONE),
        alert="PodscaleCheckpointFailing",
        thresholds={None: "green", 1: "red"},
    ),
    stat_panel(
        "Loss",
        "Training loss of the last logged step.",
        PanelQuery(max_query("train_loss", BY_RUN)),
        field=Field("none", NONE),
    ),
    stat_panel(
        "Top-1",
        "Accuracy of the newest evaluation.",
        PanelQuery(max_query("eval_top1_ratio", BY_RUN)),
        field=Field("percentunit", UNMEASURED, decimals=1),
    ),
    stat_panel(
        "Non-finite steps",
        "Steps with a non-finite loss or gradient on any rank, in the time range shown. They are masked.",
        PanelQuery(integer_increase_query("train_nonfinite_steps", BY_RUN), instant=True),
        field=Field("none", NONE),
        thresholds={None: "green", 1: "red"},
    ),
    stat_panel(
        "Records replaced",
        "Records that could not be decoded in the time range shown. Others were used instead.",
        PanelQuery(integer_increase_query("train_samples_skipped", BY_RUN), instant=True),
        field=Field("none", NONE),
        thresholds={None: "green", 1: "orange"},
    ),
]
TIME_PANELS = [
    bar_gauge_panel(
        "Wall time by state",
        "Fraction of the wall time in the time range shown. Only `productive` counts as goodput.",
        PanelQuery(f"sort_desc({WALL_BY_STATE} / scalar(sum({WALL_BY_STATE})))", "{{state}}", instant=True),
        field=Field("percentunit", NONE, max=1),
    ),
    time_series_panel(
        "Goodput",
        "Fraction of the last five minutes spent on steps that were kept. Dashed: limit of the alert.",
        PanelQuery(RECENT_GOODPUT),
        field=Field("percentunit", NONE, max=1),
        alert="PodscaleGoodputLow",
        limit=DEFAULT_THRESHOLDS["goodputShare"],
    ),
    time_series_panel(
        "Badput by state",
        "Fraction of the last five minutes that was not productive. A kill shows as recovery, then redo.",
        PanelQuery(f"{BADPUT} / on () group_left () sum({RECENT_WALL_SECONDS})", "{{state}}"),
        field=Field("percentunit", NONE),
        stacked=True,
    ),
]
SAFETY_PANELS = [
    time_series_panel(
        "Restarts",
        "Launches after the first, by the cause that ended the previous launch.",
        PanelQuery(f"max by ({BY_RUN}, cause) ({series_selector('train_restarts')}) > 0", "{{run}} {{cause}}"),
        field=Field("none", "No restart"),
    ).span(6),
    time_series_panel(
        "Launches",
        "Launches of the training so far, counted before the ranks start. If ranks fail during their start, launches"
        " grow and restarts do not.",
        PanelQuery(max_query("train_launches", BY_RUN)),
        field=Field("none", NONE),
        alert="PodscaleRestartLoop",
    ).span(6),
    time_series_panel(
        "Checkpoint age",
        "Time since the newest complete checkpoint. Dashed: the longest interval in the run document.",
        PanelQuery(CHECKPOINT_AGE),
        PanelQuery(max_query("train_checkpoint_interval_seconds", BY_RUN), "{{run}} interval", dashed=True),
        field=Field("s", UNSAVED),
        alert="PodscaleCheckpointStale",
    ).span(6),
    time_series_panel(
        "Duration of a checkpoint",
        "Mean time to write a checkpoint (in the background of training) or to read one.",
        PanelQuery(
            f"{rate_query(CHECKPOINT_DURATION, f'{BY_RUN}, op', suffix='_sum')} / "
            f"({rate_query(CHECKPOINT_DURATION, f'{BY_RUN}, op', suffix='_count')} > 0)",
            "{{run}} {{op}}",
        ),
        field=Field("s", "No checkpoint in this time range"),
    )
    .show_points(VisibilityMode.ALWAYS)
    .span(6),
]
STARTUP_PANELS = [
    time_series_panel(
        "Time to the first step",
        "Time from the submission of a pipeline's job, else from the start of the launch, to the end of its first step."
        " Dashed: target.",
        PanelQuery(f"sum by ({BY_RUN}) ({STARTUP_BY_PART})"),
        field=Field("s", NOT_STARTED),
        limit=STARTUP_TARGET_SECONDS,
    ).span(12),
    bar_gauge_panel(
        "Start-up by part",
        "Parts of the time to the first step of the newest launch, longest first.",
        PanelQuery(f"sort_desc({STARTUP_BY_PART})", "{{run}} {{part}}", instant=True),
        field=Field("s", NOT_STARTED),
    ).span(12),
]
LEARNING_PANELS = [
    time_series_panel(
        "Loss",
        "Training loss of the last logged step.",
        PanelQuery(max_query("train_loss", BY_RUN)),
        field=Field("none", NONE),
    ),
    time_series_panel(
        "Learning rate",
        "Learning rate of the last logged step.",
        PanelQuery(max_query("train_learning_rate", BY_RUN)),
        field=Field("none", NONE),
    ),
    time_series_panel(
        "Gradient norm",
        "Euclidean norm of the averaged gradient at the last logged step.",
        PanelQuery(max_query("train_grad_norm", BY_RUN)),
        field=Field("none", "Not measured in this run"),
    ),
    time_series_panel(
        "Accuracy",
        "Top-1 and top-5 accuracy of the newest evaluation.",
        PanelQuery(max_query("eval_top1_ratio", BY_RUN), "{{run}} top-1"),
        PanelQuery(max_query("eval_top5_ratio", BY_RUN), "{{run}} top-5"),
        field=Field("percentunit", UNMEASURED, max=1),
    ),
    time_series_panel(
        "Non-finite steps by kind",
        "Steps per second with a non-finite loss or gradient, by kind, and masked steps per second.",
        PanelQuery(rate_query("train_nonfinite_steps", f"{BY_RUN}, kind"), "{{run}} {{kind}}"),
        PanelQuery(rate_query("train_steps_skipped", BY_RUN), "{{run}} masked"),
        field=Field("count:steps/s", NONE, soft_max=1),
        alert="PodscaleNonFiniteSteps",
    ),
    time_series_panel(
        "Records replaced",
        "Records per second that were replaced, by reason.",
        PanelQuery(rate_query("train_samples_skipped", f"{BY_RUN}, reason"), "{{run}} {{reason}}"),
        field=Field("count:images/s", NONE, soft_max=1),
        alert="PodscaleSamplesSkippedHigh",
    ),
]
BOARD = Dashboard(
    "health",
    "Run health",
    "Wall time by state, checkpoints and restarts, and the convergence of the model.",
    {
        "Now": NOW_PANELS,
        "Time": TIME_PANELS,
        "Restarts and checkpoints": SAFETY_PANELS,
        "Start-up": STARTUP_PANELS,
        "Learning": LEARNING_PANELS,
    },
)
