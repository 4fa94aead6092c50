"""Model of a server: a directory, or a URL whose files are copied to the temporary directory first."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podscale.data.sources.base import decode_name
from podscale.data.sources.storage import open_storage
from podscale.errors import InputError
from podscale.prediction.model import PredictionModel, open_model
from podscale.util.locations import Location

READ_FILES = (b"config.yaml", b"evaluation.json", b"code.tar")
"""Files of a run or model directory that a prediction reads, besides the model's own."""


@contextmanager
def opened_model(location: str, *, calibrate: bool = True) -> Iterator[PredictionModel]:
    """Open a model until the end of the block. Raises InputError if there is none, or it cannot be read.

    Args:
        location: path or fsspec URL of a run or model directory.
        calibrate: use the temperature that the run's evaluation fitted, if there is one.
    """
    if not Location.parse(location).is_remote:
        yield open_model(location, calibrate=calibrate)
        return
    with tempfile.TemporaryDirectory(prefix="podscale-model-") as directory:
        _copy_model(location, Path(directory))
        yield open_model(directory, calibrate=calibrate)


def _copy_model(location: str, target: Path) -> None:
    """Copy the model's files, and those of its run that a prediction reads. Raises InputError."""
    try:
        storage = open_storage(location)
        for file in storage.files():
            folder, _, name = file.path.rpartition(b"/")
            if folder == b"model" or (not folder and (name in READ_FILES or name.startswith(b"model."))):
                copy = target / decode_name(file.path)
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(storage.read(file.path))
    except (OSError, InputError) as error:
        problem = error.problem if isinstance(error, InputError) else f"cannot be read: {error}"
        raise InputError(problem, field="MODEL", got=location) from error
