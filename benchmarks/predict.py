"""`podscale predict`: images per CPU-second beside plain loops, and memory over the rows of a large tar.

    python -m benchmarks.predict imagenet-500.tar

A plain loop decodes with PIL, applies torchvision's transforms, and runs the same ResNet-18 in the same batches, in
PyTorch or as the same ONNX file in onnxruntime. Both are measured in turn in each round, with one thread for an
operation of the model. CPU time is user + system of all threads of the process (getrusage). Weights are random: they do
not change the time.
"""

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
from PIL import Image
from torchvision.transforms import v2

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.measure import cpu_seconds, median_ratio, rate, resident_bytes
from benchmarks.samples import read_archive, write_archive
from podscale.config import RunConfig
from podscale.export.export_model import export_model
from podscale.export.export_options import ExportOptions
from podscale.prediction.image_inputs import ImageItem
from podscale.prediction.model import build_classifier
from podscale.prediction.predict import predicted_items
from podscale.prediction.predictor import PredictOptions, Predictor
from podscale.prediction.summary import PredictionSummary
from podscale.prediction.writers import JsonLinesWriter
from podscale.pytorch.models import build_model
from podscale.pytorch.models.state import model_arrays
from podscale.pytorch.train_state import as_array
from podscale.training import model_weights
from podscale.training.model_weights import TrainedModel
from podscale.training.run_progress import RunProgress

Pipeline = Callable[[], int]
"""Processes all images of a measurement and returns their number."""
Infer = Callable[[torch.Tensor], torch.Tensor]
"""Function from normalised images, fp32 [n, 3, size, size], to logits, fp32 [n, classes]."""
PACKAGES = ("torch", "torchvision", "onnxruntime", "pillow", "simplejpeg", "numpy")
BATCH = 32
CLASSES = 1000
SMALL_MODEL = {"input": {"image_size": 16}, "model": {"name": "resnet18", "stem": "small", "width": 4}}
"""Run document of the model for the measurement of memory."""
CHECKS = 10
"""Times at which memory is read."""


def write_model(folder: Path, config: RunConfig) -> Path:
    """Write the directory of a model of random weights."""
    torch.manual_seed(0)
    model = build_model(config.model, CLASSES)
    arrays = {name: as_array(tensor) for name, tensor in model_arrays(model).items()}
    names = [f"class {number}" for number in range(CLASSES)]
    model_weights.export_model(arrays, TrainedModel(config, names, RunProgress(step=1)), folder)
    return folder


def plain_transforms(config: RunConfig) -> v2.Compose:
    """Return torchvision's transforms for the images of an evaluation."""
    size, mean, std = config.eval_image_size, list(config.input.mean), list(config.input.std)
    short = round(size / config.evaluate.crop_fraction)
    to_float = v2.ToDtype(torch.float32, scale=True)
    return v2.Compose([v2.Resize(short), v2.CenterCrop(size), v2.ToImage(), to_float, v2.Normalize(mean, std)])


class PlainLoop:
    """The loop that one writes without Podscale: PIL, torchvision's transforms, the model, softmax, top 5."""

    def __init__(self, config: RunConfig, infer: Infer, archive: Path, images: int) -> None:
        self._infer = infer
        self._transforms = plain_transforms(config)
        self._archive, self._images = archive, images

    def read(self) -> int:
        return sum(len(batch) for batch in self._batches())

    def predict(self) -> int:
        count = 0
        with torch.inference_mode():
            for batch in self._batches():
                self._infer(batch).softmax(1).topk(5)
                count += len(batch)
        return count

    def _batches(self) -> Iterator[torch.Tensor]:
        contents = read_archive(self._archive, self._images)
        tensors = (self._transforms(Image.open(io.BytesIO(content)).convert("RGB")) for content in contents)
        while batch := list(islice(tensors, BATCH)):
            yield torch.stack(batch)


