"""Commands that measure this machine: all-reduces and training steps; `bench_input` has the input pipeline."""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from podscale.cli import bench_input
from podscale.cli.options import Json, Set, command_without_folders, complete_run, open_output_folder
from podscale.errors import InputError
from podscale.pipelines import presets
from podscale.util import env, host_info
from podscale.util.files import write_json

if TYPE_CHECKING:
    from podscale.config import RunConfig

app = typer.Typer(help="Measure this machine, with the code that runs use.", no_args_is_help=True)
app.add_typer(bench_input.app)

ALGORITHMS = ("flat", "ring", "tree", "hierarchical", "torus2d", "hybrid")
ALGORITHMS_WITHOUT_ROWS = ("flat", "ring", "tree")
RESNET50 = (
    "model.name=resnet50",
    "input.image_size=224",
    "train.global_batch=256",
    "train.precision=bf16",
    "train.optimizer.name=lars",
)
"""Options of the run that is measured if no document is given."""


@app.command("allreduce")
def allreduce(
    ranks: Annotated[int, typer.Option(help="Processes on this machine; torchrun brings its own.", min=1)] = 2,
    algorithms: Annotated[str, typer.Option(metavar="A,B", help="Algorithms to measure.")] = ",".join(ALGORITHMS),
    sizes: Annotated[
        str, typer.Option(metavar="64K,1M", help="Sizes of the fp32 gradients, bytes.")
    ] = "4K,64K,1M,16M,64M",
    wire: Annotated[str, typer.Option(metavar="fp32|bf16|fp16|int8", help="Number format of messages.")] = "fp32",
    row: Annotated[
        int | None, typer.Option(help="Ranks per row of the grid; default: the ranks of a node.", min=1)
    ] = None,
    bucket_mb: Annotated[float, typer.Option(help="Bucket size in the measured step, MiB.", min=0.1)] = 25.0,
    seconds: Annotated[float, typer.Option(help="Approximate seconds for each algorithm and size.", min=0.01)] = 1.0,
    model: Annotated[
        str | None, typer.Option(help="Network of the measured step; `--model ''` measures none.")
    ] = "resnet50",
    side: Annotated[int, typer.Option(help="Side of the images in the measured step, pixels.", min=8)] = 64,
    batch: Annotated[int, typer.Option(help="Images per rank in the measured step.", min=2)] = 8,
    time_limit: Annotated[float, typer.Option(help="Time limit for everything, seconds.", min=10)] = 900.0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for allreduce.md, .json and .svg; created if missing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure all-reduces (gloo or NCCL): time, algbw and busbw by size and axis, and exposed time in a step."""
    from podscale.bench import all_reduce

    job = {
        "sections": {name: _section(name, wire, row, bucket_mb) for name in algorithms.split(",")},
        "sizes": all_reduce.parse_sizes(sizes),
        "row": row,
        "seconds": seconds,
        "model": {"name": model} if model else None,
        "side": side,
        "batch": batch,
    }
    if out is not None:
        open_output_folder(out)
    rank = env.read_number(env.RANK)
    if rank is not None and env.WORLD_SIZE in os.environ:
        results = _run_as_worker(job)
        if rank != 0:
            return
    else:
        if row is not None and ranks % row:
            raise InputError(f"does not divide --ranks {ranks}", field="--row", got=row, hint="Choose a divisor.")
        results = all_reduce.run_link_benchmark(job, ranks, time_limit)
    lines = all_reduce.format_tables(results)
    if out is not None:
        command = f"Command: `{command_without_folders('podscale bench allreduce')}`  "
        machine = f"Machine: {host_info.cpu_count()} cores of {host_info.cpu_name()}  "
        text = ["# Speed of all-reduce", "", command, machine, f"Date: {time.strftime('%Y-%m-%d')}", "", *lines, ""]
        (out / "allreduce.md").write_text("\n".join(text), encoding="utf-8")
        (out / "allreduce.svg").write_text(all_reduce.bandwidth_chart(results), encoding="utf-8")
        write_json(out / "allreduce.json", results)
    sys.stdout.write(json.dumps(results, indent=2) + "\n" if as_json else "\n".join([*lines, ""]))


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
    sweep: Annotated[str | None, typer.Option(help="Named series of variants to measure: gpu, cpu.")] = None,
    vary: Annotated[
        list[str],
        typer.Option(
            metavar="A.B=X,Y", help="Values to measure; several options make a grid. batch= is images per rank."
        ),
    ] = [],
    shard_set: Annotated[
        str | None, typer.Option(metavar="DIR", help="Shard set for the variants that read real images.")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Steps before timing begins.", min=5)] = 20,
    steps: Annotated[int, typer.Option(help="Timed steps.", min=2)] = 50,
    parts: Annotated[int, typer.Option(help="Further steps measured part by part.", min=1)] = 5,
    time_limit: Annotated[float, typer.Option(help="Time limit of one variant, seconds.", min=10)] = 300.0,
    budget: Annotated[float, typer.Option(help="Time limit of all variants, seconds.", min=10)] = 86400.0,
    profile: Annotated[bool, typer.Option("--profile", help="Also list a step's kernels and bytes by class.")] = False,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for train-<device>.md and .json; created if missing.")
    ] = Path(),
) -> None:
    """Measure images/s, parts of a step, fraction of the device's peak, and memory. The same command resumes it."""
    from podscale import config
    from podscale.bench.sweep import SweepRow, SweepSettings, run_sweep
    from podscale.bench.train_report import format_report, write_report
    from podscale.bench.variants import named_sweep, variant_grid

    if sweep is not None and vary:
        raise InputError("only one of them can define the variants", field="--sweep, --vary")
    path = presets.resolve_preset(document) if document is not None else None
    base_changes = [*(() if document is not None else RESNET50), *changes]

    def load_variant(variant_changes: list[str]) -> "RunConfig":
        return config.load(path, [*base_changes, *variant_changes])

    settings = SweepSettings(warmup, steps, parts, time_limit, budget, shard_set, profile)
    real = shard_set is not None
    variants = named_sweep(sweep, real_images=real) if sweep is not None else variant_grid(vary, real_images=real)
    name = f"train-{host_info.device_slug()}"
    command = command_without_folders("podscale bench train")

    def report_row(row: SweepRow, rows: list[SweepRow]) -> None:
        write_report(out / f"{name}.md", command, rows)
        result = f"{row.found['images_per_second']:,.1f} images/s" if row.found else row.reason
        print(f"{row.name}: {result}", file=sys.stderr, flush=True)

    open_output_folder(out)
    rows = run_sweep(load_variant, variants, settings, out / f"{name}.json", report_row)
    print("\n".join(format_report(command, rows)))


def _section(name: str, wire: str, row: int | None, bucket_mb: float) -> dict[str, Any]:
    """Return the all-reduce section of one algorithm; raises InputError for unknown names."""
    from podscale.config.train import AllReduceSection, WireFormatName

    if name not in ALGORITHMS:
        raise InputError("unknown algorithm", field="--algorithms", got=name, hint=f"Known: {', '.join(ALGORITHMS)}.")
    formats = get_args(WireFormatName)
    if wire not in formats:
        raise InputError("unknown format", field="--wire", got=wire, hint=f"Choose one of {', '.join(formats)}.")
    wire_row = "fp32" if name in ALGORITHMS_WITHOUT_ROWS else wire
    values = {"algorithm": name, "row": row, "bucket_mb": bucket_mb}
    values |= {"wire_row": wire_row, "wire_column": wire}
    AllReduceSection.model_validate(values)
    return values


def _run_as_worker(job: dict[str, Any]) -> dict[str, Any]:
    from podscale.pytorch import link_benchmark, world

    results = link_benchmark.measure_links(world.join_world(300.0), link_benchmark.LinkBenchmarkJob(**job))
    world.leave_world()
    return results
