"""Published settings by global batch, which `train.recipe` fills in for options that a document leaves open.

`mlperf-lars`: ResNet-50 v1.5 to 75.9 % top-1 with LARS, from the result logs of MLPerf Training v0.7 to v4.0
(mlcommons/training_results_*). For each batch, the table has one entry of the closed division whose logs give every
value and whose five runs with one setting all reached the target (four at 20,480): the one with the fewest epochs; of
equals, the first published.

A batch between two rows is interpolated on a logarithmic scale of the batch, without regard to the submitters:

- learning rate and 1 - momentum geometrically, because their ratio, the step of a long run of equal gradients, grows
  through most of the table (53 at 816, 120 at 4,096, 213 at 13,056, 408 at 32,768, 512 at 65,536);
- warm-up and epochs linearly; weight decay geometrically, then to the nearest power of two times 1e-4, by the rules of
  the closed division;
- the batch-norm span geometrically, then to the nearest divisor of the batch.

Interpolated values are untested. Nothing is extrapolated.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from podscale.config.fields import conflict_error

RECIPE_NAMES: Sequence[str] = ("mlperf-lars",)


@dataclass(frozen=True)
class RecipeRow:
    """One published setting.

    Args:
        warmup: length of the warm-up, epochs.
        epochs: length of the schedule in whole epochs, warm-up included (`decay_steps` in logs exclude it).
        reached: mean epochs to the target.
        span: images per batch-norm group.
        submitter: submitter and round.
    """

    batch: int
    learning_rate: float
    warmup: float
    momentum: float
    weight_decay: float
    epochs: float
    reached: float
    span: int
    submitter: str


MLPERF_LARS: Sequence[RecipeRow] = (
    RecipeRow(816, 5.3, 2, 0.9, 5e-5, 37, 35, 408, "Quanta, v3.0"),
    RecipeRow(1632, 7.4, 2, 0.9, 5e-5, 37, 35, 408, "Dell, v1.0"),
    RecipeRow(2048, 9.0, 3, 0.9, 5e-5, 36, 35, 256, "Intel-HabanaLabs, v2.0"),
    RecipeRow(3200, 10.5, 2, 0.9, 5e-5, 37, 35, 400, "Nettrix, v2.0"),
    RecipeRow(3264, 10.5, 2, 0.9, 5e-5, 37, 35, 408, "Inspur, v0.7"),
    RecipeRow(4096, 12.0, 2, 0.9, 5e-5, 37, 36, 256, "CASIA, v2.0"),
    RecipeRow(8192, 17.0, 5, 0.9, 1e-4, 43, 41, 128, "Intel-HabanaLabs, v1.1"),
    RecipeRow(13056, 12.8, 9, 0.94, 2.5e-5, 48, 45, 204, "NVIDIA, v1.0"),
    RecipeRow(16384, 26.5, 7, 0.9, 5e-5, 50, 47, 128, "Intel-HabanaLabs, v1.1"),
    RecipeRow(20480, 22.0, 12, 0.9, 2.5e-5, 52, 50, 40, "NVIDIA, v3.0"),
    RecipeRow(32768, 29.0, 18, 0.929, 1e-4, 60, 60, 64, "Google, v1.0"),
    RecipeRow(33280, 21.2, 16, 0.94, 2.5e-5, 58, 56, 65, "NVIDIA, v0.7"),
    RecipeRow(35840, 21.9, 17, 0.94, 2.5e-5, 60, 58.4, 35, "NVIDIA, v2.0"),
    RecipeRow(55296, 25.67, 29, 0.94053, 1e-4, 80, 78.4, 64, "Google, v1.0"),
    RecipeRow(57344, 23.0, 32, 0.95, 2.5e-5, 78, 77, 32, "NVIDIA and CoreWeave, v3.0"),
    RecipeRow(65536, 24.699, 31, 0.951807, 1e-4, 89, 87.2, 64, "Google, v0.7"),
)


@dataclass(frozen=True)
class RecipeValues:
    """Values of a recipe for one batch, by dotted option, and their origin."""

    values: dict[str, Any]
    origin: str


def recipe_values(name: str, batch: int) -> RecipeValues:
    """Return the values of a recipe for a global batch; raises PydanticCustomError if it has none."""
    if name not in RECIPE_NAMES:
        raise conflict_error("train.recipe", "unknown recipe", got=name, hint=f"Known: {', '.join(RECIPE_NAMES)}")
    first, last = MLPERF_LARS[0].batch, MLPERF_LARS[-1].batch
    if not first <= batch <= last:
        raise conflict_error(
            "train.global_batch",
            f"train.recipe={name} has settings for batches from {first:,} to {last:,}",
            got=batch,
            hint="Choose a batch in this range, or leave the recipe out and set optimizer and schedule.",
        )
    row, origin = recipe_row(batch)
    span = nearest_divisor(batch, row.span)
    values = {
        "train.epochs": row.epochs,
        "train.label_smoothing": 0.1,
        "train.optimizer.name": "lars",
        "train.optimizer.momentum": row.momentum,
        "train.optimizer.nesterov": False,
        "train.optimizer.weight_decay": row.weight_decay,
        "train.optimizer.decay_all": False,
        "train.optimizer.trust_coefficient": 0.001,
        "train.optimizer.momentum_form": "unscaled",
        "train.optimizer.eps": 0.0,
        "train.schedule.name": "polynomial",
        "train.schedule.power": 2.0,
        "train.schedule.learning_rate": row.learning_rate,
        "train.schedule.warmup_epochs": row.warmup,
        "train.schedule.warmup_start": 0.0,
        "train.schedule.end_learning_rate": 1e-4,
        "train.schedule.decay_from": "warmup",
        "train.schedule.decay_epochs": None,
    }
    text = f"{name} for batch {batch:,}: {origin}; the target of 75.9 % was reached after {row.reached:g} epochs"
    if span is None:
        text += f"; a batch-norm span of about {row.span} images does not divide this batch and is left open"
    else:
        values["model.batch_norm.span"] = span
    return RecipeValues(values, text)


def recipe_row(batch: int) -> tuple[RecipeRow, str]:
    """Return the row of a batch, interpolated if the table has none, and its origin as text."""
    for row in MLPERF_LARS:
        if row.batch == batch:
            return row, f"the row of {row.submitter}"
    below, above = next((a, b) for a, b in pairwise(MLPERF_LARS) if a.batch < batch < b.batch)
    origin = f"between {below.batch:,} ({below.submitter}) and {above.batch:,} ({above.submitter})"
    return interpolate_rows(below, above, batch), origin


def interpolate_rows(below: RecipeRow, above: RecipeRow, batch: int) -> RecipeRow:
    """Interpolate between two rows; see the module's docstring."""
    share = math.log(batch / below.batch) / math.log(above.batch / below.batch)

    def line(name: str) -> float:
        low, high = getattr(below, name), getattr(above, name)
        return float(low + (high - low) * share)

    def curve(low: float, high: float) -> float:
        return math.exp(math.log(low) + math.log(high / low) * share)

    decay = curve(below.weight_decay, above.weight_decay)
    return RecipeRow(
        batch=batch,
        learning_rate=float(f"{curve(below.learning_rate, above.learning_rate):.4g}"),
        warmup=round(line("warmup"), 1),
        momentum=round(1.0 - curve(1.0 - below.momentum, 1.0 - above.momentum), 5),
        weight_decay=float(f"{1e-4 * 2.0 ** round(math.log2(decay / 1e-4)):.4g}"),
        epochs=round(line("epochs")),
        reached=round(line("reached"), 1),
        span=round(curve(below.span, above.span)),
        submitter="",
    )


