"""Command `serve`: classes of images over HTTP by a trained model."""

from importlib.util import find_spec
from typing import Annotated

import typer

from podscale.cli.options import Convert, PlainSoftmax
from podscale.errors import InputError

app = typer.Typer()


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Directory or fsspec URL of a run or of a model, or of an exported file."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 in a pod.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port; 0: any free one, which is printed.")] = 8080,
    metrics_port: Annotated[
        int | None, typer.Option(help="Second port with the same routes, for Prometheus and probes.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Processes that share the port, each with the model.")] = 1,
    max_batch: Annotated[int | None, typer.Option(help="Images of a batch; default: 16 on a CPU, 64 on a GPU.")] = None,
    max_wait_ms: Annotated[float, typer.Option(help="Time for which a batch waits for more images.")] = 2.0,
    queue: Annotated[int, typer.Option(help="Images that may wait in one process; more get 503.")] = 256,
    top: Annotated[int, typer.Option(help="Classes of each image, unless a request has ?top=.")] = 5,
    convert: Convert = False,
    plain: PlainSoftmax = False,
    max_request_mib: Annotated[int, typer.Option(help="Largest body of a request, MiB.")] = 64,
    request_seconds: Annotated[
        float, typer.Option(help="Time for the headers of a request to arrive, and for its body, seconds.")
    ] = 20.0,
    max_connections: Annotated[
        int, typer.Option(help="Open connections of a process; for another, the oldest idle one is closed.")
    ] = 512,
    drain_seconds: Annotated[
        float, typer.Option(help="Time after SIGTERM in which requests are still accepted, seconds.")
    ] = 0.0,
    grace_seconds: Annotated[float, typer.Option(help="Time after that for accepted requests, seconds.")] = 30.0,
) -> int:
    """Serve the predictions of a trained model over HTTP until SIGTERM: POST an image to /predict."""
    missing = [name for name in ("starlette", "uvicorn", "python_multipart") if find_spec(name) is None]
    if missing:
        hint = "Run `pip install 'podscale[serve]'`"
        raise InputError(f"needs {', '.join(missing)}, not installed here", field="serve", hint=hint)
    from podscale.prediction.model import open_model_at
    from podscale.serving.options import ServeOptions
    from podscale.serving.serve import serve as serve_until_stopped

    options = ServeOptions(
        host=host,
        port=port,
        metrics_port=metrics_port,
        processes=processes,
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        queue=queue,
        top=top,
        convert=convert,
        max_request_mib=max_request_mib,
        request_seconds=request_seconds,
        max_connections=max_connections,
        drain_seconds=drain_seconds,
        grace_seconds=grace_seconds,
    )
    with open_model_at(model, calibrate=not plain) as opened:
        return serve_until_stopped(opened, options)
