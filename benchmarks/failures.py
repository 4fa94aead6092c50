"""Goodput of runs whose nodes fail at published rates, from Podscale's own accounting, against the analytic value.

    python -m benchmarks.failures [--hours 72] [--repetitions 8]

A discrete-event simulation with a virtual clock. Fake pods train at a modelled pace and drive the time accounting of
`podscale.telemetry.goodput` as the supervisor and rank 0 do: a heartbeat file every two seconds, a launch after every
failure, phases and steps. Nothing runs on a cluster, and no job is submitted.

The analytic value is Daly's for exponentially distributed failures: J. Daly, A higher order estimate of the optimum
checkpoint interval for restart dumps, Future Generation Computer Systems 22 (2006).
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from podscale.telemetry.goodput import INTERVAL_SECONDS, GoodputState, GoodputTracker, after_join, after_launch

LLAMA_3 = 419 / (54 * 24 * 16384 / 8)
"""Failures of a node of eight GPUs per hour: 419 interruptions in 54 days of 16,384 GPUs (arXiv 2407.21783)."""
RSC_1 = 6.5 / 1000 / 24
"""The same of Meta's RSC-1: 6.50 failures per 1,000 node days (arXiv 2410.21680, recalled)."""
RSC_2 = 2.34 / 1000 / 24
"""The same of Meta's RSC-2 (recalled)."""
TOLERANCE = 0.03
"""Largest relative difference between measured and analytic goodput."""


@dataclass(frozen=True)
class FakeRun:
    """Modelled run.

    Args:
        nodes: Number of nodes; the failure of any one of them ends the launch.
        failure_rate: Failures of one node per hour.
        step_seconds: Time of a step.
        checkpoint_steps: Steps between two checkpoints.
        save_seconds: Time for which a checkpoint stalls the loop.
        replace_seconds: Time from a failure until the processes of the next launch start.
        start_seconds: Time from there to the first step, with the restore.
    """

    nodes: int
    failure_rate: float
    step_seconds: float = 10.0
    checkpoint_steps: int = 60
    save_seconds: float = 5.0
    replace_seconds: float = 120.0
    start_seconds: float = 120.0

    @property
    def failures_per_second(self) -> float:
        return self.nodes * self.failure_rate / 3600

    def analytic_goodput(self) -> float:
        """Return the expected fraction of time that trains, by Daly's formula for the time of one checkpoint interval.

        The first start, which takes place once, is left out.
        """
        rate, work = self.failures_per_second, self.checkpoint_steps * self.step_seconds
        restart = self.replace_seconds + self.start_seconds
        return work * rate / (math.exp(rate * restart) * math.expm1(rate * (work + self.save_seconds)))

    def best_checkpoint_steps(self) -> int:
        """Return Young's interval, the first-order optimum, in steps."""
        return max(1, round(math.sqrt(2 * self.save_seconds / self.failures_per_second) / self.step_seconds))


class NodeFailed(Exception):
    """A node failed, or the simulated time is over."""


