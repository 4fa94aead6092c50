"""Command that measures the input pipeline: images/s of each loader on this machine."""

import json
import os
import shutil
import sys
import tempfile
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
    from podscale.bench.input_rates import Delivery, InputRow, Rate
    from podscale.bench.input_report import InputReport
    from podscale.config import RunConfig

app = typer.Typer()


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
    from podscale import config
    from podscale.bench.input_rates import InputSettings, measure_loaders
    from podscale.bench.input_report import InputReport, NeededRate, describe, published_need
    from podscale.data.loaders.build_loader import open_shard_set

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
        conditions = describe(command_without_folders("podscale bench input"), split, section, settings, gpus, load)
        rows = measure_loaders(section, split, rows, settings, deliver=_delivery(target), on_rate=_print_rate)
    needed = NeededRate(need, "as given with --need") if need is not None else published_need(gpus)
    _write_report(InputReport(conditions, needed, rows), out, as_json=as_json)


def _print_rate(row: "InputRow", rate: "Rate") -> None:
    from podscale.bench.input_report import format_rate, row_name

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
