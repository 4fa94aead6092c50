"""Writers of predictions: JSON Lines, CSV and Parquet, row by row, so that memory does not grow with the rows."""

import csv
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from podscale.errors import InputError
from podscale.prediction.predictor import Prediction

SUFFIXES = (".jsonl", ".csv", ".parquet")
DIGITS = 6
"""Decimal digits of a probability."""
PARQUET_ROWS = 8192
"""Rows of a row group."""
_LAST_COLUMNS = ("temperature", "reason", "detail")


class Writer(Protocol):
    """Receiver of predictions in order."""

    def write(self, prediction: Prediction) -> None: ...


def row_of(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as a JSON object; every row has the same keys."""
    failure = prediction.failure
    return {
        "image": prediction.image,
        "label": prediction.label,
        "classes": list(prediction.classes),
        "probabilities": [round(value, DIGITS) for value in prediction.probabilities],
        "temperature": None if failure else round(prediction.temperature, DIGITS),
        "reason": failure.reason if failure else None,
        "detail": failure.detail if failure else None,
    }


def line_of(prediction: Prediction) -> str:
    """Return a prediction as a line of JSON."""
    return json.dumps(row_of(prediction)) + "\n"


class JsonLinesWriter:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, prediction: Prediction) -> None:
        self._stream.write(line_of(prediction))


class CsvWriter:
    """CSV with the columns image, label, class_1, probability_1, ..., temperature, reason, detail."""

    def __init__(self, stream: TextIO, top: int) -> None:
        self._top, self._writer = top, csv.writer(stream, lineterminator="\n")
        places = [f"{name}_{place}" for place in range(1, top + 1) for name in ("class", "probability")]
        self._writer.writerow(["image", "label", *places, *_LAST_COLUMNS])

    def write(self, prediction: Prediction) -> None:
        row = row_of(prediction)
        pairs = [value for pair in zip(row["classes"], row["probabilities"], strict=True) for value in pair]
        empty = [""] * (2 * self._top - len(pairs))
        self._writer.writerow([row["image"], row["label"], *pairs, *empty, *(row[name] for name in _LAST_COLUMNS)])


class ParquetWriter:
    """Parquet file with the columns of JSON Lines."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        text, texts = pyarrow.string(), pyarrow.list_(pyarrow.string())
        columns = {"image": text, "label": text, "classes": texts, "probabilities": pyarrow.list_(pyarrow.float64())}
        columns |= {"temperature": pyarrow.float64(), "reason": text, "detail": text}
        self._schema = pyarrow.schema(columns)
        self._table = pyarrow.Table
        self._writer = parquet.ParquetWriter(path, self._schema)
        self._rows: list[dict[str, Any]] = []

    def write(self, prediction: Prediction) -> None:
        self._rows.append(row_of(prediction))
        if len(self._rows) == PARQUET_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._table.from_pylist(self._rows, schema=self._schema))
            self._rows = []


def check_output(path: Path, option: str = "--out") -> None:
    """Raise InputError if predictions cannot be written to `path`, the value of an option."""
    if path.suffix not in SUFFIXES:
        raise InputError("unknown kind of file", field=option, got=str(path), hint=f"Use {', '.join(SUFFIXES)}.")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        hint = "Run `pip install pyarrow`, or write .jsonl or .csv."
        raise InputError("Parquet needs pyarrow, which is not installed", field=option, got=str(path), hint=hint)
    check_directory(path, option)


def check_directory(path: Path, option: str) -> None:
    """Raise InputError if the directory of `path`, the value of an option, cannot be written."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        hint = "Name a file in an existing directory that you can write."
        raise InputError("cannot be written", field=option, got=str(path), hint=hint)


@contextmanager
def open_writer(path: Path, top: int) -> Iterator[Writer]:
    """Open a writer by the suffix of `path`, which appears complete at the end of the block, or not at all."""
    # Two pods may write one file for a while, and processes of containers have the same ids.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with _open_part(part, path.suffix, top) as writer:
            yield writer
        part.replace(path)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", field="--out", got=str(path)) from error
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _open_part(part: Path, suffix: str, top: int) -> Iterator[Writer]:
    if suffix == ".parquet":
        writer = ParquetWriter(part)
        try:
            yield writer
        finally:
            writer.close()
        return
    with part.open("w", encoding="utf-8", newline="") as stream:
        yield JsonLinesWriter(stream) if suffix == ".jsonl" else CsvWriter(stream, top)
