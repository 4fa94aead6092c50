"""Report of a launch's start on rank 0: the seconds of each part, from the submission of the job to the first step.

The clock of the launch knows the parts up to the built model. The goodput tracker has timed the restore and the first
step. What is left is the wait for the first batch, so that the parts add up. The launcher leaves the parts before the
container started; they may arrive after the first step.
"""

from collections.abc import Callable, Iterator

from podscale.distributed.startup_clock import StartupClock
from podscale.runs.job_start import JobStart
from podscale.telemetry.catalogue import STARTUP_PARTS
from podscale.telemetry.goodput import GoodputTracker
from podscale.telemetry.registry import MetricSample

RESTORE_STATES = ("checkpoint_restore", "evaluation", "checkpoint_save")
"""Goodput states that count as `restore`; a restored state may have to be evaluated and saved before the first step."""


class StartupReport:
    """Parts of the start of one launch, empty until the first step is done.

    Args:
        read_job_start: Returns the start of the job's pods if it belongs to the launch that began so many seconds ago.
    """

    def __init__(
        self, clock: StartupClock, goodput_tracker: GoodputTracker, read_job_start: Callable[[float], JobStart | None]
    ) -> None:
        self._clock, self._goodput_tracker, self._read_job_start = clock, goodput_tracker, read_job_start
        self.seconds: dict[str, float] = {}

    def build_done(self) -> None:
        """Record that the model, the optimizer and the loaders are built."""
        self._clock.end_part("build")

    def first_step_done(self) -> None:
        """Set the seconds of all parts."""
        age, spent = self._clock.age(), self._goodput_tracker.launch_seconds()
        before = self._seconds_before(age)
        seconds = {
            **before,
            **self._clock.seconds,
            "restore": sum(spent[state] for state in RESTORE_STATES),
            "compile": spent["compile"],
        }
        since_launch = sum(seconds.values()) - sum(before.values())
        seconds["first_batch"] = max(0.0, age - since_launch)
        self.seconds = {part: seconds[part] for part in STARTUP_PARTS if part in seconds}

    def _seconds_before(self, age: float) -> dict[str, float]:
        """Return the parts before the container started; empty if the launcher has not left them."""
        job_start = self._read_job_start(age)
        return {"scheduling": job_start.scheduling, "pull": job_start.pull} if job_start is not None else {}

    def samples(self) -> Iterator[MetricSample]:
        if self.seconds and "pull" not in self.seconds:
            self.seconds = {**self._seconds_before(self._clock.age()), **self.seconds}
        yield from (("train_startup_seconds", (part,), seconds) for part, seconds in self.seconds.items())
