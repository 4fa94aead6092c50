"""Page of results of the benchmark, from its measurements."""

import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.control_scale.runs import Start, Usage

TARGET_OTHERS = 500
"""Number of other runs to which slopes are extrapolated."""


@dataclass
class Level:
    """Measurements beside a number of other runs.

    Args:
        events: Events in the namespace.
        event_seconds: Time of one request for the events of one object.
        start: Usage of each launcher from its start until its pods ran.
        quiet: Their usage in a time without changes.
        busy: Their usage while other runs started.
        changed_pods: Pods of other runs that started in that time.
        pods_a_second: Rate at which they became ready; 0 if it was not measured.
    """

    others: int
    events: int
    event_seconds: float = 0.0
    ours: list[Start] = field(default_factory=list)
    plain: list[Start] = field(default_factory=list)
    start: list[Usage] = field(default_factory=list)
    quiet: list[Usage] = field(default_factory=list)
    busy: list[Usage] = field(default_factory=list)
    changed_pods: int = 0
    pods_a_second: float = 0.0


@dataclass(frozen=True)
class Waiting:
    """Usage of the launcher of a job that waits, in two equal times after each other."""

    kind: str
    first: Usage
    second: Usage


@dataclass
class Results:
    """All measurements.

    Args:
        sizes: Usage of a launcher until its pods ran, by number of its pods.
        queued_ours: Starts of runs that Kueue admits, by `podscale submit`.
        queued_plain: The same of JobSets written by hand.
    """

    sizes: dict[int, Usage] = field(default_factory=dict)
    levels: list[Level] = field(default_factory=list)
    queued_ours: list[Start] = field(default_factory=list)
    queued_plain: list[Start] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def text(given: Namespace, results: Results) -> list[str]:
    """Return the lines below the head of the page. Measurements that were ended early may be incomplete."""
    most = max((level.others for level in results.levels), default=0)
    return [
        f"{given.nodes:,} fake nodes of eight GPUs; runs of {given.pods} pods of two "
        f"GPUs; at most {most} other runs with {most * given.pods:,} pods, all in one namespace. API server, etcd, "
        "scheduler, controllers, JobSet and Kueue are real and share this machine with the benchmark. kwok simulates "
        "the kubelets. Nodes send no heartbeats, the scheduler scores 1 % of the nodes, and the controllers may send "
        f"500 requests a second (`python -m tests.cluster.lab many-nodes`). {given.launchers} launchers at a time are "
        "processes of Podscale; the other runs are JobSets written by hand with the labels of ours, because a launcher "
        "takes about 100 MiB. Nothing computes.",
        "",
        *results.remarks,
        *([""] if results.remarks else []),
        *_submission(results, most),
        *_launcher(given, results),
        *_waiting_job(given, results),
        *_control_plane(results),
    ]


def _submission(results: Results, most: int) -> list[str]:
    return [
        "## From submission to a node for every pod",
        "",
        "Seconds from the start of the command until the last pod has a node, median. `podscale submit` checks the "
        "cluster, lets the API server check the job, and creates it; `kubectl create` creates a JobSet written by "
        "hand. *Scheduling*: from the JobSet to the last node. Both kinds were started in turn.",
        "",
        "| other runs | `podscale submit` | by hand | ratio | scheduling: ours | by hand | ratio |",
        "|---:|---:|---:|---:|---:|---:|---:|",
        *(_start_row(f"{level.others}", level.ours, level.plain) for level in results.levels if level.plain),
        *([_start_row(f"{most}, by Kueue", results.queued_ours, results.queued_plain)] if results.queued_plain else []),
        "",
    ]


def _launcher(given: Namespace, results: Results) -> list[str]:
    watched = [level for level in results.levels if level.busy]
    return [
        "## A launcher beside other runs",
        "",
        f"Launchers of running jobs of the same size, medians of {given.launchers}. *Start*: from the start of the "
        "process until its pods run. "
        f"*Quiet*: the {given.seconds:g} s after that. *Busy*: while pods of other runs start in the same namespace. "
        "Each of the two watches lasts a minute, and a log is requested again after two minutes without a line.",
        "",
        "| other runs | start: objects, kB | quiet: requests a minute | objects | kB a minute | busy: started pods | "
        "requests a minute | objects | kB a minute | memory, MiB |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(_launcher_row(level) for level in watched),
        "",
        *_slopes(watched),
        "",
        "## A launcher by the size of its own run",
        "",
        "| own pods | objects until they run | kB | kB a pod | memory, MiB |",
        "|---:|---:|---:|---:|---:|",
        *(_size_row(pods, usage) for pods, usage in results.sizes.items()),
        "",
    ]


