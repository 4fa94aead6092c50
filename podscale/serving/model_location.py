"""Model of a server: a directory, an exported file, or a URL whose files are copied to the temporary directory."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from podscale.data.sources.base import decode_name
from podscale.data.sources.storage import open_storage
from podscale.errors import InputError
from podscale.prediction.exported_file import SUFFIXES
from podscale.prediction.model import TOP_FILES, PredictionModel, open_model
from podscale.util.locations import Location


@contextmanager
def opened_model(location: str, *, calibrate: bool = True) -> Iterator[PredictionModel]:
    """Open a model until the end of the block. Raises InputError if there is none, or it cannot be read.

    Args:
        location: path or fsspec URL of a run or model directory, or of an exported file.
        calibrate: use the temperature that the run's evaluation fitted, if there is one.
    """
    parsed = Location.parse(location)
    if not parsed.is_remote:
        yield open_model(parsed.path, calibrate=calibrate)
        return
    name = PurePosixPath(parsed.path.partition("?")[0]).name
    with tempfile.TemporaryDirectory(prefix="podscale-model-") as directory:
        file = Path(directory, name) if Path(name).suffix in SUFFIXES else None
        _copy_model(location, Path(directory), file)
        yield open_model(directory if file is None else file, calibrate=calibrate)


def _copy_model(location: str, target: Path, exported: Path | None) -> None:
    """Copy the model's files, and those of its run that a prediction reads. Raises InputError.

    Args:
        exported: copy of an exported file; None for a directory.
    """
    try:
        storage = open_storage(location)
        if exported is not None:
            exported.write_bytes(storage.read(b""))
            return
        for file in storage.files():
            path = decode_name(file.path)
            folder, _, name = path.rpartition("/")
            if folder == "model" or (not folder and (name in TOP_FILES or name.startswith("model."))):
                copy = target / path
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(storage.read(file.path))
    except (OSError, InputError) as error:
        problem = error.problem if isinstance(error, InputError) else f"cannot be read: {error}"
        raise InputError(problem, field="MODEL", got=location) from error