class VirtualClock:
    """Seconds since the beginning, which are both the wall clock and the monotonic clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now


@dataclass
class Simulation:
    """One run until the end of the simulated time, over all its launches.

    Args:
        file: Text of the goodput file; None before the first heartbeat.
        saved_step: Step of the newest checkpoint.
        logged_step: Highest step in the event log.
        failures: Number of failures of nodes that ended a launch.
    """

    run: FakeRun
    clock: VirtualClock
    file: str | None = None
    saved_step: int = 0
    logged_step: int = 0
    failures: int = 0

    def launch(self, stop: float) -> None:
        """Simulate a launch, which ends at the time `stop`."""
        tracker = self._join(stop)
        if tracker is None:
            return
        try:
            _Launch(self, tracker, stop).train()
        except NodeFailed:
            self.clock.now = stop

    def _join(self, stop: float) -> GoodputTracker | None:
        """Write the file as the supervisor, and return the accounting of rank 0; None if the start is not completed."""
        began, clock = self.clock.now, self.clock
        previous = GoodputState.parse(self.file) if self.file else None
        self.file = after_launch(previous, clock.now, 0.0).to_json()
        clock.now = began + self.run.start_seconds
        if clock.now >= stop:
            clock.now = stop
            return None
        state = after_join(GoodputState.parse(self.file), clock.now, clock.now - began, self.logged_step)
        return GoodputTracker(state, clock=clock.read, wall_clock=clock.read)


class _Launch:
    """Training of one launch: steps and checkpoints until a node fails."""

    def __init__(self, simulation: Simulation, tracker: GoodputTracker, stop: float) -> None:
        self._simulation, self._tracker, self._stop = simulation, tracker, stop
        self._began = simulation.clock.now
        self._step = simulation.saved_step

    def train(self) -> None:
        simulation, tracker, run = self._simulation, self._tracker, self._simulation.run
        tracker.start(self._step)
        while True:
            tracker.enter_phase("forward_backward")
            self._pass(run.step_seconds)
            self._step += 1
            tracker.step_done(self._step)
            simulation.logged_step = max(simulation.logged_step, self._step)
            if self._step % run.checkpoint_steps == 0:
                tracker.enter_phase("checkpoint")
                self._pass(run.save_seconds)
                simulation.saved_step = self._step

    def _pass(self, seconds: float) -> None:
        """Let time pass, until the end of the launch at most."""
        clock = self._simulation.clock
        end = clock.now + seconds
        if end > self._stop - INTERVAL_SECONDS:
            self._write_last_heartbeats(min(end, self._stop))
        if end >= self._stop:
            raise NodeFailed
        clock.now = end

    def _write_last_heartbeats(self, end: float) -> None:
        """Write the heartbeats until `end` that may be the last ones of the launch; earlier ones have no effect."""
        clock = self._simulation.clock
        first = max(clock.now, self._stop - INTERVAL_SECONDS)
        heartbeat = self._began + math.ceil((first - self._began) / INTERVAL_SECONDS) * INTERVAL_SECONDS
        if heartbeat <= end:
            clock.now = heartbeat
            self._simulation.file = self._tracker.state().to_json()


def simulate(run: FakeRun, hours: float, seed: int) -> tuple[GoodputState, Simulation]:
    """Return the accounting of all simulated time, and the simulation."""
    end = hours * 3600
    failures = failure_times(run.failures_per_second, random.Random(seed))
    simulation, failure = Simulation(run, VirtualClock()), next(failures)
    while simulation.clock.now < end:
        simulation.launch(min(failure, end))
        if simulation.clock.now >= end:
            break
        simulation.failures += 1
        ready = failure + run.replace_seconds
        while (failure := next(failures)) < ready:  # another node fails while pods are replaced, so they wait again
            simulation.failures += 1
            ready = failure + run.replace_seconds
        simulation.clock.now = ready
    state = GoodputState.parse(simulation.file or "")
    assert state is not None
    final = after_launch(state, end, 0.0)  # the next launch would count the time since the last heartbeat
    return replace(state, seconds=final.seconds), simulation


def failure_times(rate: float, source: random.Random) -> Iterator[float]:
    """Yield the times of a Poisson process with this rate, seconds."""
    time = 0.0
    while True:
        time += source.expovariate(rate)
        yield time


@dataclass(frozen=True)
class FleetResult:
    """Accounting of equal runs in one simulated time, added up.

    Args:
        run: The run.
        states: Accounting of each run.
        failures: Number of failures of nodes.
    """

    run: FakeRun
    states: tuple[GoodputState, ...]
    failures: int

    def seconds(self, state: str) -> float:
        return sum(entry.seconds[state] for entry in self.states)

    @property
    def wall_seconds(self) -> float:
        return sum(entry.wall_seconds for entry in self.states)

    @property
    def goodput(self) -> float:
        return self.seconds("productive") / self.wall_seconds

    @property
    def difference(self) -> float:
        """Relative difference of measured and analytic goodput."""
        return self.goodput / self.run.analytic_goodput() - 1

    def row(self, name: str, runs: str) -> str:
        minutes = self.run.checkpoint_steps * self.run.step_seconds / 60
        shares = [self.seconds(state) / self.wall_seconds for state in ("checkpoint_save", "redo", "recovery", "init")]
        analytic = self.run.analytic_goodput()
        cells = [name, runs, f"{minutes:.1f}", str(self.failures), f"{self.goodput:.2%}", f"{analytic:.2%}"]
        return f"| {' | '.join([*cells, f'{self.difference:+.2%}', *(f'{share:.2%}' for share in shares)])} |"


def simulate_fleet(run: FakeRun, runs: int, hours: float, first_seed: int = 0) -> FleetResult:
    results = [simulate(run, hours, first_seed + number) for number in range(runs)]
    return FleetResult(run, tuple(state for state, _ in results), sum(done.failures for _, done in results))


def main() -> None:
    options = Options(__doc__)
    options.add_size("--hours", full=72.0, small=12.0, help="simulated hours", type=float)
    options.add_size("--repetitions", full=8, small=1, help="repetitions of the large run", type=int)
    options.add_size("--runs", full=156, small=2, help="runs of 64 nodes; 156 take 10,000", type=int)
    given = options.read()
    lines = head("Goodput when nodes fail", [])
    large = FakeRun(2048, LLAMA_3)
    rows, results = [], []
    for name, run, runs, text in (
        ("Llama 3", large, given.repetitions, f"1 of 2,048 nodes, {given.repetitions} times"),
        ("RSC-1", FakeRun(64, RSC_1), given.runs, f"{given.runs} of 64 nodes"),
        ("RSC-2", FakeRun(64, RSC_2), given.runs, f"{given.runs} of 64 nodes"),
    ):
        for steps in (run.best_checkpoint_steps(), round(1800 / run.step_seconds)):
            result = simulate_fleet(replace(run, checkpoint_steps=steps), runs, given.hours)
            rows.append(result.row(name, text))
            results.append(result)
    worst = max(abs(result.difference) for result in results)
    lines += [
        f"A discrete-event simulation of {given.hours:g} hours. Fake pods train at a modelled pace (a step of "
        f"{large.step_seconds:g} s; a checkpoint stalls it for {large.save_seconds:g} s; {large.replace_seconds:g} s "
        f"until the pods of a failed node are replaced and {large.start_seconds:g} s until they train) and drive "
        "Podscale's own accounting. No cluster, no job and no launcher takes part. `analytic` is Daly's formula. The "
        "first of two rows has Young's checkpoint interval, the second one of 30 minutes. Llama 3's rate is from its "
        "paper (arXiv 2407.21783); those of RSC-1 and RSC-2 (arXiv 2410.21680) are recalled.",
        "",
        "| failure rate | runs | checkpoint, min | failures | goodput | analytic | difference | saves | redo | "
        "recovery | init |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *rows,
        "",
        f"The largest difference is {worst:.2%} (goal: at most {TOLERANCE:.0%}).",
    ]
    write_results(given.results, "failures.md", lines)


if __name__ == "__main__":
    main()
