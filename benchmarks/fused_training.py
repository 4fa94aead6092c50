"""Losses of a ResNet's first steps on Imagenette, with the fused kernels in Triton's interpreter and without them.

    OMP_NUM_THREADS=1 python -m benchmarks.fused_training imagenette224.tar [--steps 100] [--jobs 2]

Shows on a CPU that a training follows the same course with the kernels of `train.fused_kernels: gemm`. It says nothing
about their speed: the interpreter runs a kernel's program for one tile after the other. In full it takes about twenty
CPU minutes.
"""

import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from subprocess import PIPE, run
from typing import NamedTuple

import numpy as np

from benchmarks.conditions import head
from benchmarks.harness import ROOT, Options, exit_unavailable, write_results
from benchmarks.samples import write_archive
from podscale.config import RunConfig, load
from podscale.data.loaders.build_loader import build_loader
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet
from podscale.report.charts.lines import LineSeries, XAxis, YAxis
from podscale.report.charts.standalone import line_chart_svg
from podscale.stages import local
from podscale.training.schedules import image_phases

PACKAGES = ("torch", "triton", "numpy")
DOCUMENT = ROOT / "pipelines" / "studies" / "base" / "imagenette32.yaml"
SETTINGS = ("model.name=resnet50", "model.width=16", "train.global_batch=16", "input.decoded_cache_bytes=0")
SMALL = ("model.width=4", "input.image_size=16", "train.global_batch=4", "model.stem=small")
BLOCKS = (1, 2, 2, 1)
"""Blocks of the stages, of the 16 that ResNet-50 has: with strides, projections and plain shortcuts."""
DISTURBANCE = 1e-7
"""Change of a pixel over its value, as its standard deviation: about the rounding of fp32."""
LEARNING_RATE = 0.005
"""Low enough for a smooth course: at 0.05 all trainings part by whole nats, whatever their first difference."""
WINDOW = 20
"""Last steps, whose mean loss the table has; also the steps of a point in the picture."""


class Variant(NamedTuple):
    """Precision of the operations, whether the kernels run, and whether the images are disturbed."""

    dtype: str
    kernels: bool = False
    disturbed: bool = False

    @property
    def title(self) -> str:
        change = ", disturbed images" if self.disturbed else ""
        return f"{self.dtype}, {'kernels' if self.kernels else 'separate operations'}{change}"


FP32, FP32_KERNELS, DISTURBED = Variant("fp32"), Variant("fp32", kernels=True), Variant("fp32", disturbed=True)
BF16, BF16_KERNELS = Variant("bf16"), Variant("bf16", kernels=True)
VARIANTS = (FP32, FP32_KERNELS, DISTURBED, BF16, BF16_KERNELS)
COMPARED = ((FP32_KERNELS, FP32), (DISTURBED, FP32), (BF16_KERNELS, BF16), (BF16, FP32))
READING = (
    "Every training begins with the same weights and sees the same images in the same order: those of Podscale's own",
    "loader, with random crops. If the kernels are right, losses differ by rounding, which grows from step to step. In",
    "fp32 kernels part from separate operations like two trainings whose images differ by rounding (the control:",
    f"values changed by {DISTURBANCE:g} of themselves). In bf16 they part like separate operations in bf16 and fp32.",
    "",
)


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("images", type=Path, nargs="?", help="archive or folder of imagenette")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_size("--steps", full=100, small=2, type=int, help="steps of a training")
    options = parser.read()
    if options.images is None and not options.small:
        parser.error("images: missing. Give the archive or folder of imagenette.")
    if importlib.util.find_spec("triton") is None:
        exit_unavailable("Triton is not installed")
    page = head("First steps of a training with the fused kernels, in an interpreter", PACKAGES)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        images = options.images or write_archive(Path(scratch, "generated.tar"), images=64)
        changes = (f"data.source={images.resolve()}", *SETTINGS, *(SMALL if options.small else ()))
        config = load(DOCUMENT, (*changes, f"run.workspace={scratch}"))
        training = write_training(config, options.steps, Path(scratch, "training.npz"))
        losses = dict(zip(VARIANTS, pool.map(partial(train, training), VARIANTS), strict=True))
    write_page(options.results, [*page, *READING], config, losses)


