"""Model of a server, in a directory or behind a URL."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from podscale.errors import InputError
from podscale.export.export_model import ExportOptions, export_model
from podscale.prediction.model import PredictionModel, build_classifier
from podscale.runs.user_code import MODEL_CODE
from podscale.serving.app import describe_model
from podscale.serving.metrics import ServingMetrics
from podscale.serving.model_location import opened_model
from podscale.serving.options import ServeOptions
from podscale.serving.service import ClassificationService
from podscale.util.files import file_sha256
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
    memory.put(str(run), "/models/run", recursive=True)
    memory.put(str(run / "model"), "/models/model", recursive=True)
    memory.pipe("/models/run/checkpoints/step-1", bytes(1000))
    for folder in ("run/model", "model"):
        memory.pipe(f"/models/{folder}/{MODEL_CODE}", b"code")
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


def test_an_exported_file_is_a_model_here_and_behind_a_url(
    run: Path, store: fsspec.AbstractFileSystem, tmp_path: Path, metrics: ServingMetrics
) -> None:
    file = tmp_path / "model.torchscript"
    export_model(run, ExportOptions(format="torchscript", out=file, limit=3))
    store.put(str(file), "/models/model.torchscript")
    with opened_model(str(run)) as model:
        expected = {**describe(model, metrics), "exported": file_sha256(file)}
    for location in (str(file), f"file://{file}", f"{STORE}/model.torchscript"):
        with opened_model(location) as model:
            assert describe(model, metrics) == expected
            zeros = np.zeros((2, 32, 32, 3), np.uint8)
            assert build_classifier(model).log_probabilities(zeros).shape == (2, len(CLASSES))


def describe(model: PredictionModel, metrics: ServingMetrics) -> dict[str, Any]:
    service = ClassificationService(model, lambda: build_classifier(model), ServeOptions(), metrics)
    try:
        return describe_model(service)
    finally:
        service.close()


def test_a_model_without_its_weights_is_refused(run: Path, tmp_path: Path, metrics: ServingMetrics) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with opened_model(str(tmp_path / "model")) as model, pytest.raises(InputError) as error:
        describe(model, metrics)
    assert error.value.field == str(tmp_path / "model" / "model.safetensors")


def test_a_url_without_a_model_is_refused(run: Path, store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error, opened_model("memory://nothing"):
        pass
    assert error.value.field == "MODEL"
    shutil.copytree(run, tmp_path / "run")
    with pytest.raises(InputError), opened_model(str(tmp_path)):
        pass
