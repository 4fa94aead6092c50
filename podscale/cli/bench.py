"""Commands that measure this machine."""

import json
import os
import re
import shlex
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podscale.cli.options import Json, Set, complete_run, open_output_folder
from podscale.errors import InputError
from podscale.pipelines import presets
from podscale.util import env, host_info
from podscale.util.files import write_json

if TYPE_CHECKING:
    from podscale.bench.input_rates import Delivery, InputRow
    from podscale.config import RunConfig

app = typer.Typer(help="Measure this machine, with the code that runs use.", no_args_is_help=True)

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
    algorithms: Annotated[str, typer.Option(metavar="A,B", help="Algorithms to measure.")] = (
        "flat,ring,tree,hierarchical,torus2d,hybrid"
    ),
    sizes: Annotated[
        str, typer.Option(metavar="64K,1M", help="Sizes of the fp32 gradients, bytes.")
    ] = "4K,64K,1M,16M,64M",
    wire: Annotated[str, typer.Option(metavar="fp32|bf16|fp16", help="Number format of messages.")] = "fp32",
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
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        results = _run_as_worker(job)
        if os.environ["RANK"] != "0":
            return
    else:
        if row is not None and ranks % row:
            raise InputError(f"does not divide --ranks {ranks}", field="--row", got=row, hint="Choose a divisor.")
        results = all_reduce.run_link_benchmark(job, ranks, time_limit)
    lines = all_reduce.format_tables(results)
    if out is not None:
        command = f"Command: `{os.environ.get(env.COMMAND, '')}`  "
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
    profile: Annotated[bool, typer.Option("--profile", help="Also list a step's kernels by class (GPU).")] = False,
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
    name = f"train-{device_slug()}"
    command = _command_without_folders("podscale bench train")

    def report_row(row: SweepRow, rows: list[SweepRow]) -> None:
        write_report(out / f"{name}.md", command, rows)
        result = f"{row.found['images_per_second']:,.1f} images/s" if row.found else row.reason
        print(f"{row.name}: {result}", file=sys.stderr, flush=True)

    open_output_folder(out)
    rows = run_sweep(load_variant, variants, settings, out / f"{name}.json", report_row)
    print("\n".join(format_report(command, rows)))


