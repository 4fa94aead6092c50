"""One rank of a PyTorch training: what the shared session asks of an engine. `build` puts together what it holds."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from podscale.distributed.step_status import StepStatus
from podscale.pytorch.checkpoints import TrainState, restore_or_start
from podscale.pytorch.compilation import release_cuda_graphs
from podscale.pytorch.control import StepSync
from podscale.pytorch.evaluate import Evaluator
from podscale.pytorch.feed import DevicePrefetcher
from podscale.pytorch.graph import CudaGraphStep
from podscale.pytorch.reducer import GradientReducer
from podscale.pytorch.step import TrainStep
from podscale.pytorch.world import World
from podscale.runs.checkpoint import Snapshot
from podscale.training.run_progress import EvaluationResult
from podscale.training.trainer import Trainer as SharedSession

MEMORY_STATS = {
    "device_allocated": "allocated_bytes.all.current",
    "device_reserved": "reserved_bytes.all.current",
    "device_peak": "allocated_bytes.all.peak",
}
"""Kinds of memory by the allocator's names for them."""


@dataclass(kw_only=True)
class PyTorchTrainer(SharedSession):
    """What changes an update stands in `step`; what a resumed run needs, in `state`."""

    world: World
    state: TrainState
    evaluator: Evaluator
    step_sync: StepSync
    step: TrainStep | CudaGraphStep
    reducer: GradientReducer
    prefetcher: DevicePrefetcher

    def restore(self) -> bool:
        resumed = restore_or_start(
            self.checkpoint_store, self.config.checkpoint.resume, self.state, self.world, self.initial_weights
        )
        self.step.seek(self.progress.step)
        return resumed

    def train_steps(self) -> Iterator[list[StepStatus]]:
        monitor, progress, ema = self.training_logger, self.progress, self.state.ema
        batches = self.loader.batches(progress.step, self.end_step)
        for batch in self.prefetcher(batches, monitor.phase):
            self.log_image_size(batch.images.shape[1])
            result = self.step(batch, monitor.phase)
            progress.step += 1
            if ema is not None:
                with monitor.phase("optimizer"):
                    ema.update(progress.step)
            self.step_sync.send(
                progress.step, result, busy_seconds=monitor.busy_seconds, stop=self.stop_request.requested
            )
            monitor.step_done(progress.step, len(batch.labels), self.loader.bad_records)
            yield self.step_sync.ready()

    def evaluate_weights(self, *, averaged: bool) -> EvaluationResult | None:
        with self.state.with_weights(averaged=averaged) as model:
            return self.evaluator.evaluate(model, self.training_logger.subphase, lambda: self.stop_request.requested)

    def capture_state(self) -> Snapshot | None:
        return self.state.capture(self.world)

    def model_arrays(self, *, averaged: bool) -> dict[str, npt.NDArray[Any]]:
        return self.state.model_arrays(averaged=averaged)

    def barrier(self) -> None:
        self.world.barrier()

    def device_memory(self) -> dict[str, int]:
        if not self.world.on_gpu:
            return {}
        with suppress(RuntimeError):
            booked = torch.cuda.memory_stats(self.world.device)
            return {kind: booked[name] for kind, name in MEMORY_STATS.items() if name in booked}
        return {}

    def close(self) -> None:
        if isinstance(self.step, CudaGraphStep):
            self.step.close()
        release_cuda_graphs(self.config.train.compile)
        self.loader.close()
        self.evaluation_loader.close()
        self.reducer.close()
        self.checkpoint_store.close()
