"""Model of a server, in a directory or behind a URL."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from podscale.errors import InputError
from podscale.runs.user_code import MODEL_CODE
from podscale.serving.model_location import opened_model
from tests.support.prediction import CLASSES, write_model_run

STORE = "memory://models"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = write_model_run(tmp_path_factory.mktemp("model"))
    return Path(config.run.workspace) / "runs" / config.run.id


@pytest.fixture
def store(run: Path) -> Iterator[fsspec.AbstractFileSystem]:
    """Store with the run and its model directory."""
    memory = fsspec.filesystem("memory")
    (run / "model" / MODEL_CODE).write_bytes(b"code")
    memory.put(str(run), "/models/run", recursive=True)
    memory.put(str(run / "model"), "/models/model", recursive=True)
    memory.pipe("/models/run/checkpoints/step-1", bytes(1000))
    yield memory
    memory.rm("/models", recursive=True)


@pytest.mark.parametrize("name", ["run", "model"])
def test_a_model_behind_a_url_is_the_same(name: str, run: Path, store: fsspec.AbstractFileSystem) -> None:
    with opened_model(f"{STORE}/{name}") as remote:
        directory = remote.files.directory
        assert list(remote.classes) == CLASSES
        assert remote.files.weights.read_bytes() == (run / "model" / "model.safetensors").read_bytes()
        assert (directory / MODEL_CODE).read_bytes() == b"code"
        assert not (directory.parent / "checkpoints").exists(), "only what a prediction reads is copied"
        with opened_model(str(run)) as local:
            assert remote.config.input == local.config.input
    assert not directory.exists()


def test_a_url_without_a_model_is_refused(run: Path, store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error, opened_model("memory://nothing"):
        pass
    assert error.value.field == "MODEL"
    shutil.copytree(run, tmp_path / "run")
    with pytest.raises(InputError), opened_model(str(tmp_path)):
        pass
