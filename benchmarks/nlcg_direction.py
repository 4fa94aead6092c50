"""Measurement of what the direction of NLCG does at a large batch, beside momentum SGD and LARS.

    python -m benchmarks.nlcg_direction imagenette224.tar

Trains the document of the study nlcg-large-batch (batch 4,096, 200 epochs) once for each optimizer of `RUNS`, about
four CPU minutes each. A recorder around the optimizer, selected as `train.optimizer.name: python:...`, measures each
step: p is the displacement of the weights, g the gradient of the loss before it, g' the one after it, on the next
batch.

- Slope left, <g', p> / <g, p>: 0 after an exact line search, which conjugacy assumes; near 1 the step was short, below
  0 it went past the minimum along p, and below -1 the loss rose if it is quadratic.
- Angle to steepest descent, cos(p, -g).
- beta before it is clipped to 0 to 1, and the base rate, which the step heuristic shrinks when the loss rises.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.conditions import head
from benchmarks.harness import ROOT, Options, write_results
from benchmarks.samples import write_archive
from podscale.config.optimizer import OptimizerSection
from podscale.evaluation import evaluation_json
from podscale.pytorch.optim import HyperParams, ParamShard, build_optimizer
from podscale.report.charts.lines import LineSeries, XAxis, YAxis
from podscale.report.charts.standalone import line_chart_svg
from podscale.training.nlcg_rates import EPS

PACKAGES = ("torch", "numpy")
DOCUMENT = ROOT / "pipelines" / "studies" / "base" / "imagenette32.yaml"
COMMON = ("train.epochs=200", "train.global_batch=4096", "evaluate.every_epochs=200", "run.seed=1")
SMALL = (
    *("train.epochs=3", "train.schedule.warmup_epochs=1", "train.global_batch=16", "model.width=4"),
    *("input.image_size=16", "model.stem=small", "evaluate.batch=16"),
)
RUNS: Mapping[str, tuple[float, dict[str, Any]]] = {
    "NLCG": (1.6, {"name": "nlcg", "nlcg": {"beta": "polak_ribiere", "step": "none"}}),
    "NLCG, Fletcher-Reeves": (1.6, {"name": "nlcg", "nlcg": {"beta": "fletcher_reeves", "step": "none"}}),
    "NLCG, step heuristic": (1.6, {"name": "nlcg", "nlcg": {"beta": "polak_ribiere", "step": "step"}}),
    "NLCG, no preconditioner": (
        1.6,
        {"name": "nlcg", "nlcg": {"beta": "polak_ribiere", "step": "none", "forget_every": 1}},
    ),
    "SGD": (3.2, {"name": "sgd", "momentum": 0.9}),
    "LARS": (8.0, {"name": "lars", "momentum": 0.9, "trust_coefficient": 0.004}),
}
"""Learning rate and optimizer of each training."""
SMOOTHED_STEPS = 15
"""Steps of the running median in the pictures."""


class RecordedOptimizer:
    """Optimizer that writes a line of JSON for each step that was applied.

    Args:
        optimizer: `train.optimizer` of the optimizer inside.
        path: file of the lines.
    """

    def __init__(self, shard: ParamShard, optimizer: dict[str, Any], path: str) -> None:
        self._shard, self._path = shard, Path(path)
        self._inner = build_optimizer(OptimizerSection(**optimizer), shard, 1.0)
        self.moments, self.scalars = self._inner.moments, self._inner.scalars
        self._last: tuple[Tensor, float] | None = None

    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        weights, gradient = self._shard.weights.clone(), self._shard.gradients.double()
        before = {name: scalar.item() for name, scalar in self.scalars.items()}
        descent = self.moments["descent"].double() if "descent" in self.moments else None
        applied = self._inner.step(hyper, finite)
        if not applied:
            return applied
        moved = self._shard.weights.double() - weights
        slope = float(gradient @ moved)
        row = {
            "loss": hyper.loss.item(),
            "length": float(moved.norm()) / float(weights.norm()),
            "angle": -slope / (float(gradient.norm()) * float(moved.norm()) + EPS),
            "slope_left": None if self._last is None else float(gradient @ self._last[0]) / self._last[1],
        }
        if "rho" in self.scalars:
            kept = 0.0 if descent is None else -float(self.moments["gradient"].double() @ descent)
            row["beta"] = (self.scalars["rho"].item() - kept) / (before["rho"] + EPS) if before["updates"] else None
            row["base_rate"] = self.scalars["base_rate"].item()
            row["curvature"] = float(self.moments["curvature"].max())
        self._last = (moved, slope) if slope else None  # a warm-up may begin at rate 0
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
        return applied


Rows = list[dict[str, float | None]]


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("images", type=Path, nargs="?", help="archive or folder of imagenette")
    parser.add_argument("--place", type=Path, help="run in this folder, where finished trainings are reused")
    parser.add_size("--only", full=list(RUNS), small=["NLCG", "SGD"], nargs="+", choices=list(RUNS), help="trainings")
    options = parser.read()
    if options.images is None and not options.small:
        parser.error("images: missing. Give the archive or folder of imagenette.")
    lines = head("What the direction of NLCG does", PACKAGES)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.place or Path(scratch)).resolve()
        images = options.images or write_archive(Path(scratch, "generated.tar"), images=96)
        changes = (f"data.source={images.resolve()}", *COMMON, *(SMALL if options.small else ()))
        trained = {name: train(folder / str(number), changes, *RUNS[name]) for number, name in enumerate(options.only)}
    series = {name: rows for name, (rows, _) in trained.items()}
    pictures = {
        f"nlcg-direction-{column.replace('_', '-')}.svg": picture(title, series, column, label)
        for column, title, label in (
            ("slope_left", "Slope along the step that is left after it", "<g', p> / <g, p>"),
            ("angle", "Angle between the step and steepest descent", "cos(p, -g)"),
            ("beta", "beta before it is clipped", "beta"),
        )
        if any(row.get(column) is not None for rows in series.values() for row in rows)
    }
    table = [describe(name, rows, top1) for name, (rows, top1) in trained.items()]
    links = [f"![{name.removesuffix('.svg')}]({name})" for name in pictures]
    write_results(options.results, "nlcg-direction.md", [*lines, *EXPLANATION, *HEADER, *table, "", *links], pictures)


def train(folder: Path, changes: Sequence[str], rate: float, optimizer: dict[str, Any]) -> tuple[Rows, float]:
    """Train in a folder, unless that is done. Returns the recorded steps and the final top-1."""
    record, run = folder / "steps.jsonl", folder / "runs" / "direction"
    if not (run / "evaluation.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        momentum = optimizer.get("momentum", 0.9)
        settings = [
            *("run.id=direction", f"run.workspace={folder}", f"train.schedule.learning_rate={rate}"),
            f"train.optimizer.name=python:{__spec__.name}:{RecordedOptimizer.__name__}",
            f"train.optimizer.momentum={momentum}",
            f"train.optimizer.options={json.dumps({'optimizer': optimizer, 'path': str(record)})}",
        ]
        words = [sys.executable, "-m", "podscale", "run", str(DOCUMENT)]
        words += [word for setting in (*changes, *settings) for word in ("--set", setting)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    return rows, evaluation_json.read_evaluation(run / "evaluation.json").scores.top1


EXPLANATION = (
    "Medians over the steps after the first tenth. p is the displacement of the weights in a step, g the gradient of",
    "the loss before it and g' after it. `slope left` is <g', p> / <g, p>: 0 after an exact line search, 1 after a",
    "step that changed nothing. `past the minimum` is the share of steps with a slope left below 0.",
    "",
)
HEADER = (
    "| optimizer | top-1 | loss at the end | step / weights | cos(p, -g) | slope left | past the minimum | beta | "
    "clipped at 0 | clipped at 1 | lowest base rate | largest curvature |",
    "|---|" + "---:|" * 11,
)


def describe(name: str, rows: Rows, top1: float) -> str:
    """Return the row of a training in the table."""
    later = rows[len(rows) // 10 :]

    def values(column: str) -> list[float]:
        return [value for row in later if (value := row.get(column)) is not None]

    def median(column: str, digits: int) -> str:
        return f"{statistics.median(found):.{digits}f}" if (found := values(column)) else ""

    def share(column: str, holds: Callable[[float], bool]) -> str:
        return f"{statistics.fmean(map(holds, found)):.0%}" if (found := values(column)) else ""

    cells = [
        f"{name}, rate {RUNS[name][0]:g}",
        f"{top1:.2%}",
        f"{statistics.fmean(values('loss')[-SMOOTHED_STEPS:]):.3f}",
        median("length", 4),
        median("angle", 2),
        median("slope_left", 2),
        share("slope_left", lambda value: value < 0),
        median("beta", 2),
        share("beta", lambda value: value <= 0),
        share("beta", lambda value: value >= 1),
        f"{min(found):.3g}" if (found := values("base_rate")) else "",
        f"{statistics.median(found):.3g}" if (found := values("curvature")) else "",
    ]
    return f"| {' | '.join(cells)} |"


def picture(title: str, series: Mapping[str, Rows], column: str, label: str) -> str:
    """Draw the running median of a column by step, within -1 and 2, as an SVG file."""
    lines = []
    for colour, (name, rows) in enumerate(series.items(), start=1):
        found = [(step, value) for step, row in enumerate(rows) if (value := row.get(column)) is not None]
        windows = [found[start : start + SMOOTHED_STEPS] for start in range(0, len(found), max(1, SMOOTHED_STEPS // 3))]
        points = [
            (statistics.median(step for step, _ in window), statistics.median(value for _, value in window))
            for window in windows
        ]
        if points:
            bounded = [(step, min(2.0, max(-1.0, value))) for step, value in points]
            lines.append(LineSeries(name, bounded, colour))
    return line_chart_svg(title, lines, x=XAxis("step"), y=YAxis(label))


if __name__ == "__main__":
    main()
