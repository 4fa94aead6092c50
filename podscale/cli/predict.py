"""Predictions of a trained model for any images: by `predict` here, or by a job of `--stage predict` on a cluster."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podscale.cli.options import Convert, PlainSoftmax, open_output_folder
from podscale.errors import ExitCode, InputError, error_from_exit_code
from podscale.util.formatting import format_count
from podscale.util.progress_reports import ignore_progress
from podscale.util.terminal import ProgressLine

if TYPE_CHECKING:
    from podscale.config import RunConfig
    from podscale.kubernetes.predict_job import PredictionJob
    from podscale.kubernetes.render import Manifest
    from podscale.prediction.predictor import PredictOptions, Predictor
    from podscale.prediction.summary import PredictionSummary

app = typer.Typer()


@app.command()
def predict(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Directory of a run or of a model, or an exported file.")
    ],
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGES...",
            help="Files, folders, tars, shard sets or fsspec URLs; -: a list on standard input, one image a line.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write to FILE.jsonl, .csv or .parquet instead of standard output; a folder of --part."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with pictures.")] = None,
    top: Annotated[int, typer.Option(help="Classes of each image.", min=1)] = 5,
    batch: Annotated[
        int | None, typer.Option(help="Images of a batch; default: 32 on a CPU, evaluate.batch on a GPU.", min=1)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Predict the first images only.", min=1)] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes that share the images; default: one for each GPU, or one.", min=1)
    ] = None,
    convert: Convert = False,
    plain: PlainSoftmax = False,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="INDEX/COUNT",
            help="Predict one part of the images, from 0/COUNT, into the folder --out; `merge-predictions` joins them.",
        ),
    ] = None,
    merge: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --part: also join all parts in FILE, if this is the last of them."),
    ] = None,
) -> int:
    """Predict the classes of any images by a trained model, one row an image."""
    from podscale.prediction.predictor import PredictOptions

    options = PredictOptions(
        top=top, batch=batch, limit=limit, processes=processes, convert=convert, calibrate=not plain
    )
    if part is not None:
        if html is not None:
            raise InputError("a part has no page", field="--html", got=str(html), hint="Leave it out.")
        return _predict_part(model, images, options, part, out, merge)
    if merge is not None:
        raise InputError("only parts are joined", field="--merge", got=str(merge), hint="Use --out, or add --part.")
    return _predict_all(model, images, options, out, html)


@app.command("merge-predictions")
def merge_predictions(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of `predict --part`, with all parts.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write to FILE.jsonl, .csv or .parquet.")],
) -> int:
    """Join the parts of a prediction in one file, equal to that of one process. Missing parts are refused."""
    from podscale.prediction import writers
    from podscale.prediction.merge_parts import merge_parts

    writers.check_output(out)
    counts = merge_parts(folder, out)
    print(counts.to_text(), file=sys.stderr)
    return int(ExitCode.FAILED if counts.failures else ExitCode.DONE)


def _predict_all(
    model: str, images: Sequence[str], options: "PredictOptions", out: Path | None, html: Path | None
) -> int:
    """Predict all images, in rows of `out` or of standard output, and in a page of pictures."""
    from podscale.prediction import contact_sheet, writers
    from podscale.prediction.predictor import Predictor
    from podscale.prediction.summary import PredictionSummary

    if out is not None:
        writers.check_output(out)
    if html is not None:
        writers.check_directory(html, "--html")
    predictor = Predictor.open(model, images, options)
    summary = PredictionSummary(predictor, pictures=html is not None)
    _write_rows(predictor, summary, out)
    print(summary.to_text(), file=sys.stderr)
    if html is not None:
        contact_sheet.write_contact_sheet(summary, html)
    return int(ExitCode.FAILED if summary.failures else ExitCode.DONE)


def _predict_part(
    model: str, images: Sequence[str], options: "PredictOptions", text: str, folder: Path | None, merged: Path | None
) -> int:
    """Predict a part into its folder. It is done when all its rows are written, also rows of broken images."""
    from podscale.prediction import parts
    from podscale.prediction.image_inputs import STANDARD_INPUT, standard_input_lines
    from podscale.prediction.merge_parts import merge_parts
    from podscale.prediction.predictor import Predictor
    from podscale.prediction.writers import check_output

    part = parts.parse_part(text)
    if folder is None:
        raise InputError("a part needs a folder", field="--out", hint="Name the folder of all parts.")
    lines = parts.SpooledLines(standard_input_lines()) if STANDARD_INPUT in images else ()
    predictor = Predictor.open(model, images, options, lines)
    open_output_folder(folder)
    if merged is not None:
        check_output(merged, "--merge")  # beside the folder, as a rule, so it was just made
    line = ProgressLine(sys.stderr)
    try:
        manifest, found = parts.predict_part(predictor, part, folder, line)
    finally:
        line.clear()
    rows = f"{format_count(manifest.rows, 'row')} of {format_count(manifest.identity['images'], 'image')}"
    print(f"{part.name}: {rows}{', predicted before' if found else ''}", file=sys.stderr)
    if merged is not None and not parts.missing_parts(folder, part.count):
        print(f"{merged}: {merge_parts(folder, merged).to_text()}", file=sys.stderr)
    return int(ExitCode.DONE)


def _write_rows(predictor: "Predictor", summary: "PredictionSummary", out: Path | None) -> None:
    """Write one row an image, and show the progress unless the rows go to the terminal."""
    from podscale.prediction import writers
    from podscale.prediction.predict import predicted_items

    line = ProgressLine(sys.stderr)
    progress = ignore_progress if out is None and sys.stdout.isatty() else line
    with ExitStack() as stack:
        stack.callback(line.clear)
        writer = (
            writers.JsonLinesWriter(sys.stdout)
            if out is None
            else stack.enter_context(writers.open_writer(out, predictor.top))
        )
        for item, prediction in predicted_items(predictor, progress):
            writer.write(prediction)
            summary.add(item, prediction)


@dataclass(frozen=True)
class PredictionOptions:
    """Options of the job of `--stage predict`."""

    images: Annotated[
        list[str] | None,
        typer.Option("--images", metavar="LOCATION", help="Of --stage predict: a path in the pods or URL; repeatable."),
    ] = None
    parts: Annotated[int | None, typer.Option(help="Of --stage predict: parts, each by a pod of its own.")] = None
    parallel: Annotated[int | None, typer.Option(help="Of --stage predict: pods at the same time; default: all.")] = (
        None
    )
    top: Annotated[int | None, typer.Option(help="Of --stage predict: classes of each image; default: 5.")] = None
    batch: Annotated[int | None, typer.Option(help="Of --stage predict, as the option of `predict`.")] = None
    convert: Annotated[bool, typer.Option("--convert", help="Of --stage predict, as the option of `predict`.")] = False
    plain: Annotated[bool, typer.Option("--plain-softmax", help="Of --stage predict, as the option of `predict`.")] = (
        False
    )

    def job(self, stage: str) -> "PredictionJob | None":
        """Return the prediction of --stage predict; None for other stages, which refuse these options."""
        named: dict[str, Any] = {name: value for name, value in vars(self).items() if _is_given(value)}
        if stage != "predict":
            if named:
                option = "--plain-softmax" if "plain" in named else f"--{next(iter(named))}"
                hint = "Add --stage predict, or leave it out."
                raise InputError("only predictions have this option", field=option, hint=hint)
            return None
        from podscale.kubernetes.predict_job import PredictionJob

        named["calibrate"] = not named.pop("plain", False)
        return PredictionJob(**{"images": (), **named})


def _is_given(value: Any) -> bool:
    """Return True if the user gave the option; 0 is a value, which the job refuses."""
    return value is not None and value is not False and value != []


def render_prediction(config: "RunConfig", job: "PredictionJob", *, from_cluster: bool) -> "list[Manifest]":
    """Return the objects of a prediction's job; with `from_cluster`, check the policy of the namespace."""
    from podscale.kubernetes.predict_job import build_predict_spec
    from podscale.kubernetes.render import render_job

    spec = build_predict_spec(config, job)
    if from_cluster:
        from podscale.kubernetes.client import connect_cluster
        from podscale.kubernetes.namespace import check_specs

        check_specs(connect_cluster(config.launch.cluster), [spec])
    return list(render_job(spec, "job").all_objects)


