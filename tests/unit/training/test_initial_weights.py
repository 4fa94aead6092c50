"""Weights of torchvision, timm and Podscale in a run's model: equal outputs, the classifier, what does not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from podscale.config import RunConfig
from podscale.data.manifest import classes_sha256
from podscale.pytorch.models import build_model
from podscale.pytorch.models.state import model_arrays
from podscale.pytorch.weight_sources import read_source
from podscale.training.initial_weights import InitialWeights, SourceWeights, fit_weights
from tests.support.refusals import refused

CLASSES = 6
NAMES = [f"class {number}" for number in range(CLASSES)]


def lively(network: nn.Module) -> nn.Module:
    """Return the network in evaluation mode, with statistics and scales that are not those of a new network."""
    torch.manual_seed(2)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0.0, 0.1)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
                module.weight.normal_(1.0, 0.1)
    return network.eval()


def document(model: dict[str, Any], weights: str, **train: Any) -> RunConfig:
    start = {"weights": weights, "rename": train.pop("rename", [])}
    return RunConfig.model_validate(
        {"model": model, "train": {"start_from": start, **train}, "input": {"image_size": 96}}
    )


def loaded(config: RunConfig, initial: InitialWeights, classes: int = CLASSES) -> nn.Module:
    network = build_model(config.model, classes)
    with torch.no_grad():
        for name, array in model_arrays(network).items():
            array.copy_(torch.from_numpy(initial.arrays[name]))
    return network.eval()


def torchvision_network(name: str, **options: Any) -> nn.Module:
    import torchvision  # not at the top: it takes seconds, in every process that collects these tests

    network: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)
    return network


def timm_network(name: str, **options: Any) -> nn.Module:
    timm = pytest.importorskip("timm", reason="timm is not installed (pip install 'podscale[timm]')")
    network: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
    return network


@pytest.mark.parametrize(
    ("build", "model"),
    [
        (lambda: torchvision_network("resnet18"), {"name": "resnet18"}),
        (lambda: torchvision_network("resnet50"), {"name": "resnet50"}),
        (lambda: timm_network("resnet18"), {"name": "resnet18"}),
        (lambda: timm_network("resnetv2_50"), {"name": "resnet50", "block": "v2"}),
        (lambda: timm_network("inception_resnet_v2"), {"name": "inception_resnet_v2", "batch_norm": {"eps": 1e-3}}),
        (lambda: torchvision_network("regnet_y_400mf"), {"name": "torchvision:regnet_y_400mf"}),
        (
            lambda: timm_network("test_vit", img_size=96),
            {"name": "timm:test_vit", "options": {"img_size": 96}},
        ),
    ],
    ids=["torchvision resnet18", "torchvision resnet50", "timm resnet18", "timm v2", "timm inception", "regnet", "vit"],
)
def test_weights_of_other_libraries_give_equal_outputs(
    build: Callable[[], nn.Module], model: dict[str, Any], tmp_path: Path
) -> None:
    theirs = lively(build())
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    config = document(model, str(tmp_path / "weights.safetensors"))
    initial = fit_weights(config, NAMES, read_source(config))
    images = torch.randn(2, 3, 96, 96)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(config, initial)(images), theirs(images), rtol=1e-5, atol=1e-5)
    assert initial.provenance["head"] == "kept"
    assert initial.provenance["skipped"] == initial.provenance["initialised"] == []
    assert initial.provenance["loaded"] == len(initial.arrays)


def source_of(model: dict[str, Any], classes: int, **options: Any) -> SourceWeights:
    section = RunConfig.model_validate({"model": model}).model
    arrays = {name: array.numpy() for name, array in model_arrays(build_model(section, classes)).items()}
    return SourceWeights(arrays, {"source": "s"}, **options)


def hash_of(same: bool | None) -> str | None:
    """Return the hash of the run's classes or of others, as a source records it; None: it lists no classes."""
    return None if same is None else classes_sha256(NAMES if same else NAMES[::-1])


