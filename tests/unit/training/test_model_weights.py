"""Exported model: other libraries can read it, and weights that do not fit are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from podscale.config import ModelSection, RunConfig
from podscale.pytorch.models import build_model
from podscale.pytorch.train_state import as_array, load_weights_file
from podscale.runs.ensemble_members import MODEL_JSON
from podscale.runs.model_files import WEIGHTS_FILE
from podscale.training.model_weights import TrainedModel, export_model
from podscale.training.run_progress import RunProgress
from tests.support.refusals import refused

SECTION = ModelSection(name="resnet18")
TRAINED = TrainedModel(RunConfig(model=SECTION), ["ant", "bee", "cat"], RunProgress(step=7, evaluation={"top1": 0.5}))


def arrays_of(model: torch.nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {name: as_array(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def test_torchvision_reads_the_weights(tmp_path: Path) -> None:
    model = build_model(SECTION, 3).to(memory_format=torch.channels_last)
    export_model(arrays_of(model), TRAINED, tmp_path / "model")
    import torchvision  # not at the top: it takes seconds, in every process that collects this test

    theirs = torchvision.models.resnet18(num_classes=3)
    theirs.load_state_dict(load_file(tmp_path / "model" / WEIGHTS_FILE), strict=True)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(theirs.eval()(images), model.eval()(images), rtol=1e-4, atol=1e-5)
    description = json.loads((tmp_path / "model" / MODEL_JSON).read_text())
    assert description["classes"] == ["ant", "bee", "cat"]
    assert description["architecture"]["name"] == "resnet18"
    assert description["preprocessing"]["image_size"] == 224
    assert description["training"]["updates"] == 7
    assert description["parameters"] == sum(p.numel() for p in theirs.parameters())


def test_weights_are_loaded_to_the_bit(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first, second = build_model(SECTION, 3), build_model(SECTION, 3)
    first.get_buffer("bn1.running_var").uniform_(1, 2)
    export_model(arrays_of(first), TRAINED, tmp_path)
    load_weights_file(second, tmp_path / WEIGHTS_FILE)
    other = second.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in first.state_dict().items())


def test_missing_damaged_and_foreign_weights_are_refused(tmp_path: Path) -> None:
    model = build_model(SECTION, 3)
    with refused("`podscale train`", field=tmp_path / WEIGHTS_FILE):
        load_weights_file(model, tmp_path / WEIGHTS_FILE)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"no weights")
    with refused("cannot read", field=tmp_path / WEIGHTS_FILE):
        load_weights_file(model, tmp_path / WEIGHTS_FILE)
    export_model(arrays_of(build_model(SECTION, 4)), TRAINED, tmp_path)
    with refused("architecture", field=tmp_path / WEIGHTS_FILE):
        load_weights_file(model, tmp_path / WEIGHTS_FILE)
