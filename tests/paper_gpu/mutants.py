"""Faults that are planted into the engine, each of which the checks must find."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.pytorch import evaluator, reducer, step_sync, train_step
from podscale.pytorch.all_reduce.collectives import BackendCollectives
from podscale.pytorch.batch_norm import BatchNorm, fused_calls, gemm_calls
from podscale.pytorch.comm_queue import StreamCommQueue
from podscale.pytorch.cuda_graph import CudaGraphStep
from podscale.pytorch.device_prefetcher import BatchMixer, DevicePrefetcher
from podscale.pytorch.reducer import BucketedReducer
from podscale.pytorch.step_sync import StepSync
from podscale.pytorch.train_state import Ema
from tests.paper_gpu.device import PaperEvent, PaperGpu, PaperStream

Mutant = Callable[[PaperGpu], AbstractContextManager[Any]]


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Mutant:
    return lambda gpu: mock.patch.object(owner, name, make(getattr(owner, name)))


def _without(owner: Any, name: str, instead: Callable[..., Any] = lambda *values: None) -> Callable[[Any], Any]:
    """Return a function that changes another: while that one runs, a method of `owner` is replaced."""

    def make(function: Any) -> Any:
        def changed(*values: Any) -> Any:
            with mock.patch.object(owner, name, instead):
                return function(*values)

        return changed

    return make


def _no_wait_for_result(submit: Any) -> Any:
    def changed(self: Any, operation: Callable[[], None]) -> Any:
        submit(self, operation)
        return lambda: None

    return changed


def _no_wait_for_messages(batch_isend_irecv: Any) -> Any:
    def changed(operations: Any) -> Any:
        batch_isend_irecv(operations)
        return []

    return changed


@contextmanager
def _late_communicator(gpu: PaperGpu) -> Iterator[None]:
    """A group that is first used in the step that a graph records."""
    group, real = dist.new_group([0]), train_step.all_finite

    def changed(buffers: Any) -> Any:
        if gpu.capturing:
            dist.all_reduce(torch.ones(1, device="cuda:0"), group=group)
        return real(buffers)

    with mock.patch.object(train_step, "all_finite", changed):
        yield


def _skip_bucket(average: Any) -> Any:
    """Rank 1 skips a bucket."""

    def changed(self: Any, number: int) -> None:
        if not (number == 1 and dist.get_rank() == 1):
            average(self, number)

    return changed


def _other_order(submit: Any) -> Any:
    """Rank 1 sends its buckets in another order."""

    def changed(self: Any, number: int) -> None:
        last = len(self._buckets) - 1
        submit(self, last - number if dist.get_rank() == 1 else number)

    return changed


def _other_length(average: Any) -> Any:
    """Rank 1 sends a shorter message."""

    def changed(self: Any, number: int) -> None:
        if dist.get_rank() == 1 and number == 0:
            self._buckets = [self._buckets[0][: len(self._buckets[0]) // 2], *self._buckets[1:]]
        average(self, number)

    return changed


def _other_dtype(build: Any) -> Any:
    """Rank 1 sends messages of the same length in another dtype."""

    def changed(self: Any, axis: Any, wire: torch.dtype) -> None:
        build(self, axis, torch.bfloat16 if dist.get_rank() == 1 else wire)

    return changed


def _swapped_parameters(buffer: Any) -> Any:
    """Rank 1 exchanges two parameters of the same length, which changes no message's length."""

    def changed(model: Any, *values: Any, **options: Any) -> Any:
        parameters = list(model.named_parameters())
        if dist.get_rank() == 1:
            parameters[1], parameters[2] = parameters[2], parameters[1]
        return buffer(SimpleNamespace(named_parameters=lambda: parameters), *values, **options)

    return changed


def _contiguous(forward: Any) -> Any:
    return lambda self, x: forward(self, x.contiguous())


def _break_graph(forward: Any) -> Any:
    def changed(self: Any, x: Tensor) -> Any:
        torch._dynamo.graph_break()
        return forward(self, x)

    return changed


def _in_fp32(forward: Any) -> Any:
    return lambda self, x: forward(self, x).float()


def _twice(function: Any) -> Any:
    """Compute a result a second time, as a wrong recomputation does."""

    def changed(*values: Any) -> Any:
        function(*values)
        return function(*values)

    return changed


