"""Cost of control on a large cluster: launchers of Podscale beside hundreds of runs on 10,000 fake nodes.

    python -m benchmarks.control_scale [--nodes 10000] [--others 0 10 100 250 500]

It needs the cluster of tests/cluster with JobSet, Kueue and kwok, in its settings for many nodes:

    make cluster-up WITH="jobset kueue kwok" && python -m tests.cluster.lab many-nodes

API server, scheduler, controllers, JobSet and Kueue are real; kwok simulates the kubelets; nothing computes. At each
number of other runs it measures some launchers in processes of their own (their start, a quiet time, and the time in
which the next other runs start), and the time from a command until all pods of a run have a node: for `podscale submit`
and for a JobSet written by hand, in turn. The other runs are JobSets written by hand with the labels of ours.
"""

import os
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.conditions import head
from benchmarks.control_scale import page
from benchmarks.control_scale.cluster import Cluster, queues
from benchmarks.control_scale.page import Level, Waiting
from benchmarks.control_scale.runs import Launcher, Runs, Start
from benchmarks.harness import Options, exit_unavailable, write_results
from tests.cluster.lab import places

QUEUE, FULL_QUEUE = "open", "full"
"""LocalQueue with quota for all pods, and one without quota."""
NO_NODE = "launch.cluster.node_selector={podscale.dev/benchmark: none}"


def main() -> None:
    os.environ["PATH"] = f"{places.bin_dir()}:{os.environ['PATH']}"  # the lab's kubectl
    options = Options(__doc__)
    # Another cluster is used only if it is named, because nodes are created.
    options.add_argument("--kubeconfig", type=Path, default=places.KUBECONFIG, help="cluster (default: the lab's)")
    options.add_size("--nodes", full=10000, small=4, type=int, help="fake nodes of eight GPUs")
    options.add_size("--pods", full=64, small=2, type=int, help="pods of a run")
    options.add_size("--sizes", full=[16, 64, 256], small=[1], type=int, nargs="+", help="pods of a launcher's own run")
    options.add_size("--others", full=[0, 10, 100, 250, 500], small=[0, 1], type=int, nargs="+", help="other runs")
    options.add_size("--launchers", full=4, small=1, type=int, help="launchers that are measured at once")
    options.add_size("--pairs", full=3, small=1, type=int, help="runs of each kind that are started at each number")
    options.add_size("--seconds", full=60.0, small=1.0, type=float, help="quiet time of a launcher")
    options.add_size("--minutes", full=40.0, small=3.0, type=float, help="time after which no more runs are added")
    given = options.read()
    if shutil.which("kubectl") is None:
        exit_unavailable("kubectl is not installed")
    cluster = Cluster(given.kubeconfig)
    lines = head("Cost of control on a large cluster", ["kubernetes"])
    with tempfile.TemporaryDirectory() as folder, cluster.nodes(given.nodes) as seconds, cluster.namespace() as name:
        print(f"{given.nodes} nodes after {seconds:.0f} s", flush=True)
        measured = Measurement(given, Runs(cluster, name, Path(folder), given.pods))
        try:
            measured.sizes()
            measured.levels()
            measured.waiting_launchers()
        except TimeoutError as error:  # what was measured before is worth a page
            measured.results.remarks.append(f"Ended early: {error}.")
        write_results(given.results, "control-scale.md", lines + page.text(given, measured.results))
        print("deleting runs and nodes", flush=True)


