"""Published failure rates, a modelled run, and its goodput by Daly's formula.

J. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
Systems 22 (2006), for exponentially distributed failures.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

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

    def steps_in(self, hours: float) -> int:
        """Return the steps that the run is expected to make in this time, in whole checkpoint intervals."""
        steps = hours * 3600 * self.analytic_goodput() / self.step_seconds
        return max(1, round(steps / self.checkpoint_steps)) * self.checkpoint_steps


def failure_times(rate: float, source: random.Random) -> Iterator[float]:
    """Yield the times of a Poisson process with this rate, seconds."""
    time = 0.0
    while True:
        time += source.expovariate(rate)
        yield time
