"""One process of a JAX training: what the shared session asks of an engine. `build` puts together what it holds."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy.typing as npt
from jax import Array

from podscale.distributed.step_status import StepStatus
from podscale.jax.checkpoints import TrainState, restore_or_start
from podscale.jax.control import StepSync
from podscale.jax.evaluate import Evaluator
from podscale.jax.feed import DevicePrefetcher
from podscale.jax.memory import explain_training_memory
from podscale.jax.step import TrainStep
from podscale.jax.world import World
from podscale.runs.checkpoint import Snapshot
from podscale.training.run_progress import EvaluationResult
from podscale.training.trainer import Trainer as SharedSession

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
    step_sync: StepSync
    step: TrainStep
    schedule: Array
    """Every update's hyperparameters, on the devices."""
    prefetcher: DevicePrefetcher

    def restore(self) -> bool:
        return restore_or_start(self.checkpoint_store, self.config.checkpoint.resume, self.state, self.initial_weights)

    def train_steps(self) -> Iterator[list[StepStatus]]:
        monitor, progress, state = self.training_logger, self.progress, self.state
        batches = self.loader.batches(progress.step, self.end_step)
        for batch in self.prefetcher(batches, monitor.phase, self.next_step_count):
            count = len(batch.host_batches)
            with monitor.phase("forward_backward"):
                call = self.step_sync.step_inputs(
                    count, stop=self.stop_request.requested, busy_seconds=monitor.busy_seconds
                )
                with explain_training_memory(self.config, len(self.world.devices)):
                    given = state.device_state, batch.device_batches, self.schedule, call
                    state.device_state, figures = self.step.run_steps(*given)
                self.step_sync.send(progress.step, count, figures)
            monitor.wait_started()
            with monitor.phase("forward_backward"):
                words = self.step_sync.ready()
            progress.step += count
            monitor.step_done(progress.step, batch.images // count, self.loader.bad_records, steps=count)
            yield words

    def next_step_count(self) -> int:
        """Updates that the next call carries out: up to the first after which something else is due."""
        log_every, step = self.config.telemetry.log_every, self.progress.step
        longest = range(step + 1, step + self.prefetcher.length)
        return 1 + sum(1 for _ in takewhile(lambda n: n % log_every and not self.is_due_after(n), longest))

    def evaluate_weights(self, *, averaged: bool) -> EvaluationResult | None:
        statistics = self.state.device_state.statistics
        return self.evaluator.evaluate(
            self.state.unshard_weights(), statistics, self.training_logger.subphase, lambda: self.stop_request.requested
        )

    def capture_state(self) -> Snapshot | None:
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
        self.checkpoint_store.close()
