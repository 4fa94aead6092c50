"""Predictions for every validation sample: the interface between engines and evaluation.

Columns in a safetensors file, sorted by sample key, so that it does not depend on the number of ranks. The evaluation
of several models writes the predictions of each pass and combination to `<run>/ensemble/`, and passes.json last.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from podscale.errors import InputError
from podscale.util.files import write_atomically, write_json

PREDICTIONS_FORMAT = "podscale-predictions-1"

PREDICTION_COLUMNS = {
    "keys": np.uint64,
    "labels": np.int32,
    "topk": np.int32,
    "confidences": np.float32,
    "losses": np.float32,
}

TEMPERED_LOSSES = "tempered_losses"
"""Column that not every engine and version writes."""
INVERSE_TEMPERATURES = 2.0 ** (np.arange(-12, 13) / 4)
"""Factors of the logits at which the cross-entropy is stored, float64 [25]: temperatures from 8 to 1/8."""


@dataclass(frozen=True)
class Predictions:
    """One row per sample.

    Args:
        keys: uint64 [n], unique sample keys (see podscale.data.index).
        labels: int32 [n], true class indices.
        topk: int32 [n, k], the k most probable classes, best first; k >= min(5, number of classes).
        confidences: float32 [n, k], their softmax probabilities.
        losses: float32 [n], cross-entropy of the true class in nats, without label smoothing.
        tempered_losses: float32 [n, 25], the same with the logits times each of INVERSE_TEMPERATURES; None if unknown.
    """

    keys: npt.NDArray[np.uint64]
    labels: npt.NDArray[np.int32]
    topk: npt.NDArray[np.int32]
    confidences: npt.NDArray[np.float32]
    losses: npt.NDArray[np.float32]
    tempered_losses: npt.NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def top1_top5_accuracy(self) -> tuple[float, float]:
        """Return the top-1 and top-5 accuracy as fractions."""
        hits = self.topk[:, :5] == self.labels[:, None]
        return float(hits[:, 0].mean()), float(hits.any(axis=1).mean())

    def sorted_by_key(self) -> "Predictions":
        """Return the rows in key order, as in the file."""
        order = np.argsort(self.keys, kind="stable")
        return Predictions(**{name: column[order] for name, column in self.columns().items()})

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the known columns by name, in the types of the file."""
        columns = {name: np.asarray(getattr(self, name)).astype(dtype) for name, dtype in PREDICTION_COLUMNS.items()}
        if self.tempered_losses is not None:
            columns[TEMPERED_LOSSES] = np.asarray(self.tempered_losses).astype(np.float32)
        return columns


def write_predictions(path: Path, predictions: Predictions) -> None:
    """Write `predictions` atomically, sorted by key; raises ValueError if a sample occurs twice, such as padding."""
    columns = predictions.columns()
    _check_columns(columns)
    order = np.argsort(columns["keys"], kind="stable")
    keys = columns["keys"][order]
    if len(keys) and (repeated := keys[1:][keys[1:] == keys[:-1]]).size:
        raise ValueError(f"sample {int(repeated[0]):016x} was predicted twice")
    content = save(
        {name: np.ascontiguousarray(column[order]) for name, column in columns.items()}, {"format": PREDICTIONS_FORMAT}
    )
    write_atomically(path, content)


def read_predictions(path: Path) -> Predictions:
    """Return the predictions at `path`; raises InputError if there are none or the file is damaged."""
    try:
        columns = load(path.read_bytes())
        predictions = Predictions(
            **{name: columns[name].astype(dtype, copy=False) for name, dtype in PREDICTION_COLUMNS.items()},
            tempered_losses=columns.get(TEMPERED_LOSSES),
        )
        _check_columns(columns)
    except FileNotFoundError as error:
        raise InputError("there are no predictions yet", field=str(path), hint="Run `podscale evaluate`") from error
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        hint = "Run `podscale evaluate` again."
        raise InputError(f"cannot read the predictions ({error})", field=str(path), hint=hint) from error
    return predictions


def _check_columns(columns: dict[str, npt.NDArray[np.generic]]) -> None:
    shapes = {name: column.shape for name, column in columns.items()}
    rows = len(columns["keys"])
    width = columns["topk"].shape[1:]
    tempered = shapes.pop(TEMPERED_LOSSES, (rows, len(INVERSE_TEMPERATURES)))
    expected = {name: (rows, *width) if name in ("topk", "confidences") else (rows,) for name in PREDICTION_COLUMNS}
    if len(width) != 1 or shapes != expected or tempered != (rows, len(INVERSE_TEMPERATURES)):
        raise ValueError(f"columns do not fit together: {shapes}")


CombineMethod = Literal["probabilities", "logits", "weights"]
"""Mean of the probabilities, mean of the logits, or one model of the mean weights."""
COMBINE_METHODS: tuple[CombineMethod, ...] = get_args(CombineMethod)
PASSES_FILE = "passes.json"


@dataclass(frozen=True)
class EvaluationPass:
    """One pass of a model over the split.

    Args:
        name: Name of its predictions.
        directory: Directory of the model.
        seconds: Time of the pass, input included.
        statistics_seconds: Time before it for batch norm statistics of the mean weights.
    """

    name: str
    directory: str
    seconds: float
    statistics_seconds: float = 0.0


def write_passes(directory: Path, passes: Sequence[EvaluationPass], predictions: Mapping[str, Predictions]) -> None:
    """Write the predictions of all passes and combinations by name, then passes.json."""
    directory.mkdir(exist_ok=True)
    for name, of_pass in predictions.items():
        write_predictions(pass_predictions_path(directory, name), of_pass)
    write_json(directory / PASSES_FILE, [asdict(one) for one in passes])


def read_passes(directory: Path) -> dict[str, EvaluationPass]:
    """Return the passes by name; raises InputError if there are none or the file is damaged."""
    path = directory / PASSES_FILE
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return {one.name: one for one in (EvaluationPass(**entry) for entry in entries)}
    except (OSError, ValueError, TypeError) as error:
        hint = "Run `podscale evaluate` again."
        raise InputError(f"not the passes of an evaluation ({error})", field=str(path), hint=hint) from error


def pass_predictions_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.safetensors"
