"""Accuracy on real photographs: the imagenette preset from shards to report.

    python -m benchmarks.imagenette imagenette224.tar

Runs `podscale run imagenette` in a temporary folder (or in --place, where a finished run is reused). Takes about five
minutes on two idle cores. The small form trains a narrow model on generated images for an epoch.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.samples import write_archive
from podscale.config import load
from podscale.evaluation import evaluation_json
from podscale.evaluation.history import read_history
from podscale.runs import RunDirectory, read_outcomes

PACKAGES = ("torch", "torchvision", "numpy")
SMALL = (
    *("train.epochs=1", "train.schedule.warmup_epochs=0", "train.global_batch=16", "model.width=4"),
    *("input.image_size=16", "model.stem=small", "evaluate.batch=16", "launch.processes=1"),
)


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("images", type=Path, nargs="?", help="archive or folder of imagenette")
    parser.add_argument("--place", type=Path, help="run in this folder and keep it")
    options = parser.read()
    if options.images is None and not options.small:
        parser.error("images: missing. Give the archive or folder of imagenette.")
    lines = head("Imagenette", PACKAGES)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.place or Path(scratch)
        images = options.images or write_archive(Path(scratch, "generated.tar"), images=96)
        run(folder, images.resolve(), SMALL if options.small else ())
        write_results(options.results, "imagenette.md", [*lines, *describe(folder / "runs" / "imagenette")])


def run(folder: Path, images: Path, changes: Sequence[str], command: str = "run") -> None:
    """Run the preset, or one of its stages, in a folder, with changes of its document (`name=value`)."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "podscale", command, "imagenette"]
    for change in (f"data.source={images}", *changes):
        words += ["--set", change]
    subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def describe(run: Path) -> list[str]:
    """Return final accuracy, accuracy by epoch, and time by stage of a finished run."""
    history = read_history(run / "metrics.jsonl")
    scores = evaluation_json.read_evaluation(run / "evaluation.json").scores
    config = load(RunDirectory(run).config)
    low, high = scores.top1_interval
    curve = [
        f"| {line['epoch']:.0f} | {line['top1']:.2%} | {line['top5']:.2%} | {line['loss']:.3f} |"
        for line in history.evaluations
    ]
    stages = read_outcomes(run / "outcome.json").items()
    return [
        f"Top-1 {scores.top1:.2%} (95 % interval {low:.2%} to {high:.2%}) on {scores.samples:,} held-out",
        f"photographs, with a ResNet-18 of width {config.model.width} at {config.input.image_size} px on "
        f"{config.launch.processes} processes.",
        "",
        "| epoch | top-1 | top-5 | loss, nats |",
        "|---:|---:|---:|---:|",
        *curve,
        "",
        "| stage | seconds |",
        "|---|---:|",
        *(f"| {name} | {outcome.seconds:.1f} |" for name, outcome in stages),
    ]


if __name__ == "__main__":
    main()
