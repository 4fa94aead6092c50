"""Worker of `podscale bench allreduce`: one measurement, as the process of one rank.

    python -m podscale.pytorch.link_benchmark JOB.json RESULT.json

JOB holds the fields of `Job`. Rank 0 writes RESULT, the result of `measure`. Every time is the slowest rank's from a
common start, on a GPU until the device has finished.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from podscale.config.model import ModelSection
from podscale.config.train import AllReduceSection
from podscale.pytorch.all_reduce import AllReduce, build_all_reduce
from podscale.pytorch.all_reduce.algorithms import WIRE_DTYPES
from podscale.pytorch.all_reduce.collectives import build_collectives
from podscale.pytorch.all_reduce.plan import equal_spans
from podscale.pytorch.mesh import Mesh, build_mesh
from podscale.pytorch.models import build_model
from podscale.pytorch.reducer import BucketedReducer
from podscale.pytorch.timing import time_slowest_rank
from podscale.pytorch.world import World, join_world, leave_world
from podscale.util.files import write_json
from podscale.util.processes import exit_with_parent

MIN_MAX_ROUNDS = (3, 50)
CHECKED_ELEMENTS = 2**14
"""Elements whose mean is compared with that in float64."""


@dataclass(frozen=True)
class LinkBenchmarkJob:
    """What to measure.

    sections: an all_reduce section by name. sizes: bytes of fp32. seconds: about so long for each of them. model: a
    model section for the exposed time, or None; with images of `side` pixels, `batch` of them a rank.
    """

    sections: dict[str, dict[str, Any]]
    sizes: list[int]
    row: int | None
    seconds: float
    model: dict[str, Any] | None
    side: int
    batch: int


def main() -> None:
    """Joins the world that the environment names, measures, writes what was found."""
    exit_with_parent()
    job, result = LinkBenchmarkJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), Path(sys.argv[2])
    world = join_world(300.0)
    found = measure_links(world, job)
    if world.is_rank0:
        write_json(result, found)
    leave_world()


def measure_links(world: World, job: LinkBenchmarkJob) -> dict[str, Any]:
    """{place, whole: [...], phases: [...], steps: [...]}, the same on every rank; every rank must call this.

    whole: seconds and error of each section and size. phases: seconds of the parts of a torus on each axis. steps:
    seconds of a training step (forward and backward) with each section, and with nothing in its place.
    """
    sections = {name: AllReduceSection(**values) for name, values in job.sections.items()}
    ready = {name: build_all_reduce(section, world) for name, section in sections.items()}
    mesh = build_mesh(world, job.row)
    return {
        "ranks": world.size,
        "rows": list(mesh.shape),
        "device": torch.cuda.get_device_name(world.device) if world.on_gpu else "cpu",
        "backend": "nccl" if world.on_gpu else "gloo",
        "whole": [*_measure_algorithms(world, ready, job)],
        "phases": [*_measure_phases(world, mesh, job)],
        "steps": [*_measure_steps(world, ready, sections, job)] if job.model else [],
    }


def _measure_algorithms(world: World, ready: dict[str, AllReduce], job: LinkBenchmarkJob) -> Iterator[dict[str, Any]]:
    for name, reduce in ready.items():
        error = relative_rms_error(world, reduce)
        for size in job.sizes:
            bucket = torch.zeros(max(size // 4, 1), device=world.device)
            seconds = _time_rounds(world, lambda r=reduce, b=bucket: r(b), job.seconds)  # type: ignore[misc]
            yield {"algorithm": name, "bytes": bucket.nbytes, "seconds": seconds, "error": error}


def relative_rms_error(world: World, reduce: AllReduce) -> float:
    """Of the mean of random values, as a share of its root mean square, against float64."""
    parts = [_random_values(rank) for rank in range(world.size)]
    exact = torch.stack(parts).double().mean(0)
    found = parts[world.rank].to(world.device)
    reduce(found)
    return float((found.cpu() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def _random_values(rank: int) -> Tensor:
    return torch.randn(CHECKED_ELEMENTS, generator=torch.Generator().manual_seed(rank))


def _measure_phases(world: World, mesh: Mesh, job: LinkBenchmarkJob) -> Iterator[dict[str, Any]]:
    """Reduce-scatter and all-gather of S bytes along the rows, all-reduce of S / row along the columns, in fp32."""
    row, column = (build_collectives(axis, WIRE_DTYPES["fp32"], world.device) for axis in (mesh.row, mesh.column))
    for size in job.sizes:
        bucket = torch.zeros(max(size // 4 // mesh.row.size, 1) * mesh.row.size, device=world.device)
        parts = equal_spans(len(bucket), mesh.row.size)
        shard = bucket[slice(*parts[mesh.row.position])]
        phases: list[tuple[str, Any, Tensor, Callable[[], None]]] = [
            ("reduce_scatter", mesh.row, bucket, lambda b=bucket, p=parts: row.reduce_scatter(b, p)),  # type: ignore[misc]
            ("all_reduce", mesh.column, shard, lambda s=shard: column.all_reduce(s)),  # type: ignore[misc]
            ("all_gather", mesh.row, bucket, lambda b=bucket, p=parts: row.all_gather(b, p)),  # type: ignore[misc]
        ]
        for name, axis, data, operation in phases:
            if axis.size > 1:
                seconds = _time_rounds(world, operation, job.seconds)
                yield {"phase": name, "axis": axis.name, "ranks": axis.size, "bytes": data.nbytes, "seconds": seconds}


class NoAllReduce:
    """In the place of an all-reduce: leaves every rank with its own gradients."""

    def __call__(self, bucket: Tensor) -> None:
        pass


def _measure_steps(
    world: World, ready: dict[str, AllReduce], sections: dict[str, AllReduceSection], job: LinkBenchmarkJob
) -> Iterator[dict[str, Any]]:
    """Steps with every section and without reduction in turn, so that a busy moment of the machine meets all."""
    network = build_model(ModelSection(**(job.model or {})), 1000).to(world.device).train()
    images = torch.randn(job.batch, 3, job.side, job.side, device=world.device)
    labels = torch.randint(0, 1000, (job.batch,), device=world.device)
    found: dict[str, list[float]] = {"": [], **{name: [] for name in ready}}
    for number in range(1 + 5):
        for name, times in found.items():
            section = sections.get(name, AllReduceSection())
            reduce = ready.get(name, NoAllReduce())
            reducer = BucketedReducer(network, reduce, world, bucket_mb=section.bucket_mb, overlap=section.overlap)

            def step(reducer: BucketedReducer = reducer) -> None:
                reducer.start_step()
                reducer.backward(nn.functional.cross_entropy(reducer.module(images), labels), last=True)
                reducer.finish()

            seconds = time_slowest_rank(world, step)
            reducer.close()
            if number:  # the first round makes connections and memory
                times.append(seconds)
    for name in ready:
        yield {"algorithm": name, "seconds": found[name], "alone": found[""]}


def _time_rounds(world: World, operation: Callable[[], None], budget: float) -> list[float]:
    """Seconds of each round; as many rounds as the budget gives, the same number on every rank."""
    time_slowest_rank(world, operation)
    first = time_slowest_rank(world, operation)
    rounds = min(max(int(budget / max(first, 1e-6)), MIN_MAX_ROUNDS[0]), MIN_MAX_ROUNDS[1])
    return [time_slowest_rank(world, operation) for _ in range(rounds)]


if __name__ == "__main__":
    main()
