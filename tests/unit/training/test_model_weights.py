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
from podscale.runs.checkpoint.format import CheckpointEntry, CheckpointManifest, RunIdentity
from podscale.runs.ensemble_members import MODEL_JSON
from podscale.runs.model_files import WEIGHTS_FILE
from podscale.training.initial_weights import entry_of_epoch
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


def saved_after(step: int, **epochs: float) -> CheckpointEntry:
    return CheckpointEntry(Path(f"step-{step}"), CheckpointManifest(step, RunIdentity({}, "c", "f"), (), epochs))


def test_a_checkpoint_is_found_by_its_epoch_whatever_the_batches_were() -> None:
    """Ten steps an epoch, then two: an average step is shorter than the last one; then ten again: it is longer."""
    large, small = saved_after(12, epoch=2.0, epoch_before=1.5), saved_after(17, epoch=2.5, epoch_before=2.4)
    entries = [small, large, saved_after(10, epoch=1.0, epoch_before=0.9)]
    assert entry_of_epoch(entries, 1.6, "r") is entry_of_epoch(entries, 2.0, "r") is large
    assert entry_of_epoch(entries, 2.5, "r") is small
    for epoch in (1.2, 1.5, 2.38, 2.6):
        with refused("epochs 1, 2, 2.5", field="train.start_from.epoch", got=epoch):
            entry_of_epoch(entries, epoch, "r")
    older = saved_after(4, epoch=2.0)
    assert entry_of_epoch([older], 1.6, "r") is older
    with refused("epochs 2", field="train.start_from.epoch"):
        entry_of_epoch([older], 1.5, "r")
