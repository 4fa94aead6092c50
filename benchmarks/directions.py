"""Measurement of what NLCG's and Neumann's steps do at a large batch, beside the best baselines of their studies.

    OMP_NUM_THREADS=1 python -m benchmarks.directions imagenette224.tar [--of nlcg neumann] [--jobs 2]

Trains the document of the studies nlcg-large-batch and neumann-steps at batch 4,096 with seed 1, once for each
optimizer of `FAMILIES`, three to four CPU minutes each. A recorder around the optimizer, selected as
`train.optimizer.name: python:...`, measures each step: p is the displacement of the weights, g the gradient of the loss
before it, g' the one after it, on the next batch.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.conditions import head
from benchmarks.harness import ROOT, Options, write_results
from benchmarks.samples import write_archive
from podscale.config import load
from podscale.config.optimizer import OptimizerSection
from podscale.data.shard_set import ShardSet
from podscale.evaluation import evaluation_json
from podscale.pytorch.optim import HyperParams, LookaheadOptimizer, Optimizer, ParamShard, build_optimizer
from podscale.report.charts.lines import LineSeries, XAxis, YAxis
from podscale.report.charts.standalone import line_chart_svg
from podscale.stages import local
from podscale.training.nlcg_rates import EPS

PACKAGES = ("torch", "numpy")
DOCUMENT = ROOT / "pipelines" / "studies" / "base" / "imagenette32.yaml"
BATCH = 4096
SMALL = (
    *("train.epochs=12", "train.schedule.warmup_epochs=1", "train.global_batch=16", "model.width=4"),
    *("input.image_size=16", "model.stem=small", "evaluate.batch=16"),
)


class Run(NamedTuple):
    """Learning rate and optimizer of a training."""

    rate: float
    optimizer: dict[str, Any]


class Picture(NamedTuple):
    """Picture of a recorded value by step, as a running summary over some steps, within limits."""

    value: str
    title: str
    label: str
    steps: int = 15
    summary: Callable[[list[float]], float] = statistics.median
    limits: tuple[float, float] = (-1.0, 2.0)


class CloseUp(NamedTuple):
    """Table of single steps of some runs, from the one before the first step for which the first run has a value."""

    runs: Sequence[str]
    value: str
    name: str
    steps: int = 6


class Family(NamedTuple):
    """Trainings that a page compares, and the epochs of each; `note` has lines below its explanation."""

    title: str
    epochs: int
    runs: Mapping[str, Run]
    pictures: Sequence[Picture]
    close_up: CloseUp | None = None
    note: Sequence[str] = ()


def nlcg(**options: Any) -> Run:
    return Run(3.2, {"name": "nlcg", "nlcg": {"step": "none", "forget_every": 1, **options}})


def neumann(**options: Any) -> Run:
    return Run(0.8, {"name": "neumann", "neumann": {"reset_epochs": 20, **options}})


SLOPE = Picture("slope_left", "Slope along a step that is left after it", "<g', p> / <g, p>")
ANGLE = Picture("angle", "Angle between a step and steepest descent", "cos(p, -g)")
STEP = Picture("length", "Length of a step", "|p| / |weights|")
GRADIENT = Picture(
    "gradient",
    "Length of the gradient",
    "log10 |g|",
    summary=lambda values: math.log10(statistics.median(values)),
    limits=(-math.inf, math.inf),
)
FAMILIES: dict[str, Family] = {
    "nlcg": Family(
        "What NLCG's steps do",
        200,
        {
            "NLCG": nlcg(),
            "NLCG, Polak-Ribiere": nlcg(beta="polak_ribiere"),
            "NLCG, step heuristic": nlcg(step="step"),
            "NLCG, preconditioner": nlcg(forget_every=0),
            "SGD": Run(2.4, {"name": "sgd", "momentum": 0.95}),
            "LARS": Run(8.0, {"name": "lars", "momentum": 0.9, "trust_coefficient": 0.016}),
        },
        (
            *(SLOPE, ANGLE, STEP, GRADIENT, Picture("beta", "beta before it is clipped", "beta")),
            Picture("clipped", "Share of the steps whose beta is clipped", "share of 30 steps", 30, statistics.fmean),
            Picture("base_rate", "Part of the learning rate that the step heuristic leaves", "base rate", 1),
        ),
        note=(
            "`decay` is the geometric mean of beta as it is applied, within 0 and 1.",
            "",
            "NLCG is the variant `displacement`, which is ours. In the authors' variant, `released`, the first two",
            "rows are the same. The rows with the step heuristic or the preconditioner are not.",
            "",
        ),
    ),
    "neumann": Family(
        "What Neumann's steps do",
        150,
        {
            "Neumann": neumann(),
            "no regulariser": neumann(alpha=0.0, beta=0.0),
            "no resets": neumann(reset_epochs=1000),
            "neither": neumann(alpha=0.0, beta=0.0, reset_epochs=1000),
            "Nesterov": Run(0.4, {"name": "sgd", "nesterov": True, "momentum": 0.95}),
        },
        (SLOPE, ANGLE, Picture("push", "Length of the regulariser over that of the gradient", "ratio", steps=1)),
        CloseUp(("Neumann", "no regulariser"), "push", "the regulariser"),
    ),
}
"""The settings of NLCG, SGD, LARS, Neumann and Nesterov are the choices of their studies at this batch."""
LAST_STEPS = 15
"""Steps at the end of a training that a table summarises."""


class RecordedOptimizer:
    """Optimizer that writes a line of JSON for each step that was applied."""

    def __init__(self, inner: Optimizer, shard: ParamShard, section: OptimizerSection, path: Path) -> None:
        self._inner, self._shard, self._section, self._path = inner, shard, section, path
        self.moments, self.scalars = inner.moments, inner.scalars
        self._last: tuple[Tensor, float] | None = None

    def step(self, hyper: HyperParams, finite: Tensor) -> Tensor:
        weights, gradient = self._shard.weights.double(), self._shard.gradients.double()
        before = {name: scalar.item() for name, scalar in self.scalars.items()}
        descent = self.moments["descent"].double() if "descent" in self.moments else None
        distance = self._distance()
        applied = self._inner.step(hyper, finite)
        if not applied:
            return applied
        moved = self._shard.weights.double() - weights
        slope = float(gradient @ moved)
        row = {
            "loss": hyper.loss.item(),
            "length": float(moved.norm()) / float(weights.norm()),
            "gradient": float(gradient.norm()),
            "angle": -slope / (float(gradient.norm()) * float(moved.norm()) + EPS),
            "slope_left": None if self._last is None else float(gradient @ self._last[0]) / self._last[1],
        }
        if self._section.name == "nlcg":
            # <r, s_old> of Polak-Ribiere; the moment `gradient` is now that of this step.
            kept = 0.0 if descent is None else -float(self.moments["gradient"].double() @ descent)
            if before["updates"]:
                beta = (self.scalars["rho"].item() - kept) / (before["rho"] + EPS)
                row |= {"beta": beta, "clipped": float(not 0 < beta < 1)}
            row["base_rate"] = self.scalars["base_rate"].item()
        if self._section.name == "neumann":
            options = self._section.neumann
            variables = sum(each.size for each in self._shard.param_slices)
            push = options.alpha * distance**2 - options.beta * variables / distance**2 if distance else 0.0
            is_neumann = self.scalars["last_reset"].item() > 0
            row["push"] = abs(push) / float(gradient.norm()) if is_neumann else None
            row["momentum"] = self.scalars["mu"].item() if is_neumann else None
        self._last = (moved, slope) if slope else None  # a warm-up may begin at rate 0
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
        return applied

    def _distance(self) -> float:
        """Return the distance of the weights from Neumann's running average of them; 0 without one."""
        if "average" not in self.moments:
            return 0.0
        chunks = self._shard.contiguous_chunks(self.moments["average"])
        return math.sqrt(sum(float((w - average).double().square().sum()) for w, _, average in chunks))