def write_training(config: RunConfig, steps: int, file: Path) -> Path:
    """Write the network and the first batches of a run, for `tests.support.gemm_training`."""
    sharded = local.shard(config.data, config.run.workspace)
    assert sharded is not None, "a call without `part` packs the whole shard set"
    shard_set = ShardSet.open(sharded.location)
    split = shard_set.split("train")
    order, phases = build_sampler(config, split), image_phases(config, len(split))
    loader = build_loader(config, split, order, phases=phases, ranks=range(1), world_size=1, device="cpu")
    batches = list(loader.batches(0, steps))
    loader.close()
    pixels = np.stack([batch.images for batch in batches]).astype(np.float32)
    np.savez(
        file,
        images=(pixels / 255 - np.array(config.input.mean, np.float32)) / np.array(config.input.std, np.float32),
        labels=np.stack([batch.labels for batch in batches]),
        model=config.model.model_dump_json(),
        classes=len(shard_set.classes),
        learning_rate=LEARNING_RATE,
        blocks=BLOCKS,
        disturbance=DISTURBANCE,
    )
    return file


def train(training: Path, variant: Variant) -> list[float]:
    """Return the losses of a variant from another process: Triton reads its environment when it is imported."""
    command = [sys.executable, "-m", "tests.support.gemm_training", str(training), variant.dtype]
    command += ["--kernels"] * variant.kernels + ["--disturbed"] * variant.disturbed
    done = run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, stdout=PIPE, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def write_page(folder: Path, page: list[str], config: RunConfig, losses: Mapping[Variant, list[float]]) -> None:
    """Write the table of losses and differences, and the picture."""
    steps = len(next(iter(losses.values())))
    shown = sorted({step for step in (1, 2, 5, 10, 20, 50, 100) if step <= steps} | {steps})
    page = [
        *page,
        f"{config.model.name} with {', '.join(map(str, BLOCKS))} blocks, width "
        f"{config.model.width}, {config.input.image_size} px, {config.train.global_batch} images a step, SGD at a rate "
        f"of {LEARNING_RATE:g} with momentum 0.9.",
        "",
        f"| loss at step | {' | '.join(map(str, shown))} | mean of the last {WINDOW} |",
        f"|---|{'---:|' * len(shown)}---:|",
    ]
    for variant, values in losses.items():
        cells = [f"{values[step - 1]:.4f}" for step in shown]
        page.append(f"| {variant.title} | {' | '.join(cells)} | {statistics.fmean(values[-WINDOW:]):.3f} |")
    page += ["", f"| largest difference up to step | {' | '.join(map(str, shown))} |", f"|---|{'---:|' * len(shown)}"]
    for one, other in COMPARED:
        differences = [abs(a - b) for a, b in zip(losses[one], losses[other], strict=True)]
        cells = [f"{max(differences[:step]):.1e}" for step in shown]
        page.append(f"| {one.title}; {other.title} | {' | '.join(cells)} |")
    picture = "fused-training.svg"
    write_results(
        folder, "fused-training.md", [*page, "", f"![Loss by step, running mean]({picture})"], {picture: draw(losses)}
    )


def draw(losses: Mapping[Variant, list[float]]) -> str:
    """Draw the running mean of the losses as an SVG file; separate operations are dashed."""
    lines = []
    for variant, values in losses.items():
        colour = 3 if variant.disturbed else 1 if variant.dtype == "fp32" else 2
        starts = range(max(1, len(values) - WINDOW + 1))
        points = [(start + 1.0, statistics.fmean(values[start : start + WINDOW])) for start in starts]
        lines.append(LineSeries(variant.title, points, colour, dashed=not variant.kernels))
    return line_chart_svg(f"Mean loss of {WINDOW} steps", lines, x=XAxis("first step"), y=YAxis("loss"))


if __name__ == "__main__":
    main()