RESNET = {"name": "resnet18", "width": 4}


@pytest.mark.parametrize(
    ("head", "classes", "same", "replaced"),
    [
        ("auto", CLASSES, None, False),
        ("auto", 3, None, True),
        ("auto", CLASSES, True, False),
        ("auto", CLASSES, False, True),
        ("replace", CLASSES, True, True),
        ("keep", CLASSES, None, False),
    ],
)
def test_the_head_is_replaced_if_the_classes_differ(head: str, classes: int, same: bool | None, replaced: bool) -> None:
    config = document(RESNET, "w.pth", head=head)
    initial = fit_weights(config, NAMES, source_of(RESNET, classes, classes_sha256=hash_of(same)))
    names = ["fc.weight", "fc.bias"]
    assert initial.provenance["head"] == ("replaced" if replaced else "kept")
    assert initial.provenance["skipped"] == initial.provenance["initialised"] == (names if replaced else [])
    assert [name for name in names if name in initial.arrays] == ([] if replaced else names)


@pytest.mark.parametrize(("classes", "same"), [(3, None), (CLASSES, False)])
def test_a_head_of_other_classes_is_not_kept(classes: int, same: bool | None) -> None:
    config = document(RESNET, "w.pth", head="keep")
    with refused(field="train.head", got="keep"):
        fit_weights(config, NAMES, source_of(RESNET, classes, classes_sha256=hash_of(same)))


def test_what_does_not_fit_is_listed_and_refused_unless_it_may_differ() -> None:
    source = source_of(RESNET, CLASSES)
    arrays = dict(source.arrays)
    del arrays["bn1.weight"]
    arrays["conv1.weight"] = np.zeros((8, 3, 7, 7), np.float32)
    arrays["teacher.bias"] = np.zeros(3, np.float32)
    arrays["bn1.num_batches_tracked"] = np.zeros((), np.float32)
    changed = SourceWeights(arrays, {})
    with refused(
        "bn1.weight", "conv1.weight", "teacher.bias", field="train.start_from.weights", got="w.pth"
    ) as refusal:
        fit_weights(document(RESNET, "w.pth"), NAMES, changed)
    assert "num_batches_tracked" not in refusal.text
    initial = fit_weights(document(RESNET, "w.pth", start_from_strict=False), NAMES, changed)
    assert initial.provenance["skipped"] == ["conv1.weight", "teacher.bias"]
    assert initial.provenance["initialised"] == ["conv1.weight", "bn1.weight"]


def test_weights_of_another_model_are_refused_even_if_they_may_differ() -> None:
    config = document({"name": "alexnet", "width": 4}, "w.pth", start_from_strict=False)
    with refused(field="train.start_from.weights"):
        fit_weights(config, NAMES, source_of(RESNET, CLASSES))


def test_names_are_changed_by_the_document() -> None:
    source = source_of(RESNET, CLASSES)
    foreign = SourceWeights({f"trunk/{name.replace('.', '/')}": a for name, a in source.arrays.items()}, {})
    config = document(RESNET, "w.pth", rename=[["^trunk/", ""], ["/", "."]])
    initial = fit_weights(config, NAMES, foreign)
    assert all(np.array_equal(initial.arrays[name], array) for name, array in source.arrays.items())


def test_two_arrays_of_one_name_are_refused() -> None:
    """None of them may replace the other without a word."""
    arrays = dict(source_of(RESNET, CLASSES).arrays)
    both = SourceWeights({**arrays, "ema.fc.bias": np.zeros(CLASSES, np.float32)}, {})
    with refused("fc.bias", field="train.start_from.weights", got="w.pth"):
        fit_weights(document(RESNET, "w.pth", rename=[["^ema.", ""]]), NAMES, both)
    wrapped = {f"module.{name}": array for name, array in arrays.items()}
    with refused("fc.bias", field="train.start_from.weights"):
        fit_weights(document(RESNET, "w.pth"), NAMES, SourceWeights({**wrapped, "fc.bias": arrays["fc.bias"]}, {}))
