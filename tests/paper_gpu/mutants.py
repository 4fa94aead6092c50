"""Faults that are planted into the engine, each of which the checks must find."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.pytorch import comm_queue, device_prefetcher, step_sync, train_step
from tests.paper_gpu.device import PaperGpu

Mutant = Callable[[PaperGpu], AbstractContextManager[Any]]
MUTANTS: dict[str, Mutant] = {}


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Mutant:
    return lambda gpu: mock.patch.object(owner, name, make(getattr(owner, name)))


class _WithoutWaits:
    """Stream that does not wait for others."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def wait_stream(self, other: Any) -> None: ...


def _submit_without_wait(submit: Any) -> Any:
    def changed(self: Any, operation: Callable[[], None]) -> Any:
        self._stream = _WithoutWaits(self._stream) if not isinstance(self._stream, _WithoutWaits) else self._stream
        real = self._stream._stream
        with torch.cuda.stream(real):
            operation()
            done = real.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)

    return changed


def _no_wait_for_result(submit: Any) -> Any:
    def changed(self: Any, operation: Callable[[], None]) -> Any:
        submit(self, operation)
        return lambda: None

    return changed


def _move_without_wait(move: Any) -> Any:
    def changed(self: Any, batch: Any) -> Any:
        with torch.cuda.stream(self._stream):
            return self._to_device(batch)

    return changed


def _move_without_record(move: Any) -> Any:
    def changed(self: Any, batch: Any) -> Any:
        with mock.patch.object(Tensor, "record_stream"):
            return move(self, batch)

    return changed


def _send_without_wait(send: Any) -> Any:
    return lambda self, step, packed, result, stream: send(self, step, packed, result, _WithoutWaits(stream))


def _record_nothing(send: Any) -> Any:
    def changed(self: Any, step: int, packed: Any, result: Any, stream: Any) -> Any:
        with mock.patch.object(Tensor, "record_stream"):
            return send(self, step, packed, result, stream)

    return changed


def _read_too_early(read: Any) -> Any:
    def changed(pending: Any) -> Any:
        with mock.patch.object(torch.cuda.Event, "synchronize"):
            return read(pending)

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


def _unpinned_draw(start: Any) -> Any:
    """The mixer's draw from memory that is not pinned, as it once was."""

    def changed(self: Any, step: int) -> None:
        with mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor):
            start(self, step)

    return changed


def _contiguous(forward: Any) -> Any:
    return lambda self, x: forward(self, x.contiguous())


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


def _register() -> None:
    from podscale.pytorch.batch_norm.layer import BatchNorm
    from podscale.pytorch.reducer import BucketedReducer

    MUTANTS.update(
        queue_does_not_wait=_replace(comm_queue.StreamCommQueue, "submit", _submit_without_wait),
        nobody_waits_for_queue=_replace(comm_queue.StreamCommQueue, "submit", _no_wait_for_result),
        prefetcher_does_not_wait=_replace(device_prefetcher.DevicePrefetcher, "_move", _move_without_wait),
        prefetcher_records_nothing=_replace(device_prefetcher.DevicePrefetcher, "_move", _move_without_record),
        status_does_not_wait=_replace(step_sync.StepSync, "_send_from_gpu", _send_without_wait),
        status_records_nothing=_replace(step_sync.StepSync, "_send_from_gpu", _record_nothing),
        status_read_early=_replace(step_sync, "_read_status", _read_too_early),
        unpinned_copy=_replace(device_prefetcher.DevicePrefetcher, "copy_to_device", _copy_unpinned),
        unpinned_draw=_replace(device_prefetcher.BatchMixer, "start_step", _unpinned_draw),
        host_asks=_replace(train_step, "all_finite", _ask),
        host_scalar=_replace(train_step.TrainStep, "_next_hyperparams", _multiply_on_host),
        late_communicator=_late_communicator,
        skipped_bucket=_replace(BucketedReducer, "_average_bucket", _skip_bucket),
        other_order=_replace(BucketedReducer, "_average_bucket", _other_order),
        other_length=_replace(BucketedReducer, "_average_bucket", _other_length),
        contiguous=_replace(BatchNorm, "forward", _contiguous),
    )


_register()