def submit_prediction(
    config: "RunConfig", job: "PredictionJob", *, wait: bool, dry_run: bool, stop_on_signal: bool
) -> None:
    """Submit or adopt the job of a prediction, and follow it to its end. Raises the error of a job that fails."""
    from podscale.kubernetes import retry
    from podscale.kubernetes.client import connect_cluster
    from podscale.kubernetes.namespace import check_specs
    from podscale.kubernetes.predict_job import build_predict_spec, rows_file
    from podscale.kubernetes.render import render_job
    from podscale.kubernetes.resources import title_of
    from podscale.kubernetes.run_stage import LinePrinter, follow_job, submit_manifests
    from podscale.kubernetes.submit import dry_run_job
    from podscale.kubernetes.submit_checks import check_objects

    printer = LinePrinter(sys.stdout)
    spec = build_predict_spec(config, job)
    api = connect_cluster(config.launch.cluster, policy=retry.UNATTENDED, notify=printer.notify)
    check_specs(api, [spec])
    check_objects(api, config)
    manifests = render_job(spec, "job")
    if dry_run:
        dry_run_job(api, manifests)
        print(f"{title_of(manifests.job)}: accepted by the API server, not created")
        return
    submission = submit_manifests(api, manifests, printer, lambda: check_specs(api, [spec]))
    if not wait:
        return
    result = follow_job(api, submission, "predict", printer, stop_on_signal=stop_on_signal)
    if not result.is_done:
        message = f"predictions of run {config.run.id} failed (exit code {result.exit_code}): {result.error}"
        raise error_from_exit_code(result.exit_code, message)
    print(f"rows of all images: {rows_file(config, job)} in the workspace")