def _copy_unpinned(copy: Any) -> Any:
    return lambda self, values: values.to(self._device, non_blocking=True)


def _ask(all_finite: Any) -> Any:
    """The host reads the flag."""

    def changed(buffers: Any) -> Any:
        flag = all_finite(buffers)
        bool(flag)
        return flag

    return changed


def _multiply_on_host(next_hyperparams: Any) -> Any:
    def changed(self: Any, loss: Tensor) -> Any:
        values = next_hyperparams(self, loss)
        return values._replace(learning_rate=values.learning_rate * torch.ones(1))

    return changed


def _on_another_stream(function: Any) -> Any:
    """Run a function on a stream of its own, which waits for nothing."""

    def changed(*values: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return function(*values)

    return changed


def _copy_without_wait(cpu: Any) -> Any:
    return lambda self: self.to("cpu", non_blocking=True)


def _copy_gradients(all_finite: Any) -> Any:
    return lambda buffers: all_finite([buffer.clone() for buffer in buffers])


def _results_of_graph(replay: Any) -> Any:
    """The results are those that the next replay overwrites."""

    def changed(self: Any, phase: Any) -> Any:
        replay(self, phase)
        return self._result

    return changed


_no_waits, _no_records = _without(PaperStream, "wait_stream"), _without(Tensor, "record_stream")
MUTANTS: dict[str, Mutant] = {
    "queue_does_not_wait": _replace(StreamCommQueue, "submit", _no_waits),
    "nobody_waits_for_queue": _replace(StreamCommQueue, "submit", _no_wait_for_result),
    "nobody_waits_for_messages": _replace(dist, "batch_isend_irecv", _no_wait_for_messages),
    "prefetcher_does_not_wait": _replace(DevicePrefetcher, "_move", _no_waits),
    "prefetcher_records_nothing": _replace(DevicePrefetcher, "_move", _no_records),
    "status_does_not_wait": _replace(StepSync, "_send_from_gpu", _no_waits),
    "status_records_nothing": _replace(StepSync, "_send_from_gpu", _no_records),
    "status_read_early": _replace(step_sync, "_read_status", _without(PaperEvent, "synchronize")),
    "unpinned_copy": _replace(DevicePrefetcher, "copy_to_device", _copy_unpinned),
    "unpinned_draw": _replace(BatchMixer, "start_step", _without(Tensor, "pin_memory", lambda tensor: tensor)),
    "host_asks": _replace(train_step, "all_finite", _ask),
    "host_scalar": _replace(train_step.TrainStep, "_next_hyperparams", _multiply_on_host),
    "late_communicator": _late_communicator,
    "skipped_bucket": _replace(BucketedReducer, "_average_bucket", _skip_bucket),
    "other_order": _replace(BucketedReducer, "_average_bucket", _other_order),
    "other_length": _replace(BucketedReducer, "_average_bucket", _other_length),
    "other_dtype": _replace(BackendCollectives, "__init__", _other_dtype),
    "swapped_parameters": _replace(reducer, "GradientBuffer", _swapped_parameters),
    "contiguous": _replace(BatchNorm, "forward", _contiguous),
    "graph_break": _replace(BatchNorm, "forward", _break_graph),
    "activations_in_fp32": _replace(BatchNorm, "forward", _in_fp32),
    "moments_twice": _replace(fused_calls, "chunk_moments", _twice),
    "gradient_sums_twice": _replace(fused_calls, "chunk_gradient_sums", _twice),
    "convolutions_twice": _replace(gemm_calls, "forward", _twice),
    "more_operators": _replace(train_step, "all_finite", _copy_gradients),
    "average_does_not_wait": _replace(Ema, "update", _on_another_stream),
    "evaluation_does_not_wait": _replace(evaluator, "batch_predictions", _on_another_stream),
    "static_copy_does_not_wait": _replace(CudaGraphStep, "_copy_to_static", _on_another_stream),
    "warm_up_does_not_wait": _replace(CudaGraphStep, "_run_eager_step", _no_waits),
    "results_not_copied": _replace(CudaGraphStep, "_replay_graph", _results_of_graph),
    "checkpoint_does_not_wait": _replace(Tensor, "cpu", _copy_without_wait),
}
MUTANTS_OF_EVALUATION = ("evaluation_does_not_wait", "checkpoint_does_not_wait")
"""Faults behind the steps, in an evaluation or a checkpoint."""
