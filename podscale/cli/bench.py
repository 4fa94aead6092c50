"""Commands that measure this machine."""

import os
from pathlib import Path
from typing import Annotated

import typer

from podscale.cli.options import Json, Set, complete_run
from podscale.util import env

app = typer.Typer(help="Measure this machine, with the code that runs use.", no_args_is_help=True)


@app.command("allreduce")
def allreduce(
    ranks: Annotated[int, typer.Option(help="Processes here; a torchrun world brings its own.", min=1)] = 2,
    algorithms: Annotated[str, typer.Option(metavar="A,B", help="What to measure.")] = (
        "flat,ring,tree,hierarchical,torus2d,hybrid"
    ),
    sizes: Annotated[str, typer.Option(metavar="64K,1M", help="Bytes of fp32 gradients.")] = "4K,64K,1M,16M,64M",
    wire: Annotated[str, typer.Option(metavar="fp32|bf16|fp16", help="Format of messages.")] = "fp32",
    row: Annotated[
        int | None, typer.Option(help="Ranks in a row of the grid; default: the ranks of a node.", min=1)
    ] = None,
    bucket_mb: Annotated[float, typer.Option(help="MiB of a bucket in the measured step.", min=0.1)] = 25.0,
    seconds: Annotated[float, typer.Option(help="About so long for each algorithm and size.", min=0.01)] = 1.0,
    model: Annotated[
        str | None, typer.Option(help="Network of the measured step; `--model ''` measures none.")
    ] = "resnet50",
    side: Annotated[int, typer.Option(help="Side of its images in pixels.", min=8)] = 64,
    batch: Annotated[int, typer.Option(help="Images per rank in the measured step.", min=2)] = 8,
    time_limit: Annotated[float, typer.Option(help="Seconds for everything.", min=10)] = 900.0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for allreduce.md, .json and .svg.")] = None,
    json: Json = False,
) -> None:
    """Time, algbw and busbw of every all-reduce by size and axis, and what shows of it in a step (gloo or NCCL)."""
    from podscale.commands import bench_allreduce

    bench_allreduce.run_bench_allreduce(
        bench_allreduce.AllReduceBenchOptions(
            ranks, algorithms, sizes, wire, row, bucket_mb, seconds, model, side, batch, time_limit, out, json
        )
    )


@app.command("train")
def train(
    document: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Run document to measure; default: ResNet-50 at 224 px in bf16 under LARS.",
            autocompletion=complete_run,
        ),
    ] = None,
    changes: Set = [],
    sweep: Annotated[str | None, typer.Option(help="Measure a named series of variants: gpu, cpu.")] = None,
    vary: Annotated[
        list[str],
        typer.Option(metavar="A.B=X,Y", help="Measure these values; several make a grid. batch= is images per rank."),
    ] = [],
    shard_set: Annotated[
        str | None, typer.Option(metavar="DIR", help="Shard set for the variants that read real images.")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Updates before timing begins.", min=5)] = 20,
    steps: Annotated[int, typer.Option(help="Updates timed.", min=2)] = 50,
    parts: Annotated[int, typer.Option(help="Further updates measured part by part.", min=1)] = 5,
    time_limit: Annotated[float, typer.Option(help="Seconds for one variant.", min=10)] = 300.0,
    budget: Annotated[float, typer.Option(help="Seconds for all variants.", min=10)] = 86400.0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for train-<device>.md and .json.")] = Path(),
) -> None:
    """Images/s, parts of an update, share of the device's peak, memory. Started again, it measures what is missing."""
    from podscale.bench.sweep import SweepSettings
    from podscale.commands import bench_train

    bench_train.run_bench_train(
        document,
        changes,
        sweep=sweep,
        vary=vary,
        settings=SweepSettings(warmup, steps, parts, time_limit, budget, shard_set),
        out=out,
        command=os.environ.get(env.COMMAND, "podscale bench train"),
    )
