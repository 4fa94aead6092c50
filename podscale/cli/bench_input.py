"""Command that measures the input pipeline: images/s of each loader, need and headroom of a run, and remedies."""

import json
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.options import Json, Set, command_without_folders, complete_run, open_output_folder
from podscale.errors import InputError
from podscale.pipelines import presets
from podscale.util import host_info
from podscale.util.files import write_json

if TYPE_CHECKING:
    from podscale.bench.input_lever_report import LeverReport
    from podscale.bench.input_need import NeededRate
    from podscale.bench.input_rates import Delivery, InputRow, InputSettings, Rate
    from podscale.bench.input_report import InputReport, RunInput
    from podscale.cli.input_images import InputImages
    from podscale.config import RunConfig

app = typer.Typer()


@app.command("input")
def input_rates(
    document: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Run document: its images, input options and model; default: random crops of 224 px, bilinear.",
            autocompletion=complete_run,
        ),
    ] = None,
    changes: Set = [],
    source: Annotated[
        str | None,
        typer.Option(
            metavar="LOCATION",
            help="Folder or .tar of images to pack into a temporary shard set; class folders are not needed. Default: "
            "the shard set of RUN, or its data.source if that is still to be packed.",
        ),
    ] = None,
    shard_set: Annotated[
        str | None, typer.Option(metavar="DIR", help="Shard set to read, instead of --source.")
    ] = None,
    images: Annotated[int, typer.Option(help="Most images to pack of a source.", min=2)] = 2000,
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
        typer.Option(
            help="Images/s to compare with; default: those of RUN's model on this host (recorded, else estimated), "
            "without RUN ResNet-50 on this GPU or an H100, as published.",
            min=1,
        ),
    ] = None,
    levers: Annotated[
        bool, typer.Option("--levers/--no-levers", help="Also measure what would raise the rate, on a sample.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for input-<device>.md and .json; created if missing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the input pipeline: images/s that this host delivers, and the need, headroom and remedies of a run."""
    from podscale.bench.input_rates import InputSettings
    from podscale.cli.input_images import find_images

    run = _load_run(document, changes, source, shard_set, image_size)
    target = device or ("cuda:0" if host_info.visible_gpus() else "cpu")
    rows = _input_rows(loaders, workers, target)
    if out is not None:
        open_output_folder(out)
    needed, load = _need(run, need, has_document=document is not None), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="podscale-bench-") as folder:
        found = find_images(run, source, shard_set, Path(folder), images)
        settings = InputSettings(batch or min(256, len(found.split)), seconds, rounds, target)
        report = _measure(run, found, rows, settings, needed, load)
        if document is not None:
            report = replace(report, run=_run_input(run, target))
        if levers:
            report = replace(report, levers=_measure_levers(run, found, report, settings, Path(folder)))
    _write_report(report, out, as_json=as_json)


def _load_run(
    document: str | None, changes: list[str], source: str | None, shard_set: str | None, image_size: int | None
) -> "RunConfig":
    """Load the document, by default that of all defaults. Raises InputError if nothing, or too much, names images."""
    from podscale import config

    if source is not None and shard_set is not None:
        raise InputError(
            "only one of them can have the images", field="--source, --shard-set", hint="Give one of them."
        )
    if document is None and source is None and shard_set is None:
        raise InputError("missing", field="--source, --shard-set", hint="Give one of them, or a run document.")
    path = presets.resolve_preset(document) if document is not None else None
    run = config.load(path, changes)
    if image_size is None:
        return run
    return run.model_copy(update={"input": run.input.model_copy(update={"image_size": image_size})})


def _need(run: "RunConfig", need: float | None, *, has_document: bool) -> "NeededRate":
    """Return --need, else the need of the document's run on this host, else that of ResNet-50 on one GPU."""
    from podscale.bench.input_need import NeededRate, published_need
    from podscale.cli.input_need import run_need
    from podscale.runs.user_code import user_code

    if need is not None:
        return NeededRate(need, "as given with --need")
    if not has_document:
        return published_need(host_info.gpu_names())
    with user_code(run):
        return run_need(run)


def _measure(
    run: "RunConfig",
    found: "InputImages",
    rows: "list[InputRow]",
    settings: "InputSettings",
    needed: "NeededRate",
    load: float,
) -> "InputReport":
    """Measure the loaders of `rows`. The report says under which conditions, with the `load` before the start."""
    from podscale.bench.input_rates import measure_loaders
    from podscale.bench.input_report import InputReport, describe

    command = command_without_folders("podscale bench input")
    conditions = describe(command, found.split, run.input, settings, host_info.gpu_names(), load)
    measured = measure_loaders(
        run.input, found.split, rows, settings, deliver=_delivery(settings.device), on_rate=_print_rate
    )
    return InputReport(conditions | {"origin": found.origin}, needed, measured)


def _run_input(run: "RunConfig", device: str) -> "RunInput":
    """Return the loader and the threads of a document on this host."""
    from podscale.bench.input_report import RunInput
    from podscale.config.preflight.host import processes_per_node
    from podscale.data.loaders.build_loader import resolve_loader

    loader = resolve_loader(run.input.loader, device, needs_cpu_loader=run.input.needs_cpu_loader)
    return RunInput(loader, run.input.workers, processes_per_node(run))


def _measure_levers(
    run: "RunConfig", found: "InputImages", report: "InputReport", settings: "InputSettings", folder: Path
) -> "LeverReport | None":
    """Measure the levers of the fastest CPU loader among the rows; None if there is none, or too few images."""
    from podscale.bench.images import MIN_CLASSES
    from podscale.bench.input_lever_report import LeverReport
    from podscale.bench.input_levers import LEVER_LOADERS, measure_levers
    from podscale.config.preflight.host import processes_per_node

    rows = [row for name in LEVER_LOADERS for row in report.rows if row.loader == name and row.rates]
    if not rows or len(found.split) < MIN_CLASSES:
        return None
    best = max((row for row in rows if row.loader == rows[0].loader), key=lambda row: row.per_second)
    print("changes that would raise the rate ...", file=sys.stderr, flush=True)
    levers = measure_levers(run.input, run.data, found.split, best, settings, folder / "levers")
    images = found.training_images
    if images is not None and run.input.order == "blocked":
        images = -(-images // run.launch.nodes)  # a host reads its own groups of shards alone
    memory, processes = host_info.memory_info().available, processes_per_node(run)
    return LeverReport(levers, report.need.per_second, images, memory, processes)


def _print_rate(row: "InputRow", rate: "Rate") -> None:
    from podscale.bench.input_headroom import format_rate
    from podscale.bench.input_report import row_name

    print(f"{row_name(row)}: {format_rate(rate.per_second)} images/s", file=sys.stderr, flush=True)


def _write_report(report: "InputReport", out: Path | None, *, as_json: bool) -> None:
    """Write the report to the folder `out`, if there is one, and to standard output."""
    from podscale.util.files import write_atomically

    text = "\n".join([*report.lines(), ""])
    if out is not None:
        name = f"input-{host_info.device_slug()}"
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


def _delivery(device: str) -> "Delivery | None":
    """Return the function that moves batches to a device; None for the host's memory."""
    if device == "cpu":
        return None
    from podscale.pytorch.device_prefetcher import deliver_batches
    from podscale.pytorch.gpu_checks import check_device

    check_device(device)
    return partial(deliver_batches, device=device)
