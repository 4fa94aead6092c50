"""Rank of a world on a single GPU: `python -m tests.support.nccl_rank <result file>` with torchrun's variables.

Exits with REFUSED and NCCL's error if NCCL does not form such a world. Otherwise it writes {name: (mean, again)} for
the whole family; lengths and contributions are those of `contribution`.
"""

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from podscale.config.train import AllReduceSection
from podscale.data.loaders.base import Batch
from podscale.pytorch import comm_queue, ddp_comm_hook
from podscale.pytorch.all_reduce import AllReduce, ShardedAllReduce, build_all_reduce, collectives
from podscale.pytorch.cuda_graph import CudaGraphStep
from podscale.pytorch.device_prefetcher import DeviceBatch
from podscale.pytorch.reducer import BucketedReducer
from podscale.pytorch.train_step import StepResult
from podscale.pytorch.world import World, join_world, leave_world
from podscale.training.step_timer import PhaseTimer, untimed

REFUSED = 3
LENGTHS = (1, 13, 4096, 100_003)


def contribution(rank: int, length: int) -> Tensor:
    return 0.05 + torch.randn(length, generator=torch.Generator().manual_seed(1000 * length + rank))


def sections(size: int) -> Iterator[dict[str, Any]]:
    for wire in ("fp32", "bf16", "int8"):
        yield from ({"algorithm": name, "wire_column": wire} for name in ("flat", "ring", "tree"))
        for name in ("hierarchical", "torus2d", "hybrid"):
            rows = [row for row in (1, 2, 4) if size % row == 0]
            yield from ({"algorithm": name, "row": row, "wire_column": wire, "hybrid_mb": 0.1} for row in rows)


def family(world: World) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Reduce with every algorithm at every length, twice, also in halves if the algorithm has them."""
    for section in sections(world.size):
        all_reduce = build_all_reduce(AllReduceSection(**section), world)
        for length in LENGTHS:
            means = [contribution(world.rank, length).to(world.device) for _ in range(2)]
            for mean in means:
                all_reduce(mean)
            yield f"{section} {length}", (means[0].cpu(), means[1].cpu())
        if isinstance(all_reduce, ShardedAllReduce):
            bucket = contribution(world.rank, 4096).to(world.device)
            gathered = torch.empty_like(bucket)
            all_reduce.all_gather(all_reduce.reduce_scatter(bucket), gathered)
            yield f"{section} 4096", (gathered.cpu(), gathered.cpu())


def network(world: World) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh()))).to(world.device)


def training(world: World) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Reduce gradients with our reducer, with and without overlap, and with the hook, twice."""
    inputs = contribution(world.rank, 640).view(10, 64).to(world.device)
    for name in ("flat", "ring", "tree", "hierarchical", "torus2d"):
        section = AllReduceSection(algorithm=name, row=None if name in ("flat", "ring", "tree") else 2)
        gradients = []
        for overlap in (True, False):
            reducer = BucketedReducer(
                network(world), build_all_reduce(section, world), world, bucket_mb=0.02, overlap=overlap
            )
            reducer.start_step()
            reducer.backward(reducer.module(inputs).square().mean(), last=True)
            reducer.finish()
            gradients.append(torch.cat([g.flatten() for g in reducer.buffer.views]).cpu())
            reducer.close()
        yield f"reducer {name}", (gradients[0], gradients[1])
        if name != "flat":
            yield f"hook {name}", (by_hook(world, inputs, name), by_hook(world, inputs, name))


def by_hook(world: World, inputs: Tensor, name: str) -> Tensor:
    ddp = DistributedDataParallel(copy.deepcopy(network(world)), bucket_cap_mb=0.02)
    ddp_comm_hook.register(ddp, algorithm=name, row=2)
    ddp(inputs).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None]).cpu()


class Averaging:
    """Replacement of a step: the mean of the images over all ranks."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce

    def start_step(self, step: int) -> None: ...

    def run_on_device(self, batch: DeviceBatch, phase: PhaseTimer) -> StepResult:
        mean = batch.images.float().mean().view(1)
        self._all_reduce(mean)
        return StepResult(mean[0], mean[0] >= 0)


def graphs(world: World) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Record messages once and replay them; return their results. The world can exit after the graphs are closed."""
    steps, offset = range(8), (world.size - 1) / 2
    for name in ("flat", "ring", "torus2d"):
        section = AllReduceSection(algorithm=name, row=2 if name == "torus2d" else None)
        step: Any = Averaging(build_all_reduce(section, world))
        graphed, means = CudaGraphStep(step, world, on_sampled=lambda seconds: None), []
        for number in steps:
            images = torch.full((1, 1, 1, 3), number + world.rank, dtype=torch.uint8, device=world.device)
            labels, keys = torch.zeros(1, dtype=torch.int64, device=world.device), np.zeros(1, np.uint64)
            source = Batch(None, keys.astype(np.int64), keys, np.ones(1, np.float32), number)
            means.append(graphed(DeviceBatch(images, labels, source), untimed).loss)
        yield f"graph {name}", (torch.stack(means).cpu(), torch.tensor([number + offset for number in steps]))
        graphed.close()


def main() -> None:
    world = join_world(90.0)
    try:
        world.barrier()
    except RuntimeError as error:
        print(str(error).strip().splitlines()[-1])
        sys.stdout.flush()
        raise SystemExit(REFUSED) from None
    for table in (
        comm_queue.SLICE_ELEMENTS,
        collectives.SEGMENT_ELEMENTS,
    ):  # several of each in a bucket, so that all axes are used
        table.update(dict.fromkeys(table, 16_384))
    torch.save(dict(family(world)) | dict(training(world)) | dict(graphs(world)), Path(sys.argv[1]))
    dist.barrier()
    leave_world()


if __name__ == "__main__":
    main()
