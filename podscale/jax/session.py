"""One process of a JAX training: what the shared session asks of an engine. `build` puts together what it holds."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy.typing as npt
from jax import Array

from podscale.checkpoint import Snapshot
from podscale.engine.evaluation import EvaluationResult
from podscale.engine.session import Trainer as SharedSession
from podscale.engine.word import StepStatus
from podscale.jax.checkpoints import TrainState, restore_or_start
from podscale.jax.control import StepSync
from podscale.jax.evaluate import Evaluator
from podscale.jax.feed import DevicePrefetcher
from podscale.jax.memory import explain_training_memory
from podscale.jax.step import TrainStep
from podscale.jax.world import World

MEMORY_STATS = {
    "device_allocated": "bytes_in_use",
    "device_reserved": "bytes_reserved",
    "device_peak": "peak_bytes_in_use",
}
"""Kinds of memory by the allocator's names for them."""


@dataclass(kw_only=True)
class JaxTrainer(SharedSession):
    """What changes an update stands in `step`; what a resumed run needs, in `state`."""

    world: World
    state: TrainState
    evaluator: Evaluator
    control: StepSync
    step: TrainStep
    schedule: Array
    """Every update's hyperparameters, on the devices."""
    feed: DevicePrefetcher

    def restore(self) -> bool:
        return restore_or_start(self.checkpoints, self.config.checkpoint.resume, self.state, self.origin)

    def updates(self) -> Iterator[list[StepStatus]]:
        monitor, progress, state = self.monitor, self.progress, self.state
        batches = self.loader.batches(progress.step, self.end)
        for batch in self.feed(batches, monitor.phase, self.next_count):
            count = len(batch.sources)
            with monitor.phase("forward_backward"):
                call = self.control.call(count, stop=self.stop.requested, busy=monitor.busy)
                with explain_training_memory(self.config, len(self.world.devices)):
                    given = state.on_devices, batch.on_devices, self.schedule, call
                    state.on_devices, figures = self.step.updates(*given)
                self.control.sent(progress.step, count, figures)
            monitor.waiting()
            with monitor.phase("forward_backward"):
                words = self.control.due()
            progress.step += count
            monitor.updated(progress.step, batch.images // count, self.loader.bad_records, updates=count)
            yield words

    def next_count(self) -> int:
        """Updates that the next call carries out: up to the first after which something else is due."""
        log_every, step = self.config.telemetry.log_every, self.progress.step
        longest = range(step + 1, step + self.feed.length)
        return 1 + sum(1 for _ in takewhile(lambda n: n % log_every and not self.interrupts(n), longest))

    def measure(self, *, averaged: bool) -> EvaluationResult | None:
        statistics = self.state.on_devices.statistics
        return self.evaluator.measure(
            self.state.weights(), statistics, self.monitor.inside, lambda: self.stop.requested
        )

    def capture(self) -> Snapshot | None:
        return self.state.capture()

    def model_arrays(self, *, averaged: bool) -> dict[str, npt.NDArray[Any]]:
        return self.state.model_arrays()

    def barrier(self) -> None:
        self.world.barrier("the end of a stage")

    def device_memory(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for device in self.world.local_devices:
            with suppress(Exception):  # a device that does not tell is no reason to end
                told = device.memory_stats() or {}
                for kind, name in MEMORY_STATS.items():
                    if name in told:
                        found[kind] = found.get(kind, 0) + told[name]
        return found

    def close(self) -> None:
        self.loader.close()
        self.evaluation_loader.close()
        self.checkpoints.close()