def onnx_session(path: Path) -> Infer:
    """Return the function of an ONNX file in onnxruntime, with one thread for an operation."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def infer(images: torch.Tensor) -> torch.Tensor:
        logits: npt.NDArray[np.float32] = session.run(None, {name: images.numpy()})[0]
        return torch.from_numpy(logits)

    return infer


class PodscalePredict:
    """`podscale predict` in this process."""

    def __init__(self, model: Path, archive: Path, images: int) -> None:
        self._predictor = Predictor.open(model, [str(archive)], PredictOptions(batch=BATCH, limit=images))
        self._classifier = build_classifier(self._predictor.model, threads=1)

    def read(self) -> int:
        with closing(self._predictor.open_decoder()) as decoder:
            return sum(len(chunk.items) for chunk in decoder.decode(self._chunks()))

    def predict(self) -> int:
        return sum(len(rows) for rows in self._predictor.predict_chunks(self._classifier, self._chunks()))

    def _chunks(self) -> Iterator[list[ImageItem]]:
        items = self._predictor.items()
        return iter(lambda: list(islice(items, BATCH)), [])


def compare(pipelines: dict[str, Pipeline], rounds: int) -> dict[str, list[float]]:
    """Return images per CPU-second of each pipeline in each round, after a warm-up round; they take turns."""
    rates: dict[str, list[float]] = {name: [] for name in pipelines}
    for number in range(rounds + 1):
        for name, pipeline in pipelines.items():
            started = cpu_seconds()
            count = pipeline()
            if number:
                rates[name].append(rate(count, cpu_seconds() - started))
    return rates


def throughput_table(archive: Path, folder: Path, images: int, rounds: int, size: int) -> list[str]:
    """Return the table of `podscale predict` and plain loops: without a model, in PyTorch, and in onnxruntime."""
    config = RunConfig.model_validate({"model": {"name": "resnet18"}, "input": {"image_size": size}})
    model = write_model(folder / "model", config)
    file = export_model(model, ExportOptions(format="onnx", images=[str(archive)], limit=BATCH)).path
    plain = PlainLoop(config, build_model(config.model, CLASSES).eval(), archive, images)
    plain_onnx = PlainLoop(config, onnx_session(file), archive, images)
    ours, ours_onnx = (PodscalePredict(path, archive, images) for path in (model, file))
    lines = [f"{images} images, {size} px, batches of {BATCH}, {rounds} rounds:", ""]
    lines += ["| work | podscale predict | plain loop | median of the ratios |", "|---|---:|---:|---:|"]
    for work, pipelines in {
        "read, decode, resize, crop": {"ours": ours.read, "plain": plain.read},
        "the same and ResNet-18 in PyTorch": {"ours": ours.predict, "plain": plain.predict},
        "the same and ResNet-18 in onnxruntime": {"ours": ours_onnx.predict, "plain": plain_onnx.predict},
    }.items():
        rates = compare(pipelines, rounds)
        ratio = median_ratio(rates["ours"], rates["plain"])
        lines.append(f"| {work} | {median(rates['ours']):.1f} | {median(rates['plain']):.1f} | {ratio:.2f} |")
    return [*lines, "", "Figures are images per CPU-second, medians over the rounds.", ""]


def memory_table(folder: Path, rows: int) -> list[str]:
    """Return the table of a prediction's resident memory, over the rows of a tar of small images."""
    archive = write_archive(folder / "many.tar", images=rows, side=24)
    config = RunConfig.model_validate(SMALL_MODEL)
    predictor = Predictor.open(write_model(folder / "small-model", config), [str(archive)], PredictOptions())
    summary, step = PredictionSummary(predictor, pictures=True), max(1, rows // CHECKS)
    memory: list[int] = []
    with Path(os.devnull).open("w") as sink:
        writer = JsonLinesWriter(sink)
        for item, prediction in predicted_items(predictor):
            writer.write(prediction)
            summary.add(item, prediction)
            if summary.images % step == 0:
                memory.append(resident_bytes())
    lines = [f"A tar of {rows:,} JPEGs of 32x24 pixels, {archive.stat().st_size / 1e6:.0f} MB, and a small model:", ""]
    lines += ["| rows written | resident memory, MB |", "|---:|---:|"]
    lines += [f"| {step * number:,} | {used / 1e6:.1f} |" for number, used in enumerate(memory, start=1)]
    growth = (memory[-1] - memory[0]) / max(1, rows - step)
    return [*lines, "", f"Growth after the first {step:,} rows: {growth:.1f} bytes a row.", ""]


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("archive", nargs="?", metavar="TAR", help="tar of photographs")
    parser.add_size("--images", full=256, small=8, type=int, help="images of a measurement")
    parser.add_size("--rounds", full=5, small=1, type=int)
    parser.add_size("--size", full=224, small=32, type=int, help="side of the model's images")
    parser.add_size("--rows", full=1_000_000, small=200, type=int, help="rows of the measurement of memory")
    options = parser.read()
    if options.archive is None and not options.small:
        parser.error("TAR: missing. Give a tar of photographs.")
    torch.set_num_threads(1)
    lines = head("Predictions: images per CPU-second, and memory", PACKAGES)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        archive = Path(options.archive or write_archive(folder / "samples.tar", images=12))
        lines += memory_table(folder, options.rows)  # first: later, growth could fill memory that was freed before
        lines += throughput_table(archive, folder, options.images, options.rounds, options.size)
    write_results(options.results, "predict.md", lines)


if __name__ == "__main__":
    main()