class RecordedLookahead(RecordedOptimizer):
    """Recorded optimizer whose stored weights are the point of the next gradient."""

    def evaluation_weights(self) -> Tensor:
        assert isinstance(self._inner, LookaheadOptimizer)
        return self._inner.evaluation_weights()


def recorded_optimizer(
    shard: ParamShard, optimizer: dict[str, Any], steps_per_epoch: float, path: str
) -> RecordedOptimizer:
    """Build a recorded optimizer.

    Args:
        optimizer: `train.optimizer` of the optimizer inside.
        path: file of the lines.
    """
    section = OptimizerSection.model_validate(optimizer)
    inner = build_optimizer(section, shard, steps_per_epoch)
    kind = RecordedLookahead if isinstance(inner, LookaheadOptimizer) else RecordedOptimizer
    return kind(inner, shard, section, Path(path))


Rows = list[dict[str, float | None]]


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("images", type=Path, nargs="?", help="archive or folder of imagenette")
    parser.add_argument("--place", type=Path, help="run in this folder, where finished trainings are reused")
    parser.add_argument("--of", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), help="pages to write")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    options = parser.read()
    if options.images is None and not options.small:
        parser.error("images: missing. Give the archive or folder of imagenette.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.place or Path(scratch)).resolve()
        images = options.images or write_archive(Path(scratch, "generated.tar"), images=96)
        changes = (f"data.source={images.resolve()}", f"run.workspace={folder}", f"train.global_batch={BATCH}")
        for name in options.of:
            family, lines = FAMILIES[name], head(FAMILIES[name].title, PACKAGES)
            settings = (*changes, f"train.epochs={family.epochs}", f"evaluate.every_epochs={family.epochs}")
            trainings = Trainings(folder, (*settings, "run.seed=1", *(SMALL if options.small else ())))
            with ThreadPoolExecutor(options.jobs) as pool:
                done = list(
                    pool.map(trainings.train, [f"{name}-{n}" for n in range(len(family.runs))], family.runs.values())
                )
            write_page(options.results, name, lines, dict(zip(family.runs, done, strict=True)))


class Trainings:
    """Trainings in a folder, of the document with these changes."""

    def __init__(self, folder: Path, changes: Sequence[str]) -> None:
        self._folder, self._changes = folder, changes
        config = load(DOCUMENT, changes)
        sharded = local.shard(config.data, str(folder))
        assert sharded is not None, "a call without `part` packs the whole shard set"
        images = len(ShardSet.open(sharded.location).split("train"))
        self._steps_per_epoch = images / config.train.global_batch

    def train(self, name: str, run: Run) -> tuple[Rows, float]:
        """Train, unless that is done. Returns the recorded steps and the final top-1."""
        record, evaluation = self._folder / f"{name}.jsonl", self._folder / "runs" / name / "evaluation.json"
        if not evaluation.exists():
            record.unlink(missing_ok=True)
            options = {"optimizer": run.optimizer, "steps_per_epoch": self._steps_per_epoch, "path": str(record)}
            settings = (
                *(f"run.id={name}", f"train.schedule.learning_rate={run.rate}"),
                f"train.optimizer.name=python:benchmarks.directions:{recorded_optimizer.__name__}",
                f"train.optimizer.momentum={run.optimizer.get('momentum', 0.9)}",
                f"train.optimizer.options={json.dumps(options)}",
            )
            words = [sys.executable, "-m", "podscale", "run", str(DOCUMENT)]
            words += [word for setting in (*self._changes, *settings) for word in ("--set", setting)]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            subprocess.run(words, cwd=self._folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
        return rows, evaluation_json.read_evaluation(evaluation).scores.top1


EXPLANATION = (
    "Medians over the steps after the first tenth. p is the displacement of the weights in a step, g the gradient of",
    "the loss before it and g' after it, on the next batch. `slope left` is <g', p> / <g, p>: 0 after an exact line",
    "search, near 1 after a short step, below 0 past the minimum along p. The last loss is the mean of the last",
    f"{LAST_STEPS} steps. One seed each.",
    "",
)


class Column(NamedTuple):
    """Column of a table: its title, the recorded value, the summary over the later steps, and its format."""

    title: str
    value: str
    summary: Callable[[list[float]], float]
    format: str


def decay_of(betas: list[float]) -> float:
    """Return the geometric mean of beta within 0 and 1, by which a gradient's part of the direction decays a step."""
    return math.exp(statistics.fmean(math.log(min(1.0, max(EPS, beta))) for beta in betas))


def share(holds: Callable[[float], bool]) -> Callable[[list[float]], float]:
    return lambda values: statistics.fmean(map(holds, values))


COLUMNS = (
    Column("last loss", "loss", lambda values: statistics.fmean(values[-LAST_STEPS:]), ".3f"),
    Column("step / weights", "length", statistics.median, ".4f"),
    Column("cos(p, -g)", "angle", statistics.median, ".2f"),
    Column("slope left", "slope_left", statistics.median, ".2f"),
    Column("past the minimum", "slope_left", share(lambda value: value < 0), ".0%"),
    Column("beta", "beta", statistics.median, ".2f"),
    Column("decay", "beta", decay_of, ".2f"),
    Column("clipped at 0", "beta", share(lambda value: value <= 0), ".0%"),
    Column("clipped at 1", "beta", share(lambda value: value >= 1), ".0%"),
    Column("lowest base rate", "base_rate", min, ".3g"),
    Column("momentum", "momentum", statistics.median, ".2f"),
    Column("regulariser / gradient", "push", statistics.median, ".2f"),
    Column("the same at the end", "push", lambda values: statistics.median(values[-LAST_STEPS:]), ".2f"),
)


def write_page(folder: Path, name: str, lines: Sequence[str], trained: Mapping[str, tuple[Rows, float]]) -> None:
    """Write the table and the pictures of a family."""
    recorded = [column for column in COLUMNS if any(later_values(rows, column.value) for rows, _ in trained.values())]
    table = [
        f"| optimizer | top-1 | {' | '.join(column.title for column in recorded)} |",
        "|---|---:|" + "---:|" * len(recorded),
    ]
    for run, (rows, top1) in trained.items():
        found = [(column, later_values(rows, column.value)) for column in recorded]
        cells = [f"{column.summary(values):{column.format}}" if values else "" for column, values in found]
        table.append(f"| {run}, rate {FAMILIES[name].runs[run].rate:g} | {top1:.2%} | {' | '.join(cells)} |")
    if (close_up := FAMILIES[name].close_up) is not None:
        table += ["", *close_up_table(close_up, {run: trained[run][0] for run in close_up.runs})]
    series = {run: rows for run, (rows, _) in trained.items()}
    shown = {f"{name}-direction-{each.value.replace('_', '-')}.svg": each for each in FAMILIES[name].pictures}
    pictures = {file: draw(each, series) for file, each in shown.items()}
    links = [line for file, each in shown.items() for line in ("", f"![{each.title}]({file})")]
    write_results(
        folder, f"{name}-direction.md", [*lines, *EXPLANATION, *FAMILIES[name].note, *table, *links], pictures
    )


def close_up_table(close_up: CloseUp, series: Mapping[str, Rows]) -> list[str]:
    """Return the lines of a table of single steps: of each run the loss before a step and the lengths of its parts."""
    shown = (
        Column("loss", "loss", max, ".2f"),
        Column("step / weights", "length", max, ".4f"),
        Column(f"{close_up.name.removeprefix('the ')} / gradient", close_up.value, max, ".4f"),
    )
    heads = [f"{run}: {column.title}" for run in series for column in shown]
    first = next(step for step, row in enumerate(series[close_up.runs[0]]) if row.get(close_up.value) is not None)
    lines = [f"Single steps; {close_up.name} begins with the second. The loss is the one before the step.", ""]
    lines += [f"| step | {' | '.join(heads)} |", "|---:|" + "---:|" * len(heads)]
    for step in range(max(0, first - 1), min(first - 1 + close_up.steps, *map(len, series.values()))):
        found = [(rows[step].get(column.value), column.format) for rows in series.values() for column in shown]
        cells = ["" if value is None else f"{value:{style}}" for value, style in found]
        lines.append(f"| {step + 1} | {' | '.join(cells)} |")
    return lines


def later_values(rows: Rows, value: str) -> list[float]:
    """Return the recorded values of the steps after the first tenth."""
    return [found for row in rows[len(rows) // 10 :] if (found := row.get(value)) is not None]


def points_of(picture: Picture, rows: Rows) -> list[tuple[float, float]]:
    """Return the summaries of a picture's value over some steps each, and the steps in their middle."""
    lowest, highest = picture.limits
    found = [(step, number) for step, row in enumerate(rows) if (number := row.get(picture.value)) is not None]
    windows = [found[start : start + picture.steps] for start in range(0, len(found), max(1, picture.steps // 3))]
    return [
        (
            statistics.median(step for step, _ in window),
            min(highest, max(lowest, picture.summary([number for _, number in window]))),
        )
        for window in windows
    ]


def draw(picture: Picture, series: Mapping[str, Rows]) -> str:
    """Draw a picture as an SVG file."""
    points = {name: points_of(picture, rows) for name, rows in series.items()}
    lines = [LineSeries(name, found, colour) for colour, (name, found) in enumerate(points.items(), start=1) if found]
    return line_chart_svg(picture.title, lines, x=XAxis("step"), y=YAxis(picture.label))


if __name__ == "__main__":
    main()
