"""Timer of one rank's steps and their phases, for its metrics, its heartbeat, the hang limit and goodput."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from podscale.distributed.progress_tracker import ProgressTracker
from podscale.telemetry.goodput import GoodputTracker
from podscale.telemetry.metrics import Interval, TrainMetrics
from podscale.telemetry.phases import BusyTime, interval_steps

PhaseTimer = Callable[[str], AbstractContextManager[None]]
"""Context manager that times one phase of a step, by name."""


def untimed(name: str) -> AbstractContextManager[None]:
    """Phase timer that measures nothing."""
    return nullcontext()


class StepTimer:
    """Timer of one rank's steps. Between two log lines it only counts.

    A step begins when its data is requested. The rank counts as busy until it waits for other ranks. On a GPU, phases
    are host times: queued work shows up in the phase in which the host first waits for it.
    """

    def __init__(
        self,
        metrics: TrainMetrics,
        log_every: int,
        progress_tracker: ProgressTracker | None = None,
        goodput_tracker: GoodputTracker | None = None,
    ) -> None:
        self.metrics, self.goodput_tracker, self.busy_time = metrics, goodput_tracker, BusyTime()
        self._log_every, self._interval_steps = log_every, interval_steps(log_every)
        self._progress_tracker = progress_tracker or ProgressTracker()
        self._step_started = time.perf_counter()
        self._last_step = 0
        self._intervals: dict[int, Interval] = {}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a block as one phase of the step (names: `telemetry.phases`)."""
        self._progress_tracker.enter_phase(name)
        if self.goodput_tracker is not None:
            self.goodput_tracker.enter_phase(name)
        if name == "data_wait":
            self._step_started = time.perf_counter()
        elif name == "allreduce_wait":
            self.wait_started()
        return self.metrics.phase(name)

    def subphase(self, name: str) -> AbstractContextManager[None]:
        """Time nothing, but record progress: the time is counted in an enclosing phase."""
        self._progress_tracker.touch()
        return nullcontext()

    def wait_started(self) -> None:
        """Mark the end of this step's busy time: the rank waits for its devices or for other ranks."""
        self.busy_time.add(time.perf_counter() - self._step_started)

    @property
    def busy_seconds(self) -> float:
        """Mean busy time per step of this interval so far, seconds: before this rank waits for others."""
        return self.busy_time.mean

    def restore_started(self) -> None:
        """Count the time until `start` as restore time."""
        if self.goodput_tracker is not None:
            self.goodput_tracker.enter_restore()

    def start(self, step: int, last_step: int) -> None:
        """Set the step that training continues from, and the last step of the run."""
        self._last_step = last_step
        self._progress_tracker.start(step)
        if self.goodput_tracker is not None:
            self.goodput_tracker.start(step)
        self.metrics.take_interval()

    def batch_changed(self) -> None:
        """Forget the times of steps of another batch: the next step may compile, and later ones take other times."""
        self._progress_tracker.batch_changed()

    def step_done(self, step: int, images: int, steps: int) -> None:
        """Count the `steps` steps up to `step`, of `images` images of this rank each, since data was requested."""
        seconds = (time.perf_counter() - self._step_started) / steps
        self._progress_tracker.step_done(step, seconds)
        if self.goodput_tracker is not None:
            self.goodput_tracker.step_done(step)
        for _ in range(steps):
            self.metrics.count_step(images, seconds)
        if self.completes_interval(step):
            self.busy_time.next_interval()
        if step % self._log_every == 0 or step == self._last_step:
            self._intervals[step] = self.metrics.take_interval()

    def completes_interval(self, step: int) -> bool:
        """Return True if the ranks are compared after this step."""
        return step % self._interval_steps == 0

    def pop_interval(self, step: int) -> Interval | None:
        """Remove and return the interval that this step's log line covers; None if the step has no log line."""
        return self._intervals.pop(step, None)
