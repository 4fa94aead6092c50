"""Communication hook for DistributedDataParallel, which brings our all-reduce algorithms to any training loop.

    ddp = DistributedDataParallel(model)
    ddp_comm_hook.register(ddp, algorithm="torus2d", row=8, wire_column="bf16")

DDP calls the hook with each bucket of gradients as backward completes it. Buckets are averaged in that order, on a
`CommQueue`. DDP changes the layout of its buckets after the first step of a process, so the order of additions, and
with it the last bits, differ between an uninterrupted and a resumed run. Podscale's own reducer keeps them equal.
"""

import math
from dataclasses import dataclass
from typing import Any

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
from podscale.pytorch.comm_queue import CommQueue, build_comm_queue

TIMEOUT_SECONDS = world.World.timeout_seconds
"""Default timeout of a collective, seconds: as in a run. (torch's for gloo groups is half an hour.)

While rank 0 works alone between two steps, such as in an evaluation, the other ranks wait in the all-reduce.
"""


def register(ddp: DistributedDataParallel, *, timeout_seconds: float = TIMEOUT_SECONDS, **options: Any) -> None:
    """Let `ddp` average its gradients by one of podscale's algorithms, over all ranks of the default process group.

    Every rank must call this at the same time, before the first backward pass. Buckets keep DDP's size (bucket_cap_mb).

    Args:
        timeout_seconds: timeout of collectives in the algorithm's own groups; the default group keeps its own.
        options: options of the document's train.all_reduce section: algorithm, row, wire_row, wire_column, hybrid_mb.

    Raises:
        InputError: if the options conflict with each other or with the world.
    """
    try:
        section = AllReduceSection(**{"algorithm": "torus2d", **options})
    except ValidationError as error:
        raise first_error(error) from None
    if not 0 < timeout_seconds < math.inf:
        raise InputError("must be above 0 seconds", field="timeout_seconds", got=timeout_seconds)
    if section.algorithm == "ddp":
        raise InputError(
            "is DistributedDataParallel's own average", field="algorithm", got="ddp", hint="Choose another one."
        )
    device = next(ddp.module.parameters()).device
    all_reduce = build_all_reduce(section, world.current_world(device, timeout_seconds))
    ddp.register_comm_hook(HookState(all_reduce, build_comm_queue(device), device), average_bucket)


@dataclass(frozen=True)
class HookState:
    """State that DDP passes to the hook."""

    all_reduce: AllReduce
    queue: CommQueue
    device: torch.device


def average_bucket(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Average a bucket after all buckets before it. DDP checks the name `bucket` and the annotations."""
    gradients = bucket.buffer()
    # A CUDA future carries events, so that DDP's stream waits and the host does not.
    future: Future[Tensor] = Future(devices=[state.device] if state.device.type == "cuda" else None)

    def average() -> None:
        try:
            _average_in_fp32(state.all_reduce, gradients)
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
            raise
        future.set_result(gradients)

    state.queue.submit(average)
    return future


def _average_in_fp32(all_reduce: AllReduce, gradients: Tensor) -> None:
    if gradients.dtype == torch.float32:
        all_reduce(gradients)
    else:
        values = gradients.float()
        all_reduce(values)
        gradients.copy_(values)
