"""Model of a prediction or a server: a directory, an exported file, or the copy of one behind a URL."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from podscale.errors import InputError
from podscale.export.export_model import export_model
from podscale.export.export_options import ExportOptions
from podscale.prediction.model import PredictionModel, build_classifier, open_model_at
from podscale.runs.user_code import MODEL_CODE
from podscale.serving.app import describe_model
from podscale.serving.metrics import ServingMetrics
from podscale.serving.options import ServeOptions
from podscale.serving.service import ClassificationService
from podscale.util.files import file_sha256
from tests.support.prediction import CLASSES

STORE = "memory://models"


@pytest.fixture
def store(model_run: Path) -> Iterator[fsspec.AbstractFileSystem]:
    """Store with the run and its model directory."""
    memory = fsspec.filesystem("memory")
    memory.put(str(model_run), "/models/run", recursive=True)
    memory.put(str(model_run / "model"), "/models/model", recursive=True)
    memory.pipe("/models/run/checkpoints/step-1", bytes(1000))
    for folder in ("run/model", "model"):
        memory.pipe(f"/models/{folder}/{MODEL_CODE}", b"code")
    yield memory
    memory.rm("/models", recursive=True)


@pytest.mark.parametrize("name", ["run", "model"])
def test_a_model_behind_a_url_is_the_same(name: str, model_run: Path, store: fsspec.AbstractFileSystem) -> None:
    with open_model_at(f"{STORE}/{name}") as remote:
        directory = remote.files.directory
        assert list(remote.classes) == CLASSES
        assert remote.files.weights.read_bytes() == (model_run / "model" / "model.safetensors").read_bytes()
        assert (directory / MODEL_CODE).read_bytes() == b"code"
        assert not (directory.parent / "checkpoints").exists(), "only what a prediction reads is copied"
        with open_model_at(str(model_run)) as local:
            assert remote.config.input == local.config.input
    assert not directory.exists()


def test_an_exported_file_is_a_model_here_and_behind_a_url(
    model_run: Path, store: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    file = tmp_path / "model.torchscript"
    export_model(model_run, ExportOptions(format="torchscript", out=file, limit=3))
    store.put(str(file), "/models/model.torchscript")
    with open_model_at(str(model_run)) as model:
        expected = {**describe(model), "exported": file_sha256(file)}
    for location in (str(file), f"file://{file}", f"{STORE}/model.torchscript"):
        with open_model_at(location) as model:
            assert describe(model) == expected
            zeros = np.zeros((2, 32, 32, 3), np.uint8)
            assert build_classifier(model).log_probabilities(zeros).shape == (2, len(CLASSES))


def describe(model: PredictionModel) -> dict[str, Any]:
    metrics = ServingMetrics(CollectorRegistry(), model=model.files.name, process=0)
    service = ClassificationService(model, lambda: build_classifier(model), ServeOptions(), metrics)
    try:
        return describe_model(service)
    finally:
        service.close()


def test_a_model_without_its_weights_is_refused(model_run: Path, tmp_path: Path) -> None:
    shutil.copytree(model_run / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with open_model_at(str(tmp_path / "model")) as model, pytest.raises(InputError) as error:
        describe(model)
    assert error.value.field == str(tmp_path / "model" / "model.safetensors")


def test_a_url_without_a_model_is_refused(model_run: Path, store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error, open_model_at("memory://nothing"):
        pass
    assert error.value.field == "MODEL"
    shutil.copytree(model_run, tmp_path / "run")
    with pytest.raises(InputError), open_model_at(str(tmp_path)):
        pass
