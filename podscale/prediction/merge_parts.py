"""Merge of the parts of a prediction into one file, which is to the bit the file of one process."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from podscale.errors import InputError, combine_errors
from podscale.prediction.image_inputs import Failure
from podscale.prediction.parts import (
    Part,
    PartManifest,
    differences,
    manifest_path,
    missing_parts,
    read_manifest,
    rows_path,
)
from podscale.prediction.predictor import Prediction
from podscale.prediction.summary import PredictionCounts
from podscale.prediction.writers import open_writer
from podscale.util.formatting import format_count

MAX_NAMED = 8
"""Parts that an error names."""
_NUMBER = 5 * "[0-9]"
"""Pattern of a number in the name of a part."""


class MergedCounts(PredictionCounts):
    """Counts of the merged rows of `parts` parts."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def to_text(self) -> str:
        """Return the counts in one or more lines for the terminal."""
        merged = f"{format_count(self.images, 'image')} of {format_count(self.parts, 'part')}"
        return "\n".join([merged, *self.result_lines()])


def merge_parts(folder: Path, out: Path) -> MergedCounts:
    """Write the rows of all parts of a folder, in order, to a .jsonl, .csv or .parquet file; delete nothing.

    Raises InputError that names the parts which are missing, damaged, or of another prediction.
    """
    manifests = _read_manifests(folder)
    identity = manifests[0].identity
    counts = MergedCounts(len(manifests))
    with open_writer(out, int(identity["top"])) as writer:
        for manifest in manifests:
            for prediction in _rows(folder, manifest):
                writer.write(prediction)
                counts.count(prediction)
        if counts.images != identity["images"]:
            raise InputError("not one row an image", field=str(folder), got=f"{counts.images} of {identity['images']}")
    return counts


def _read_manifests(folder: Path) -> list[PartManifest]:
    """Return the manifests of all parts, in order. Raises InputError if some are missing or differ."""
    found = sorted(folder.glob(f"part-{_NUMBER}-of-{_NUMBER}.json"))
    if not found:
        hint = "Name the folder of `podscale predict --part`."
        raise InputError("no finished part of a prediction here", field=str(folder), hint=hint)
    counts = {int(path.stem.rpartition("-")[2]) for path in found}
    if len(counts) > 1:
        got = " and ".join(map(str, sorted(counts)))
        hint = "Delete the files of all but one of them."
        raise InputError("predictions of several numbers of parts are here", field=str(folder), got=got, hint=hint)
    count = counts.pop()
    if missing := [part.name for part in missing_parts(folder, count)]:
        hint = f"Run `podscale predict --part INDEX/{count}` for them, or the job again."
        raise InputError(
            f"{len(missing)} of {count} parts are missing", field=str(folder), got=_named(missing), hint=hint
        )
    read = [read_manifest(manifest_path(folder, Part(index, count))) for index in range(count)]
    manifests = [manifest for manifest in read if manifest is not None]
    usual = Counter(json.dumps(manifest.identity, sort_keys=True) for manifest in manifests).most_common(1)[0][0]
    errors = [_other_prediction(folder, one, count, json.loads(usual)) for one in manifests]
    if others := [error for error in errors if error is not None]:
        raise combine_errors(others, f"{folder}: parts of several predictions")
    return manifests


def _other_prediction(folder: Path, manifest: PartManifest, count: int, usual: dict[str, Any]) -> InputError | None:
    changed = differences(manifest.identity, usual)
    if not changed:
        return None
    return InputError(
        f"of another prediction than the other parts: {', '.join(changed)} differ",
        field=str(manifest_path(folder, Part(manifest.part, count))),
        hint="Delete it and predict the part again.",
    )


def _rows(folder: Path, manifest: PartManifest) -> Iterator[Prediction]:
    """Yield the rows of a part. Raises InputError if the file is not the one that the manifest describes."""
    path = rows_path(folder, Part(manifest.part, int(manifest.identity["parts"])))
    digest, rows = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            for line in file:
                digest.update(line)
                rows += 1
                yield _prediction_of(json.loads(line))
        damaged = digest.hexdigest() != manifest.sha256 or rows != manifest.rows
    except FileNotFoundError:
        raise InputError("the rows of this part are missing", field=str(path), hint=_AGAIN) from None
    except OSError as error:  # an open writer would report it as its own
        raise InputError(f"cannot be read: {error.strerror}", field=str(path)) from error
    except (ValueError, KeyError, TypeError):  # lines that are no JSON, or no rows
        damaged = True
    if damaged:
        raise InputError("not the rows that the part's manifest describes", field=str(path), hint=_AGAIN)


_AGAIN = "Predict the part again: `podscale predict --part` replaces damaged rows."


def _prediction_of(row: dict[str, Any]) -> Prediction:
    failure = Failure(row["reason"], row["detail"]) if row["reason"] is not None else None
    temperature = 1.0 if row["temperature"] is None else row["temperature"]
    classes, probabilities = tuple(row["classes"]), tuple(row["probabilities"])
    return Prediction(row["image"], row["label"], classes, probabilities, temperature, failure)


def _named(parts: list[str]) -> str:
    more = len(parts) - MAX_NAMED
    return ", ".join(parts[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
