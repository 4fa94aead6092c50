"""Command `predict`: classes of any images by a trained model."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.errors import ExitCode
from podscale.util.progress_reports import ProgressReporter, ignore_progress
from podscale.util.terminal import ProgressLine

if TYPE_CHECKING:
    from podscale.prediction.predictor import Predictor
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
        typer.Option(metavar="FILE", help="Write to FILE.jsonl, .csv or .parquet instead of standard output."),
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
    convert: Annotated[
        bool, typer.Option("--convert", help="Convert images of other formats and depths, as data.policy=convert.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain-softmax", help="Leave the probabilities uncalibrated (temperature 1).")
    ] = False,
) -> int:
    """Predict the classes of any images by a trained model, one row an image."""
    from podscale.prediction import contact_sheet, writers
    from podscale.prediction.predictor import PredictOptions, Predictor
    from podscale.prediction.summary import PredictionSummary

    if out is not None:
        writers.check_output(out)
    if html is not None:
        writers.check_directory(html, "--html")
    options = PredictOptions(
        top=top, batch=batch, limit=limit, processes=processes, convert=convert, calibrate=not plain
    )
    predictor = Predictor.open(model, images, options)
    summary = PredictionSummary(predictor, pictures=html is not None)
    _write_rows(predictor, summary, out)
    print(summary.to_text(), file=sys.stderr)
    if html is not None:
        contact_sheet.write_contact_sheet(summary, html)
    return int(ExitCode.FAILED if summary.failures else ExitCode.DONE)


def _write_rows(predictor: "Predictor", summary: "PredictionSummary", out: Path | None) -> None:
    """Write one row an image, and show the progress unless the rows go to the terminal."""
    from podscale.prediction import writers
    from podscale.prediction.predict import predicted_items

    line = ProgressLine(sys.stderr)
    progress = ProgressReporter(
        "predict", ignore_progress if out is None and sys.stdout.isatty() else line, predictor.count
    )
    with ExitStack() as stack:
        stack.callback(line.clear)
        writer = (
            writers.JsonLinesWriter(sys.stdout)
            if out is None
            else stack.enter_context(writers.open_writer(out, predictor.top))
        )
        for item, prediction in predicted_items(predictor):
            writer.write(prediction)
            summary.add(item, prediction)
            progress.add(1, rejects=int(prediction.failure is not None))
        progress.close()