def _waiting_job(given: Namespace, results: Results) -> list[str]:
    return [
        "## A launcher whose job waits",
        "",
        f"Requests a minute in {2 * given.seconds:g} s after the reason was printed, and in the next "
        f"{2 * given.seconds:g} s: the pauses between two requests for the reason grow to a minute. The objects are "
        "the launcher's own pods, whose status the scheduler writes again with each attempt.",
        "",
        "| job waits because | first | then | objects | kB a minute |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {entry.kind} | {entry.first.requests_a_minute:.1f} | {entry.second.requests_a_minute:.1f} | "
            f"{entry.second.objects} | {entry.second.kilobytes_a_minute:.1f} |"
            for entry in results.waiting
        ),
        "",
    ]


def _control_plane(results: Results) -> list[str]:
    return [
        "## The control plane",
        "",
        "*Events*: one request for the events of one object, for which the API server reads all events of the "
        "namespace. A launcher sends such requests only while its pods do not run and give no reason themselves.",
        "",
        "| other runs | pods of other runs that became ready, a second | events in the namespace | one request, s |",
        "|---:|---:|---:|---:|",
        *(
            f"| {level.others} | {f'{level.pods_a_second:.0f}' if level.pods_a_second else ''} | {level.events:,} | "
            f"{level.event_seconds:.2f} |"
            for level in results.levels
        ),
    ]


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return slope and intercept of the least-squares line through points (x, y); slope 0 for equal x."""
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    if len(set(xs)) < 2:
        return 0.0, statistics.fmean(ys)
    fit = statistics.linear_regression(xs, ys)
    return fit.slope, fit.intercept


def _slopes(levels: Sequence[Level]) -> list[str]:
    """Return the slope of each quantity over the number of other runs, and its value at the target."""
    quiet = [(level.others, Usage.median(level.quiet)) for level in levels]
    quantities = {
        "requests a minute, quiet": [(others, usage.requests_a_minute) for others, usage in quiet],
        "kB a minute, quiet": [(others, usage.kilobytes_a_minute) for others, usage in quiet],
        "objects at the start": [(level.others, Usage.median(level.start).objects) for level in levels],
        "memory, MiB": [(others, usage.mib) for others, usage in quiet],
        "seconds from `podscale submit` to all nodes": [
            (level.others, _bound(level.ours)) for level in levels if level.ours
        ],
        "the same by hand": [(level.others, _bound(level.plain)) for level in levels if level.plain],
    }
    rows = []
    for name, points in quantities.items():
        if not points:
            continue
        rise, start = slope(points)
        rows.append(f"| {name} | {start:.1f} | {100 * rise:+.2f} | {start + TARGET_OTHERS * rise:.1f} |")
    return [
        f"Least-squares lines over the number of other runs, and their values at {TARGET_OTHERS}, extrapolated if no "
        "row above has it:",
        "",
        f"| quantity | at 0 | for each 100 other runs | at {TARGET_OTHERS} |",
        "|---|---:|---:|---:|",
        *rows,
    ]


def _bound(starts: Sequence[Start]) -> float:
    return statistics.median(start.bound for start in starts)


def _scheduling(starts: Sequence[Start]) -> float:
    return statistics.median(start.scheduling for start in starts)


def _start_row(name: str, ours: Sequence[Start], plain: Sequence[Start]) -> str:
    cells = [name]
    for seconds in (_bound, _scheduling):
        own, other = seconds(ours), seconds(plain)
        cells += [f"{own:.1f}", f"{other:.1f}", f"{own / max(other, 1e-3):.2f}"]
    return f"| {' | '.join(cells)} |"


def _launcher_row(level: Level) -> str:
    start, quiet, busy = map(Usage.median, (level.start, level.quiet, level.busy))
    cells = [f"{level.others}", f"{start.objects:g}, {start.bytes / 1000:.0f}"]
    cells += [f"{quiet.requests_a_minute:.1f}", f"{quiet.objects:g}", f"{quiet.kilobytes_a_minute:.1f}"]
    cells += [f"{level.changed_pods:,}", f"{busy.requests_a_minute:.1f}", f"{busy.objects:g}"]
    cells += [f"{busy.kilobytes_a_minute:.1f}", f"{busy.mib:.0f}"]
    return f"| {' | '.join(cells)} |"


def _size_row(pods: int, usage: Usage) -> str:
    kilobytes = usage.bytes / 1000
    return f"| {pods} | {usage.objects} | {kilobytes:.0f} | {kilobytes / pods:.0f} | {usage.mib:.0f} |"