@dataclass
class Measurement:
    """Measurements in one namespace, in this order: sizes, levels, launchers of waiting jobs."""

    given: Namespace
    runs: Runs
    results: page.Results = field(default_factory=page.Results)

    def sizes(self) -> None:
        """Measure the start of launchers of runs of several sizes, without other runs."""
        for pods in self.given.sizes:
            with self.runs.launcher(f"size-{pods}", pods=pods) as launcher:
                launcher.wait_for("running")
                time.sleep(self.given.seconds / 10)
                self.results.sizes[pods] = launcher.usage()
            print(f"{pods} pods: {self.results.sizes[pods]}", flush=True)

    def levels(self) -> None:
        """Measure at each number of other runs until the time is over."""
        began, numbers = time.monotonic(), list(self.given.others)
        for number, following in zip(numbers, [*numbers[1:], None], strict=True):
            left = self.given.minutes - (time.monotonic() - began) / 60
            if number > self.runs.others:  # only the first number: the others are created beside a launcher
                self.runs.fill(number, left)
            level = Level(number, self.runs.cluster.event_count(self.runs.namespace))
            self.results.levels.append(level)
            self._measure_starts(level)
            with ExitStack() as stack:
                names = [f"watched-{number}-{index}" for index in range(self.given.launchers)]
                launchers = [stack.enter_context(self.runs.launcher(name)) for name in names]
                self._measure_launchers(level, launchers)
                left = self.given.minutes - (time.monotonic() - began) / 60
                if following is not None and left > 0:
                    self._fill(level, following, left)
                else:
                    self.runs.create_by_hand()
                    level.changed_pods = self.given.pods
                level.busy = [launcher.usage() for launcher in launchers]
            print(level, flush=True)
            if following is None or left <= 0:
                return

    def _measure_starts(self, level: Level) -> None:
        """Start runs of both kinds in turn, each kind first in every second pair."""
        for pair in range(self.given.pairs):
            kinds: list[tuple[list[Start], Callable[[], Start]]] = [
                (level.ours, self.runs.submit),
                (level.plain, self.runs.create_by_hand),
            ]
            for starts, start in kinds if pair % 2 == 0 else reversed(kinds):
                starts.append(start())
        level.event_seconds = statistics.median(self.runs.cluster.event_seconds(self.runs.namespace) for _ in range(3))

    def _measure_launchers(self, level: Level, launchers: Sequence[Launcher]) -> None:
        for launcher in launchers:
            launcher.wait_for("running")
        time.sleep(min(10.0, self.given.seconds))  # until the last changes of their own pods have arrived
        level.start = [launcher.usage() for launcher in launchers]
        time.sleep(self.given.seconds)
        level.quiet = [launcher.usage() for launcher in launchers]

    def _fill(self, level: Level, others: int, minutes: float) -> None:
        """Start more other runs, and record how many of their pods ran in the end, and how fast."""
        before, started = self.runs.ready_others(), time.monotonic()
        try:
            self.runs.fill(others, minutes)
        except TimeoutError as error:
            self.results.remarks.append(f"The time was over before {others} other runs ran: {error}.")
        level.changed_pods = self.runs.ready_others() - before
        level.pods_a_second = level.changed_pods / (time.monotonic() - started)

    def waiting_launchers(self) -> None:
        """Measure runs that Kueue admits, and launchers of jobs that wait for nodes or for quota."""
        with ExitStack() as stack:
            stack.enter_context(queues(self.runs.cluster, self.runs.namespace, QUEUE, FULL_QUEUE))
            for _ in range(self.given.pairs):
                self.results.queued_ours.append(self._start_queued(ours=True))
                self.results.queued_plain.append(self._start_queued(ours=False))
            launchers: dict[str, Launcher] = {}
            for kind, change, text in (
                ("no node fits", NO_NODE, "unschedulable"),
                ("no quota", f"launch.cluster.queue={FULL_QUEUE}", "queued"),
            ):
                launchers[kind] = stack.enter_context(self.runs.launcher(f"waits-{len(launchers)}", change))
                launchers[kind].wait_for(text)
            usages = {kind: [launcher.usage()] for kind, launcher in launchers.items()}
            for _ in range(2):
                time.sleep(2 * self.given.seconds)
                for kind, launcher in launchers.items():
                    usages[kind].append(launcher.usage())
            print(self.results.queued_ours, self.results.queued_plain, usages, flush=True)
            self.results.waiting = [Waiting(kind, first, then) for kind, (_, first, then) in usages.items()]

    def _start_queued(self, *, ours: bool) -> Start:
        return self.runs.submit(f"launch.cluster.queue={QUEUE}") if ours else self.runs.create_by_hand(QUEUE)


if __name__ == "__main__":
    main()