@app.command("input")
def input_rates(
    document: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Run document whose input and data sections count; default: random crops of 224 px, bilinear.",
            autocompletion=complete_run,
        ),
    ] = None,
    changes: Set = [],
    source: Annotated[
        str | None,
        typer.Option(
            metavar="LOCATION",
            help="Folder or .tar of images to pack into a temporary shard set; class folders are not needed.",
        ),
    ] = None,
    shard_set: Annotated[
        str | None, typer.Option(metavar="DIR", help="Shard set to read, instead of --source.")
    ] = None,
    loaders: Annotated[
        str, typer.Option(metavar="A,B", help="Loaders to measure; those that do not run here get a reason.")
    ] = "native,reference,dali,nvjpeg",
    workers: Annotated[
        str | None, typer.Option(metavar="N,M", help="Decoding threads, a row for each; default: one for each core.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Approximate seconds for each row, over all rounds, without warm-up.", min=0.1)
    ] = 10.0,
    rounds: Annotated[int, typer.Option(help="Rounds, in which the rows take turns.", min=1)] = 3,
    image_size: Annotated[
        int | None, typer.Option(help="Side of the batches' images, pixels; default: the document's.", min=4)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Images of a batch; default: 256, or all if there are fewer.", min=1)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device that gets the batches: cpu, cuda:0; default: the first GPU, if any.")
    ] = None,
    need: Annotated[
        float | None,
        typer.Option(help="Images/s to compare with; default: ResNet-50 on this GPU or an H100, as published.", min=1),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for input-<device>.md and .json; created if missing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the input pipeline: images/s of each loader, per CPU-second too, and the cores that a GPU needs."""
    import tempfile

    from podscale import config
    from podscale.bench.input_rates import InputRow, InputSettings, Rate, measure_loaders
    from podscale.bench.input_report import InputReport, NeededRate, describe, format_rate, published_need, row_name
    from podscale.data.loaders.build_loader import open_shard_set
    from podscale.util.files import write_atomically

    if (source is None) == (shard_set is None):
        problem = "missing" if source is None else "only one of them can have the images"
        raise InputError(problem, field="--source, --shard-set", hint="Give one of them.")
    path = presets.resolve_preset(document) if document is not None else None
    options = [f"data.source={json.dumps(source)}"] if source is not None else []
    run = config.load(path, [*changes, *options])
    section = run.input if image_size is None else run.input.model_copy(update={"image_size": image_size})
    gpus = host_info.gpu_names()
    target = device or ("cuda:0" if host_info.visible_gpus() else "cpu")
    rows = _input_rows(loaders, workers, target)
    if out is not None:
        open_output_folder(out)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="podscale-bench-") as folder:
        split = open_shard_set(shard_set or _pack(run, folder), run).split("train")
        settings = InputSettings(batch or min(256, len(split)), seconds, rounds, target)
        conditions = describe(_command_without_folders("podscale bench input"), split, section, settings, gpus, load)

        def report_rate(row: InputRow, rate: Rate) -> None:
            print(f"{row_name(row)}: {format_rate(rate.per_second)} images/s", file=sys.stderr, flush=True)

        rows = measure_loaders(section, split, rows, settings, deliver=_delivery(target), on_rate=report_rate)
    needed = NeededRate(need, "as given with --need") if need is not None else published_need(gpus)
    report = InputReport(conditions, needed, rows)
    text = "\n".join([*report.lines(), ""])
    if out is not None:
        name = f"input-{device_slug()}"
        write_atomically(out / f"{name}.md", text)
        write_json(out / f"{name}.json", report.values())
    sys.stdout.write(json.dumps(report.values(), indent=2) + "\n" if as_json else text)


def _input_rows(loaders: str, workers: str | None, device: str) -> "list[InputRow]":
    """Return the rows to measure; those of loaders that do not run here have the reason."""
    from podscale.bench.input_rates import FIXED_THREADS, LOADERS, InputRow
    from podscale.data.loaders.build_loader import unavailable_reason

    counts = workers.split(",") if workers is not None else [str(host_info.cpu_count())]
    for count in counts:
        if not count.isdecimal() or int(count) < 1:
            raise InputError("not a number of threads", field="--workers", got=workers, hint="Such as 1,4,16.")
    rows = []
    for name in dict.fromkeys(loaders.split(",")):
        if name not in LOADERS:
            raise InputError("unknown loader", field="--loaders", got=name, hint=f"Known: {', '.join(LOADERS)}.")
        if reason := unavailable_reason(name, device):
            rows.append(InputRow(name, None, reason=reason))
        elif name in FIXED_THREADS:
            rows.append(InputRow(name, None))
        else:
            rows += [InputRow(name, count) for count in dict.fromkeys(map(int, counts))]
    if all(row.reason for row in rows):
        raise InputError(
            f"none of them runs here: {rows[0].loader}: {rows[0].reason}",
            field="--loaders",
            got=loaders,
            hint="Add reference, which runs everywhere.",
        )
    return rows


def _pack(run: "RunConfig", folder: str) -> str:
    """Pack the images of data.source, without their labels, in `folder`; return the location of the shard set."""
    from podscale.bench.images import copy_without_labels
    from podscale.stages import local
    from podscale.util.terminal import ProgressLine

    data, copies = run.data, Path(folder, "images")
    if data.source_is_location:
        copy_without_labels(data.source, copies)
        data = data.model_copy(update={"source": str(copies), "format": "imagefolder", "classes": None})
    progress = ProgressLine(sys.stderr)
    result = local.shard(data, folder, progress=progress)
    progress.clear()
    shutil.rmtree(copies, ignore_errors=True)
    assert result is not None, "a call without `part` packs the whole shard set"
    return result.location


def _delivery(device: str) -> "Delivery | None":
    """Return the function that moves batches to a device; None for the host's memory."""
    if device == "cpu":
        return None
    from podscale.pytorch.device_prefetcher import deliver_batches
    from podscale.pytorch.gpu_checks import check_device

    check_device(device)
    return partial(deliver_batches, device=device)


def _command_without_folders(default: str) -> str:
    """Return the command of this process without the folders of its paths."""
    words = shlex.split(os.environ.get(env.COMMAND, default))
    return " ".join(shlex.quote(Path(word).name if "/" in word else word) for word in words)


def _section(name: str, wire: str, row: int | None, bucket_mb: float) -> dict[str, Any]:
    """Return the all-reduce section of one algorithm; raises InputError for unknown names."""
    from podscale.config.train import AllReduceSection

    if name not in ALGORITHMS:
        raise InputError("unknown algorithm", field="--algorithms", got=name, hint=f"Known: {', '.join(ALGORITHMS)}.")
    if wire not in ("fp32", "bf16", "fp16"):
        raise InputError("unknown format", field="--wire", got=wire, hint="Choose fp32, bf16 or fp16.")
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


def device_slug() -> str:
    """Return the name of this machine's first device for a file name."""
    names = host_info.gpu_names()
    name = names[0].removeprefix("NVIDIA ") if names else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
