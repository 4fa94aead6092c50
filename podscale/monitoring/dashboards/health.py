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

NONE = "Nothing trained in this time"
UNSAVED = "No checkpoint yet"
UNMEASURED = "Not evaluated yet"
WALL_BY_STATE = f"sum by (state) ({total_increase_query('train_wall_seconds', BY_STATE, RANGE)})"
BADPUT = f"sum by (state) ({total_increase_query('train_wall_seconds', BY_STATE, RECENT_RANGE, UNPRODUCTIVE)})"
CHECKPOINT_DURATION = "train_checkpoint_duration_seconds"

NOW_PANELS = [
    stat_panel(
        "Goodput",
        "Share of the wall time shown that was spent on steps that were kept.",
        PanelQuery(GOODPUT, instant=True),
        field=Field("percentunit", NONE, decimals=1),
        thresholds={None: "red", DEFAULT_THRESHOLDS["goodputShare"]: "orange", 0.9: "green"},
    ),
    stat_panel(
        "Restarts",
        "Launches after the first, over the whole life of the run.",
        PanelQuery(RESTARTS),
        field=Field("none", NONE),
        alert="PodscaleRestartLoop",
        thresholds={None: "green", 1: "orange", DEFAULT_THRESHOLDS["restartsPerHour"]: "red"},
    ),
    stat_panel(
        "Checkpoint age",
        "Time since the newest complete checkpoint: what a crash now would cost.",
        PanelQuery(CHECKPOINT_AGE),
        field=Field("s", UNSAVED, decimals=1),
    ),
    stat_panel(
        "Failed checkpoints",
        "Checkpoints not written in the time shown.",
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
        "Steps with a non-finite loss or gradient on any rank in the time shown; they are masked.",
        PanelQuery(integer_increase_query("train_nonfinite_steps", BY_RUN), instant=True),
        field=Field("none", NONE),
        thresholds={None: "green", 1: "red"},
    ),
    stat_panel(
        "Records replaced",
        "Records that could not be decoded in the time shown, and others trained on instead.",
        PanelQuery(integer_increase_query("train_samples_skipped", BY_RUN), instant=True),
        field=Field("none", NONE),
        thresholds={None: "green", 1: "orange"},
    ),
]
TIME_PANELS = [
    bar_gauge_panel(
        "What the time went to",
        "Share of the wall time shown, by what it was spent on. Only productive is good for anything.",
        PanelQuery(f"sort_desc({WALL_BY_STATE} / scalar(sum({WALL_BY_STATE})))", "{{state}}", instant=True),
        field=Field("percentunit", NONE, max=1),
    ),
    time_series_panel(
        "Goodput",
        "Share of the last five minutes that was spent on steps that were kept.",
        PanelQuery(RECENT_GOODPUT),
        field=Field("percentunit", NONE, max=1),
        alert="PodscaleGoodputLow",
        limit=DEFAULT_THRESHOLDS["goodputShare"],
    ),
    time_series_panel(
        "Badput by state",
        "Share of the last five minutes that was spent on anything else. A kill shows as recovery, then redo.",
        PanelQuery(f"{BADPUT} / on () group_left () sum({RECENT_WALL_SECONDS})", "{{state}}"),
        field=Field("percentunit", NONE),
        stacked=True,
    ),
]
SAFETY_PANELS = [
    time_series_panel(
        "Restarts",
        "Launches after the first, by how the one before ended.",
        PanelQuery(f"max by ({BY_RUN}, cause) ({series_selector('train_restarts')}) > 0", "{{run}} {{cause}}"),
        field=Field("none", "No restart"),
    ).span(6),
    time_series_panel(
        "Launches",
        "Of the training so far, told before its ranks begin: these grow and restarts do not where ranks die in their"
        " start.",
        PanelQuery(max_query("train_launches", BY_RUN)),
        field=Field("none", NONE),
        alert="PodscaleRestartLoop",
    ).span(6),
    time_series_panel(
        "Checkpoint age",
        "Time since the newest complete checkpoint; dashed: the longest time between two by the run document.",
        PanelQuery(CHECKPOINT_AGE),
        PanelQuery(max_query("train_checkpoint_interval_seconds", BY_RUN), "{{run}} interval", dashed=True),
        field=Field("s", UNSAVED),
        alert="PodscaleCheckpointStale",
    ).span(6),
    time_series_panel(
        "Duration of a checkpoint",
        "Mean time to write one, beside training, or to read it.",
        PanelQuery(
            f"{rate_query(CHECKPOINT_DURATION, f'{BY_RUN}, op', suffix='_sum')} / "
            f"({rate_query(CHECKPOINT_DURATION, f'{BY_RUN}, op', suffix='_count')} > 0)",
            "{{run}} {{op}}",
        ),
        field=Field("s", "No checkpoint in this time"),
    )
    .show_points(VisibilityMode.ALWAYS)
    .span(6),
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
        "Steps that were not finite",
        "Steps a second with a non-finite loss or gradient, by kind, and those masked.",
        PanelQuery(rate_query("train_nonfinite_steps", f"{BY_RUN}, kind"), "{{run}} {{kind}}"),
        PanelQuery(rate_query("train_steps_skipped", BY_RUN), "{{run}} masked"),
        field=Field("count:steps/s", NONE, soft_max=1),
        alert="PodscaleNonFiniteSteps",
    ),
    time_series_panel(
        "Records replaced",
        "Records a second that were replaced, by reason.",
        PanelQuery(rate_query("train_samples_skipped", f"{BY_RUN}, reason"), "{{run}} {{reason}}"),
        field=Field("count:images/s", NONE, soft_max=1),
        alert="PodscaleSamplesSkippedHigh",
    ),
]
BOARD = Dashboard(
    "health",
    "Run health",
    "What a run's wall time went to, what a crash would cost, and whether the model learns.",
    {"Now": NOW_PANELS, "Time": TIME_PANELS, "Restarts and checkpoints": SAFETY_PANELS, "Learning": LEARNING_PANELS},
)
