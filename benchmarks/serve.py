"""`podscale serve`: images/s and latency by batch wait, beside a plain Starlette handler without batches.

    python -m benchmarks.serve imagenet-500.tar

The plain server is the one that one would write: Starlette on uvicorn, PIL, torchvision's transforms and the same model
in a handler, which Starlette runs in its threads. Both servers are one process; clients are threads of another process
that post the next image when they have the answer (a closed loop). The servers take turns in each round; the others are
idle meanwhile. Weights are random: they do not change the time.
"""

import io
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.conditions import head
from benchmarks.harness import ROOT, Options, exit_unavailable, write_results
from benchmarks.measure import median_ratio
from benchmarks.predict import CLASSES, plain_transforms, write_model
from benchmarks.samples import read_archive, write_archive
from podscale.config import RunConfig
from podscale.prediction.model import open_model
from podscale.util.formatting import format_count

PACKAGES = ("torch", "torchvision", "starlette", "uvicorn", "pillow", "simplejpeg", "numpy")
START_SECONDS = 120.0
PLAIN = "plain handler"
Result = dict[str, Any]
"""Output of benchmarks/http_load.py."""


@contextmanager
def running(command: Sequence[str], path: str) -> Iterator[str]:
    """Run a server until the end of the block; yield its address once `path` answers 200."""
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        with Path(log.name).open("wb") as sink:
            process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=sink, stderr=sink)
        try:
            yield _wait_until_ready(process, Path(log.name), path)
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, path: str) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"http://[\d.]+:\d+", log.read_text()):
            try:
                with urllib.request.urlopen(found[0] + path):
                    return found[0]
            except urllib.error.URLError:
                pass
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")


def measure(address: str, images: Sequence[Path], seconds: float, clients: int) -> Result:
    """Return the result of a load on a server."""
    program = str(ROOT / "benchmarks" / "http_load.py")
    command = [sys.executable, program, f"{address}/predict", *map(str, images)]
    command += ["--seconds", str(seconds), "--clients", str(clients)]
    result: Result = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    if set(result["codes"]) != {"200"}:
        raise RuntimeError(f"answers other than 200: {result['codes']}")
    return result


def take_turns(
    addresses: Mapping[str, str], images: Sequence[Path], seconds: float, clients: int, rounds: int
) -> dict[str, list[Result]]:
    """Return the results of each server in each round, after a warm-up; the other servers are idle meanwhile."""
    results: dict[str, list[Result]] = {name: [] for name in addresses}
    for _ in range(rounds):
        for name, address in addresses.items():
            measure(address, images, seconds / 5, clients)
            results[name].append(measure(address, images, seconds, clients))
    return results


def serve_plainly(model: Path) -> None:
    """Run the plain server of this model until it is stopped."""
    import torch
    import uvicorn
    from PIL import Image
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from podscale.pytorch.models import build_model

    opened = open_model(model)
    config, classes = opened.config, opened.classes
    network = build_model(config.model, len(classes)).eval()
    transforms = plain_transforms(config)

    def classify(body: bytes) -> JSONResponse:
        with torch.inference_mode():
            pixels = transforms(Image.open(io.BytesIO(body)).convert("RGB"))
            probabilities, indices = network(pixels[None]).softmax(1).topk(5)
        names = [classes[index] for index in indices[0].tolist()]
        return JSONResponse({"classes": names, "probabilities": probabilities[0].tolist()})

    async def predict(request: Request) -> JSONResponse:
        return await run_in_threadpool(classify, await request.body())

    async def ready(request: Request) -> JSONResponse:
        return JSONResponse({})

    app = Starlette(routes=[Route("/predict", predict, methods=["POST"]), Route("/healthz", ready)])
    uvicorn.run(app, host="127.0.0.1", port=0, access_log=False)


def servers(model: Path, waits: Sequence[float], batch: int) -> dict[str, list[str]]:
    """Return the command of each server by its name in the table."""
    ours = ["-m", "podscale", "serve", str(model), "--port", "0", "--max-batch"]
    commands = {PLAIN: ["-m", "benchmarks.serve", "--plain", str(model)], "batches of 1": [*ours, "1"]}
    for wait in waits:
        commands[f"batches of {batch}, wait {wait:g} ms"] = [*ours, str(batch), "--max-wait-ms", str(wait)]
    return commands


def table(results: Mapping[str, Sequence[Result]]) -> list[str]:
    """Return the medians over the rounds, and the ratio of the rates to the plain handler's in the same round."""
    lines = ["| server | images/s | ratio | p50, ms | p99, ms |", "|---|---:|---:|---:|---:|"]
    plain = [one["rate"] for one in results[PLAIN]]
    for name, rounds in results.items():
        rates, (p50, p99) = [one["rate"] for one in rounds], (_median(rounds, "p50_ms"), _median(rounds, "p99_ms"))
        lines.append(f"| {name} | {median(rates):.1f} | {median_ratio(rates, plain):.2f} | {p50:.0f} | {p99:.0f} |")
    return [*lines, ""]


def _median(rounds: Sequence[Result], name: str) -> float:
    return float(median(one[name] for one in rounds))


def write_images(archive: Path, folder: Path, count: int) -> list[Path]:
    """Extract the first images of a tar."""
    paths = []
    for number, content in enumerate(read_archive(archive, count)):
        paths.append(folder / f"{number}.jpg")
        paths[-1].write_bytes(content)
    return paths


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("archive", nargs="?", metavar="TAR", help="tar of photographs")
    parser.add_argument("--plain", type=Path, metavar="MODEL", help="run the plain server of this model")
    parser.add_size("--seconds", full=15.0, small=0.5, type=float, help="time of one measurement")
    parser.add_size("--rounds", full=3, small=1, type=int)
    parser.add_size("--clients", full=[1, 16], small=[2], type=int, nargs="+")
    parser.add_size("--waits", full=[0.0, 2.0, 10.0], small=[1.0], type=float, nargs="+", help="batch waits, ms")
    parser.add_size("--batch", full=16, small=4, type=int, help="largest batch")
    parser.add_size("--size", full=224, small=32, type=int, help="side of the model's images")
    parser.add_size("--images", full=100, small=8, type=int, help="different images")
    options = parser.read()
    if options.plain is not None:
        serve_plainly(options.plain)
        return
    if options.archive is None and not options.small:
        parser.error("TAR: missing. Give a tar of photographs.")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        exit_unavailable(f"{error.name} is not installed")
    lines = head("A prediction server: images/s and latency", PACKAGES)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        archive = Path(options.archive or write_archive(folder / "samples.tar", images=12))
        images = write_images(archive, folder, options.images)
        config = RunConfig.model_validate({"model": {"name": "resnet18"}, "input": {"image_size": options.size}})
        commands = servers(write_model(folder / "model", config), options.waits, options.batch)
        with ExitStack() as stack:
            addresses = {name: stack.enter_context(running(command, "/healthz")) for name, command in commands.items()}
            measured = {
                clients: take_turns(addresses, images, options.seconds, clients, options.rounds)
                for clients in options.clients
            }
        for clients, results in measured.items():
            title = f"{format_count(clients, 'client')}, ResNet-18 at {options.size} px, {CLASSES} classes"
            lines += [f"{title}, {format_count(options.rounds, 'round')} of {options.seconds:g} s:", ""]
            lines += table(results)
    lines += ["Medians over the rounds. The ratio is that of the rates to the plain handler's in the same round."]
    write_results(options.results, "serve.md", lines)


if __name__ == "__main__":
    main()
