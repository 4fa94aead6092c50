"""Learning on real photographs: the imagenette preset from shards to report, and the curve it took.

    python benchmarks/imagenette.py imagenette224.tar

Runs `podscale run imagenette` in a temporary folder (or in --place, where a finished run is taken as it is) and writes
results/imagenette.md. About five minutes on two idle cores.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from conditions import RESULTS, head, publish

from podscale.evaluation import evaluation_json
from podscale.evaluation.history import read_history
from podscale.runs import read_outcomes

PACKAGES = ("torch", "torchvision", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="archive or folder of imagenette")
    parser.add_argument("--place", type=Path, help="run in this folder and keep it")
    arguments = parser.parse_args()
    lines = head("Imagenette", PACKAGES)
    with tempfile.TemporaryDirectory() as scratch:
        place = arguments.place or Path(scratch)
        command = [
            sys.executable,
            "-m",
            "podscale",
            "run",
            "imagenette",
            "--set",
            f"data.source={arguments.images.resolve()}",
        ]
        subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
        publish(RESULTS / "imagenette.md", [*lines, *describe(place / "runs" / "imagenette")])


def describe(run: Path) -> list[str]:
    """The curve, the final figures and the stages of a finished run, as Markdown."""
    history, found = read_history(run / "metrics.jsonl"), evaluation_json.read_evaluation(run / "evaluation.json")
    figures = found.figures
    low, high = figures.top1_interval
    curve = [
        f"| {line['epoch']:.0f} | {line['top1']:.2%} | {line['top5']:.2%} | {line['loss']:.3f} |"
        for line in history.evaluations
    ]
    stages = read_outcomes(run / "outcome.json").items()
    return [
        f"Top-1 {figures.top1:.2%} (95 % interval {low:.2%} to {high:.2%}) on {figures.samples:,} held-out",
        "photographs, the preset as it is: a ResNet-18 of width 32 at 64 px on two processes.",
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
