"""Ranks: who is slow, who waits for whom, and who has stopped."""

from podscale.monitoring.dashboards.frame import Board
from podscale.monitoring.dashboards.panels import Panel, Query, Step, figure, heat, lines
from podscale.monitoring.dashboards.queries import BUSY, BY_RANK, BY_RUN, largest, series, share
from podscale.monitoring.thresholds import DEFAULTS

NONE = "Nothing trained in this time"
ALIKE = "The ranks have not been compared yet"
RANK = "rank {{rank}}"
SLOW = Step(DEFAULTS["stragglerRatio"], "red")
SILENT = f"time() - {largest('train_last_step_timestamp_seconds', BY_RANK, ranks=True)}"


def _phase(title: str, text: str, phase: str) -> Panel:
    return lines(
        title,
        text,
        Query(share("train_phase_seconds", BY_RANK, "", f'phase="{phase}"', ranks=True), RANK),
        unit="percentunit",
        empty=NONE,
        span=6,
    )


NOW = [
    figure(
        "Slowest rank",
        "The rank that was busy longest in the last interval.",
        Query(largest("train_straggler_rank", BY_RUN), instant=True),
        unit="none",
        empty=ALIKE,
        span=6,
    ),
    figure(
        "Straggler ratio",
        "Busy time of the slowest rank over that of the fastest.",
        Query(largest("train_straggler_ratio", BY_RUN)),
        unit="none",
        empty=ALIKE,
        span=6,
        base="green",
        steps=[Step(1.1, "orange"), SLOW],
        decimals=2,
    ),
    figure(
        "Ranks seen",
        "Ranks whose series were scraped; fewer than the run has means lost ones.",
        Query(f"count by ({BY_RUN}) ({series('train_last_step_timestamp_seconds')})"),
        unit="none",
        empty=NONE,
        alert="PodscaleMetricsAbsent",
        span=6,
    ),
    figure(
        "Longest silence",
        "Time since the last update of the rank that is furthest behind.",
        Query(f"max by ({BY_RUN}) ({SILENT})"),
        unit="s",
        empty=NONE,
        span=6,
        decimals=1,
    ),
]
BUSY_TIME = [
    heat(
        "Busy time of an update, over that of the fastest rank",
        "Time before a rank began to wait for others: a straggler is the row that stays red. Images per second cannot"
        " show it, because in synchronous training they are the same on all ranks.",
        Query(f"({BUSY}) / on ({BY_RUN}) group_left () min by ({BY_RUN}) ({BUSY})", "{{rank}}"),
        unit="none",
        empty=NONE,
        limits=(1, 1.5),
    ),
    lines(
        "Busy time of an update",
        "Time before a rank began to wait for others.",
        Query(BUSY, RANK),
        unit="s",
        empty=NONE,
        span=12,
    ),
    lines(
        "Straggler ratio",
        "Busy time of the slowest rank over that of the fastest; dashed: from where on it is worth a look.",
        Query(largest("train_straggler_ratio", BY_RUN)),
        unit="none",
        empty=ALIKE,
        alert="PodscaleStraggler",
        span=12,
        steps=[SLOW],
        smallest=None,
    ),
]
PHASES = [
    _phase("Waiting for data", "A slow loader or disk under one rank shows here.", "data_wait"),
    _phase("Forward and backward", "A slow or throttled device shows here.", "forward_backward"),
    _phase("Waiting for other ranks", "Lowest on the straggler, high on all others.", "allreduce_wait"),
    _phase("Optimizer", "The update itself; alike on all ranks.", "optimizer"),
]
STATE = [
    lines(
        "Memory",
        "Memory of each rank's process, and of its device.",
        Query(f"max by ({BY_RANK}, kind) ({series('train_memory_bytes', ranks=True)})", "rank {{rank}} {{kind}}"),
        unit="bytes",
        empty=NONE,
        span=12,
    ),
    lines(
        "Time since the last update",
        "Grows on all ranks alike while they wait for one; dashed: from where on a rank calls it a hang.",
        Query(SILENT, RANK),
        Query(largest("train_hang_limit_seconds", BY_RUN, ranks=True), "hang limit", dashed=True),
        unit="s",
        empty=NONE,
        alert="PodscaleTrainingStalled",
        span=12,
    ),
]
BOARD = Board(
    "ranks",
    "Ranks",
    "The ranks of one run beside each other: who is slow, who waits for whom, who has stopped.",
    {"Now": NOW, "Busy time": BUSY_TIME, "Phases, share of each rank's time": PHASES, "State": STATE},
    runs=False,
    ranks=True,
)