def nearest_divisor(batch: int, span: int) -> int | None:
    """Return the divisor of `batch` whose ratio to `span` is nearest to 1; None if that ratio is more than 2."""
    divisors = {d for low in range(1, math.isqrt(batch) + 1) if batch % low == 0 for d in (low, batch // low)}
    best = min(divisors, key=lambda divisor: (abs(math.log(divisor / span)), divisor))
    return best if 0.5 <= best / span <= 2 else None


RECIPE_ORIGIN_KEY = "train.recipe_origin"


def fill_recipe(values: Any) -> Any:
    """Fill the values of a raw document's recipe into the options that it leaves open; wrong types stay.

    Raises PydanticCustomError if the recipe is unknown or the batch is outside its table.
    """
    name = _get_key(values, "train.recipe")
    if name is None:
        return values
    batch = _get_key(values, "train.global_batch", 256)
    if not isinstance(name, str) or not isinstance(batch, int):
        return values
    recipe = recipe_values(name, batch)
    optimizer = _get_key(values, "train.optimizer.name", "lars")
    if optimizer != "lars":
        problem = f"train.recipe={name} is for lars"
        raise conflict_error("train.optimizer.name", problem, got=optimizer, hint="Leave one of them out.")
    settings = {**recipe.values, RECIPE_ORIGIN_KEY: recipe.origin}
    if _get_key(values, "model.batch_norm.group") is not None:
        settings.pop("model.batch_norm.span", None)  # the group is another way to give the span
    filled = deepcopy(values)
    for key, value in settings.items():
        set_if_absent(filled, key, value)
    return filled


def _get_key(values: Any, key: str, default: Any = None) -> Any:
    """Return the value of a dotted key, or the default if it is absent."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return default
        values = values[part]
    return values


def set_if_absent(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key if it is absent; a section that is no mapping stays."""
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            return
        values = inner
    values.setdefault(last, value)
