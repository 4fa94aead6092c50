"""Command `export`: the trained model as one file in a common format."""

from pathlib import Path
from typing import Annotated

import typer

from podscale.cli.options import PlainSoftmax

app = typer.Typer()


@app.command()
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory of a run, or of a model.")],
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="onnx|torch-export|torchscript|safetensors|html",
            help="Format of the file; html: a page that classifies pictures in the browser.",
        ),
    ] = "onnx",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write; default: export/model.* in the run or model directory."),
    ] = None,
    repository: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write FOLDER/RUN/1/model.onnx, as Triton and KServe read it."),
    ] = None,
    preprocessing: Annotated[
        bool,
        typer.Option(
            "--preprocessing",
            help="Take uint8 pixels [n, size, size, 3] and give probabilities; else normalised float32 and logits.",
        ),
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="ONNX and HTML: quantise to int8, and measure the loss.")
    ] = False,
    images: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="Images of the check and of the calibration; may be repeated. Default: the run's shard set if it is "
            "on this machine, else the embedded digits.",
        ),
    ] = [],
    limit: Annotated[int, typer.Option(help="Most images of the check.", min=1)] = 1000,
    calibration: Annotated[int, typer.Option(help="Most images of int8's calibration.", min=1)] = 64,
    plain: PlainSoftmax = False,
) -> None:
    """Export a trained model to one file, checked against PyTorch before it takes its name."""
    from podscale.export.export_model import export_model
    from podscale.export.export_options import ExportOptions

    options = ExportOptions(
        format=format_name,
        out=out,
        repository=repository,
        preprocessing=preprocessing,
        int8=int8,
        images=images,
        limit=limit,
        calibration=calibration,
        calibrate=not plain,
    )
    print(export_model(model, options).to_text())
