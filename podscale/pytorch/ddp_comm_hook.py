"""Communication hook for DistributedDataParallel, which brings our all-reduce algorithms to any training loop.

    ddp = DistributedDataParallel(model)
    ddp_comm_hook.register(ddp, algorithm="torus2d", row=8, wire_column="bf16")

DDP hands over each bucket of gradients as backward completes it. Buckets are averaged strictly one after the other:
by one thread on gloo (collectives that follow each other in callbacks mix up buckets there), on a side stream on NCCL.
DDP lays out its buckets anew after the first step of a process, so the order of additions, and with it the last bits,
differ between a run in one piece and a resumed one; podscale's own reducer keeps them.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor
from torch import distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from podscale.config.fields import first_error
from podscale.config.train import AllReduceSection
from podscale.errors import InputError
from podscale.pytorch import world
from podscale.pytorch.all_reduce import AllReduce, build_all_reduce

TIMEOUT_SECONDS = world.World.timeout_seconds
"""As in a run; torch's own default for groups on gloo is half an hour. Where rank 0 does something alone between two
steps, such as an evaluation, the others wait in the all-reduce meanwhile, and that has to fit in."""


def register(ddp: DistributedDataParallel, *, timeout_seconds: float = TIMEOUT_SECONDS, **options: Any) -> None:
    """Lets `ddp` average its gradients by one of podscale's algorithms, over all ranks of the default process group.

    options: those of the run document's train.all_reduce section that concern the algorithm (algorithm, row,
    wire_row, wire_column, hybrid_mb); bucket sizes are DDP's own (bucket_cap_mb). Every rank must call this at the
    same time, before the first backward pass. timeout_seconds: the longest wait of a rank for its peers in the
    algorithm's own groups; the default group keeps the one that it was formed with. Raises InputError where the options
    do not fit each other or the world.
    """
    try:
        section = AllReduceSection(**{"algorithm": "torus2d", **options})
    except ValidationError as error:
        raise first_error(error) from None
    if not 0 < timeout_seconds < math.inf:
        raise InputError("must be above 0 seconds", field="timeout_seconds", got=timeout_seconds)
    if section.algorithm == "ddp":
        raise InputError(
            "is what DistributedDataParallel does by itself", field="algorithm", got="ddp", hint="Choose another one."
        )
    device = next(ddp.module.parameters()).device
    all_reduce = build_all_reduce(section, world.current_world(device, timeout_seconds))
    queue = _StreamHookQueue(all_reduce, device) if device.type == "cuda" else _ThreadHookQueue(all_reduce)
    ddp.register_comm_hook(queue, _comm_hook)


class _HookQueue(Protocol):
    def submit(self, gradients: Tensor) -> Future[Tensor]:
        """Averages `gradients` in place after everything submitted before."""
        ...


def _comm_hook(state: _HookQueue, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """What DDP calls; it looks at the name of the second parameter and at the annotations."""
    return state.submit(bucket.buffer())


class _ThreadHookQueue:
    """One thread of blocking collectives."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="all-reduce")

    def submit(self, gradients: Tensor) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        self._thread.submit(self._complete, gradients, future)
        return future

    def _complete(self, gradients: Tensor, future: Future[Tensor]) -> None:
        try:
            _average(self._all_reduce, gradients)
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(gradients)


class _StreamHookQueue:
    """A side stream; its futures carry events, so that DDP's stream waits and the host does not."""

    def __init__(self, all_reduce: AllReduce, device: torch.device) -> None:
        self._all_reduce, self._device = all_reduce, device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, gradients: Tensor) -> Future[Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            _average(self._all_reduce, gradients)
            future: Future[Tensor] = Future(devices=[self._device])
            future.set_result(gradients)
        return future


def _average(all_reduce: AllReduce, gradients: Tensor) -> None:
    """In place, added in fp32 whatever the gradients' own format."""
    if gradients.dtype == torch.float32:
        all_reduce(gradients)
    else:
        values = gradients.float()
        all_reduce(values)
        gradients.copy_(values)
