"""What the evaluation of several models leaves beside the run's predictions: who made which pass, and how long it took.

`<run>/ensemble/passes.json`, written last, and the predictions of each pass and of each way of combining them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from podscale.errors import InputError
from podscale.evaluate import predictions
from podscale.evaluate.predictions import Predictions
from podscale.util.files import write_json

CombineMethod = Literal["probabilities", "logits", "weights"]
"""Mean of the probabilities, mean of the logits, one model of the mean weights."""
COMBINE_METHODS: tuple[CombineMethod, ...] = get_args(CombineMethod)
PASSES_FILE = "passes.json"


@dataclass(frozen=True)
class EvaluationPass:
    """One pass of a model over the split. name: of its predictions; directory: of the model; seconds: input included;
    statistics_seconds: before it, over training images, for batch norm of the mean weights."""

    name: str
    directory: str
    seconds: float
    statistics_seconds: float = 0.0


def write_passes(directory: Path, passes: Sequence[EvaluationPass], found: Mapping[str, Predictions]) -> None:
    """Keeps the predictions of all passes and ways by name, and then the passes."""
    directory.mkdir(exist_ok=True)
    for name, answers in found.items():
        predictions.write_predictions(pass_predictions_path(directory, name), answers)
    write_json(directory / PASSES_FILE, [asdict(one) for one in passes])


def read_passes(directory: Path) -> dict[str, EvaluationPass]:
    """The passes by name. Raises InputError where there are none, or the file is damaged."""
    path = directory / PASSES_FILE
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return {one.name: one for one in (EvaluationPass(**entry) for entry in entries)}
    except (OSError, ValueError, TypeError) as error:
        hint = "Run `podscale evaluate` again."
        raise InputError(f"not what an evaluation leaves ({error})", field=str(path), hint=hint) from error


def pass_predictions_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.safetensors"
