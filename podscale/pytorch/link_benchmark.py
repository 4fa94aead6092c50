"""Worker of `podscale bench allreduce`: one measurement, as the process of one rank.

    python -m podscale.pytorch.link_benchmark JOB.json RESULT.json

JOB holds the fields of `LinkBenchmarkJob`. Rank 0 writes RESULT, the result of `measure_links`. Every time is the
slowest rank's from a common start, on a GPU until the device has finished.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from podscale.config.model import ModelSection
from podscale.config.train import AllReduceSection
from podscale.pytorch.all_reduce import AllReduce, build_all_reduce
from podscale.pytorch.all_reduce.collectives import build_collectives
from podscale.pytorch.all_reduce.plan import equal_spans
from podscale.pytorch.all_reduce.wire_formats import FP32
from podscale.pytorch.mesh import Mesh, build_mesh
from podscale.pytorch.models import build_model
from podscale.pytorch.reducer import BucketedReducer
from podscale.pytorch.timing import time_slowest_rank
from podscale.pytorch.world import World, join_world, leave_world
from podscale.util.files import write_json
from podscale.util.processes import exit_with_parent

MIN_MAX_ROUNDS = (3, 50)
CHECKED_ELEMENTS = 2**14
"""Elements of the bucket whose error is measured."""


@dataclass(frozen=True)
class LinkBenchmarkJob:
    """Measurements to run.

    Args:
        sizes: bucket sizes, bytes of fp32.
        row: ranks of a row; None: those of a node.
        seconds: approximate time for each size.
        model: model section of the timed training steps; None: no steps.
        side: height and width of an image of these steps, pixels.
        batch: images a rank.
    """

    sections: dict[str, dict[str, Any]]
    sizes: list[int]
    row: int | None
    seconds: float
    model: dict[str, Any] | None
    side: int
    batch: int


def main() -> None:
    exit_with_parent()
    job, result_path = LinkBenchmarkJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), Path(sys.argv[2])
    world = join_world(300.0)
    result = measure_links(world, job)
    if world.is_rank0:
        write_json(result_path, result)
    leave_world()


def measure_links(world: World, job: LinkBenchmarkJob) -> dict[str, Any]:
    """Return the measurements, the same on every rank. Every rank must call this at the same time.

    `whole` has seconds and error of each section and size, `phases` the seconds of a torus's phases on each axis, and
    `steps` those of a training step (forward and backward) with each section, and without reduction.
    """
    sections = {name: AllReduceSection(**values) for name, values in job.sections.items()}
    all_reduces = {name: build_all_reduce(section, world) for name, section in sections.items()}
    mesh = build_mesh(world, job.row)
    return {
        "ranks": world.size,
        "rows": list(mesh.shape),
        "device": torch.cuda.get_device_name(world.device) if world.on_gpu else "cpu",
        "backend": "nccl" if world.on_gpu else "gloo",
        "whole": [*_measure_algorithms(world, all_reduces, job)],
        "phases": [*_measure_phases(world, mesh, job)],
        "steps": [*_measure_steps(world, all_reduces, sections, job)] if job.model else [],
    }


def _measure_algorithms(
    world: World, all_reduces: dict[str, AllReduce], job: LinkBenchmarkJob
) -> Iterator[dict[str, Any]]:
    for name, all_reduce in all_reduces.items():
        error = relative_rms_error(world, all_reduce)
        for size in job.sizes:
            bucket = torch.zeros(max(size // 4, 1), device=world.device)
            seconds = _time_rounds(world, partial(all_reduce, bucket), job.seconds)
            yield {"algorithm": name, "bytes": bucket.nbytes, "seconds": seconds, "error": error}


def relative_rms_error(world: World, all_reduce: AllReduce) -> float:
    """Return the RMS error of the mean of random values, relative to the RMS of the exact mean in float64."""
    seeds = [torch.Generator().manual_seed(rank) for rank in range(world.size)]
    values = [torch.randn(CHECKED_ELEMENTS, generator=generator) for generator in seeds]
    exact = torch.stack(values).double().mean(0)
    mean = values[world.rank].to(world.device)
    all_reduce(mean)
    return float((mean.cpu() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def _measure_phases(world: World, mesh: Mesh, job: LinkBenchmarkJob) -> Iterator[dict[str, Any]]:
    """Time reduce-scatter and all-gather of S bytes along rows, all-reduce of S / row along columns, in fp32."""
    row, column = (build_collectives(axis, FP32, world.device) for axis in (mesh.row, mesh.column))
    for size in job.sizes:
        bucket = torch.zeros(max(size // 4 // mesh.row.size, 1) * mesh.row.size, device=world.device)
        parts = equal_spans(len(bucket), mesh.row.size)
        shard = bucket[slice(*parts[mesh.row.position])]
        phases = [
            ("reduce_scatter", mesh.row, bucket, partial(row.reduce_scatter, bucket, parts)),
            ("all_reduce", mesh.column, shard, partial(column.all_reduce, shard)),
            ("all_gather", mesh.row, bucket, partial(row.all_gather, bucket, parts)),
        ]
        for name, axis, data, operation in phases:
            if axis.size > 1:
                seconds = _time_rounds(world, operation, job.seconds)
                yield {"phase": name, "axis": axis.name, "ranks": axis.size, "bytes": data.nbytes, "seconds": seconds}


def _measure_steps(
    world: World, all_reduces: dict[str, AllReduce], sections: dict[str, AllReduceSection], job: LinkBenchmarkJob
) -> Iterator[dict[str, Any]]:
    """Time steps with every section and without reduction in turn, so that other load affects all of them."""
    network = build_model(ModelSection(**(job.model or {})), 1000).to(world.device).train()
    images = torch.randn(job.batch, 3, job.side, job.side, device=world.device)
    labels = torch.randint(0, 1000, (job.batch,), device=world.device)
    seconds_by_name: dict[str, list[float]] = {"": [], **{name: [] for name in all_reduces}}
    for number in range(1 + 5):
        for name, times in seconds_by_name.items():
            section = sections.get(name, AllReduceSection())
            all_reduce = all_reduces.get(name, lambda bucket: None)
            reducer = BucketedReducer(network, all_reduce, world, bucket_mb=section.bucket_mb, overlap=section.overlap)

            def step(reducer: BucketedReducer = reducer) -> None:
                reducer.start_step()
                reducer.backward(nn.functional.cross_entropy(reducer.module(images), labels), last=True)
                reducer.finish()

            seconds = time_slowest_rank(world, step)
            reducer.close()
            if number:  # the first round opens connections and allocates
                times.append(seconds)
    for name in all_reduces:
        yield {"algorithm": name, "seconds": seconds_by_name[name], "alone": seconds_by_name[""]}


def _time_rounds(world: World, operation: Callable[[], None], budget: float) -> list[float]:
    """Return the seconds of each round; `budget`: approximate seconds of all of them."""
    time_slowest_rank(world, operation)
    first = time_slowest_rank(world, operation)
    rounds = min(max(int(budget / max(first, 1e-6)), MIN_MAX_ROUNDS[0]), MIN_MAX_ROUNDS[1])
    return [time_slowest_rank(world, operation) for _ in range(rounds)]


if __name__ == "__main__":
    main()
