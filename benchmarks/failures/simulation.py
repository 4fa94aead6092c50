"""Discrete-event simulation of a training whose nodes fail, with a virtual clock and Podscale's own accounting.

Fake pods train at a modelled pace and drive the time accounting of `podscale.telemetry.goodput` as the supervisor and
rank 0 do: a heartbeat file every two seconds, a launch after every failure, phases and steps. Nothing runs on a
cluster; `benchmarks.failures.fleet` adds the jobs and pods.
"""

import math
import random
from dataclasses import dataclass, field, replace

from benchmarks.failures.model import FakeRun, failure_times
from podscale.telemetry.goodput import INTERVAL_SECONDS, GoodputState, GoodputTracker, after_join, after_launch


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
        steps: Steps after which the training is done; None: it never ends.
        file: Text of the goodput file; None before the first heartbeat.
        saved_step: Step of the newest checkpoint.
        logged_step: Highest step in the event log.
        failures: Number of failures of nodes that ended a launch.
        launches: Steps done before and after each launch that has trained.
    """

    run: FakeRun
    clock: VirtualClock = field(default_factory=VirtualClock)
    steps: int | None = None
    file: str | None = None
    saved_step: int = 0
    logged_step: int = 0
    failures: int = 0
    launches: list[tuple[int, int]] = field(default_factory=list)

    def launch(self, stop: float) -> bool:
        """Simulate a launch, which ends at the time `stop` or with the last step. Returns True if it was the last."""
        tracker = self._join(stop)
        if tracker is None:
            return False
        launch = _Launch(self, tracker, stop)
        try:
            launch.train()
        except NodeFailed:
            self.clock.now = stop
            return False
        finally:
            self.launches.append((launch.first_step, launch.step))
        self.file = tracker.state("done").to_json()
        return True

    def state(self) -> GoodputState:
        """Return the accounting in the goodput file."""
        state = GoodputState.parse(self.file or "")
        assert state is not None
        return state

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
        self.first_step = self.step = simulation.saved_step

    def train(self) -> None:
        simulation, tracker, run = self._simulation, self._tracker, self._simulation.run
        tracker.start(self.step)
        while simulation.steps is None or self.step < simulation.steps:
            tracker.enter_phase("forward_backward")
            self._pass(run.step_seconds)
            self.step += 1
            tracker.step_done(self.step)
            simulation.logged_step = max(simulation.logged_step, self.step)
            if self.step % run.checkpoint_steps == 0:
                tracker.enter_phase("checkpoint")
                self._pass(run.save_seconds)
                simulation.saved_step = self.step

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
    simulation, failure = Simulation(run), next(failures)
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
    state = simulation.state()
    final = after_launch(state, end, 0.0)  # the next launch would count the time since the last heartbeat
    return replace(state, seconds=final.seconds), simulation


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


def simulate_fleet(run: FakeRun, runs: int, hours: float) -> FleetResult:
    results = [simulate(run, hours, number) for number in range(runs)]
    return FleetResult(run, tuple(state for state, _ in results), sum(done.failures for _, done in results))
