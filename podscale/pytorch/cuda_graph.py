"""Train step as one CUDA graph: forward, backward, collectives, optimizer and mask, replayed by a single launch.

Everything that changes from step to step is on the device: the batch in static buffers, the schedule as a table with a
step counter (see train_step), the seed of dropout in its generator. Only a batch of another shape, or a change of the
accumulation, is recorded again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from podscale.pytorch.device_prefetcher import DeviceBatch
from podscale.pytorch.timing import DeviceTimer
from podscale.pytorch.train_step import StepResult, TrainStep
from podscale.pytorch.world import World
from podscale.training.step_timer import PhaseTimer, untimed

WARM_UP_STEPS = 3
"""Eager steps before one is recorded: libraries choose kernels and allocate workspaces, which a graph cannot hold
(PyTorch's notes on CUDA graphs ask for a few iterations on a side stream)."""

SAMPLE_EVERY_STEPS = 1000
"""Interval between eager steps that measure the phases, which a graph cannot report."""

PhaseSecondsCallback = Callable[[dict[str, float]], None]
"""Receives the device seconds of each phase of a sampled step."""


class CudaGraphStep:
    """Replay of a `TrainStep` as a CUDA graph, with one graph at a time.

    The first steps of a shape are eager warm-up on the stream that the graph is recorded on, since autograd accumulates
    a gradient on the stream where it first met the parameter.
    """

    def __init__(self, step: TrainStep, world: World, *, on_sampled: PhaseSecondsCallback) -> None:
        assert world.on_gpu, "CUDA graphs need a GPU"
        self.eager = step
        self._device = world.device
        self._stream = torch.cuda.Stream(world.device)
        self._times, self._on_sampled = DeviceTimer(on_gpu=True), on_sampled
        self._steps_done, self._eager_bytes, self._times_pending = 0, 0, False
        self._batch: DeviceBatch | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: StepResult | None = None

    def seek(self, step: int) -> None:
        self.eager.seek(step)

    def set_accumulation(self, passes: int) -> None:
        """Set the passes of the following steps, and record again: batch norm's groups may have changed too."""
        self.eager.set_accumulation(passes)
        self._restart()

    def __call__(self, batch: DeviceBatch, phase: PhaseTimer) -> StepResult:
        if self._batch is not None and batch.images.shape != self._batch.images.shape:
            self._restart()
        with phase("h2d"):
            static = self._copy_to_static(batch)
        self._report_times()
        self.eager.start_step(batch.host_batch.step)
        self._steps_done += 1
        if self._steps_done <= WARM_UP_STEPS:
            return self._run_eager_step(static, phase)
        if self._graph is None:
            self._capture_graph(static)
        elif (self._steps_done - WARM_UP_STEPS) % SAMPLE_EVERY_STEPS == 0 and self._has_memory_for_eager():
            return self._run_eager_step(static, phase)
        return self._replay_graph(phase)

    def close(self) -> None:
        """Free the graph: NCCL closes a communicator only when no graph holds a call on it."""
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._result = None

    def _restart(self) -> None:
        """Drop the graph, whose memory the next shape can then use, and begin with warm-up."""
        self.close()
        self._batch, self._steps_done, self._times_pending = None, 0, False

    def _copy_to_static(self, batch: DeviceBatch) -> DeviceBatch:
        if self._batch is None:
            self._batch = DeviceBatch(torch.empty_like(batch.images), torch.empty_like(batch.labels), batch.host_batch)
        static = self._batch
        for buffer, values in ((static.images, batch.images), (static.labels, batch.labels)):
            assert (buffer.shape, buffer.stride(), buffer.dtype) == (values.shape, values.stride(), values.dtype), (
                "a CUDA graph is of one shape",
                buffer.shape,
                values.shape,
            )
            buffer.copy_(values)
        return static

    def _run_eager_step(self, static: DeviceBatch, phase: PhaseTimer) -> StepResult:
        """Run an eager step. The last one of the warm-up and every sampled one are timed."""
        self._times.clear()
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        with self._on_side_stream():
            result = self.eager.run_on_device(static, combine_phases(self._times.time_part, phase))
        self._eager_bytes = torch.cuda.max_memory_allocated(self._device) - before
        self._times_pending = self._steps_done >= WARM_UP_STEPS
        return result

    def _capture_graph(self, static: DeviceBatch) -> None:
        """Record a step without running it. Other threads (loaders, NCCL's watchdog) may make any call meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._result = self.eager.run_on_device(static, untimed)
        self._graph = graph

    def _replay_graph(self, phase: PhaseTimer) -> StepResult:
        """Launch the graph. The results are copied, because the next replay overwrites them."""
        assert self._graph is not None
        assert self._result is not None
        with phase("forward_backward"):
            self._graph.replay()
        with phase("allreduce_wait"):  # the wait itself is inside the graph; this ends the busy time
            norm = self._result.grad_norm
            return StepResult(
                self._result.loss.clone(), self._result.finite.clone(), norm.clone() if norm is not None else None
            )

    def _report_times(self) -> None:
        """Report the times of the newest measured step, once the device has finished it."""
        if self._times_pending and self._times.is_ready:
            self._times_pending = False
            self._on_sampled(self._times.seconds())

    def _has_memory_for_eager(self) -> bool:
        """Return True if an eager step fits beside the graph, whose memory it cannot use."""
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + cached > 1.1 * self._eager_bytes

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


def combine_phases(first: PhaseTimer, second: PhaseTimer) -> PhaseTimer:

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with second(name), first(name):
            yield

    return phase
