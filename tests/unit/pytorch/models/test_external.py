"""Models of torchvision, timm and a user's module: their entries, their batch norm, and what is refused."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from podscale import models
from podscale.config import ModelSection, RunConfig
from podscale.config.model import BatchNormSection
from podscale.config.optimizer import OptimizerSection
from podscale.errors import InputError
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.models import build_model
from podscale.pytorch.models.external import convert_batch_norm, find_factory
from podscale.pytorch.models.state import model_arrays
from podscale.training.param_layout import param_options
from podscale.training.preflight import model_problem

USER = "python:tests.support.user_models"


def spec_of(name: str, classes: int = 10, **options: Any) -> models.ModelSpec:
    return models.model_spec(ModelSection(name=name, options=options), classes)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_entry_of_torchvisions_network_is_that_of_ours(name: str) -> None:
    ours, theirs = spec_of(name), spec_of(f"torchvision:{name}")
    assert {p.name: (p.shape, p.role) for p in theirs.parameters} == {
        p.name: (p.shape, p.role) for p in ours.parameters
    }
    assert {b.name: b.shape for b in theirs.buffers} == {b.name: b.shape for b in ours.buffers}
    assert theirs.flops(64) == ours.flops(64)
    assert theirs.saved_elements(64) == pytest.approx(ours.saved_elements(64), rel=0.15)
    section = OptimizerSection(name="lars", skip=("fc.*",))
    assert param_options(section, theirs) == param_options(section, ours)


def test_costs_of_a_network_counted_by_hand() -> None:
    spec = spec_of(f"{USER}:depthwise", 5, channels=4)
    pixels = 12 * 12
    flops = 2 * (3 * 4 * 9 * pixels + 4 * 9 * pixels + 4 * 5)
    assert (spec.flops(12), spec.training_flops(12)) == (
        flops,
        3 * flops,
    )  # torch's own count of backward is 4 times that
    assert spec.num_parameters == 4 * 27 + 8 + 4 * 9 + 4 + 4 * 5 + 5
    # Kept: the image, the first convolution's output, its norm's output, the pooled values; mean and deviation of 2
    # groups. (The pooling needs the shape of its input alone.)
    assert spec.saved_elements(12) == pytest.approx(3 * pixels + 4 * pixels + 4 * pixels + 4 + 4, abs=4 * pixels)


def test_a_users_function_takes_any_keyword_that_it_declares() -> None:
    spec = spec_of(f"{USER}:with_keywords", channels=4, times=2)
    assert spec.array_shapes["0.weight"] == (8, 3, 3, 3)
    with pytest.raises(InputError) as error:
        spec_of("torchvision:resnet18", chanels=4)
    assert error.value.field == "model.options.chanels", "a library's function passes them to the model's class"


@pytest.mark.parametrize("name", ["resnet18", "torchvision:resnet18"])
def test_frozen_parameters_take_no_memory_and_less_of_backward(name: str) -> None:
    whole = spec_of(name)
    names = [parameter.name for parameter in whole.parameters]
    head = whole.freeze([name for name in names if not name.startswith("fc.")])
    assert (head.num_parameters, head.array_shapes.keys()) == (5130, whole.array_shapes.keys())
    assert head.flops(64) == whole.flops(64)
    # The whole network's backward is twice its forward, and the classifier's half of that, without one for its input.
    assert head.training_flops(64) - head.flops(64) == pytest.approx(2 * 512 * 10, rel=0.6)
    largest = 64 * 32 * 32  # of the first convolution
    assert head.saved_elements(64) == 2 * largest < whole.saved_elements(64) / 3
    half = whole.freeze([name for name in names if name.startswith(("conv1.", "bn1.", "layer1."))])
    for cost in (type(whole).training_flops, type(whole).saved_elements):
        assert cost(head, 64) < cost(half, 64) < cost(whole, 64)  # type: ignore[operator]
    assert whole.training_flops(64) == spec_of(name).training_flops(64), "the entry itself is as it was"


def test_frozen_layers_cost_what_torch_counts() -> None:
    """Convolutions without groups, which torch's counter counts in backward as well."""
    spec = spec_of("resnet18")
    frozen = [p.name for p in spec.parameters if p.name.startswith(("conv1.", "bn1.", "layer1.0.", "layer2."))]
    network = build_model(ModelSection(name="resnet18"), 10)
    for name in frozen:
        network.get_parameter(name).requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, 64, 64)).sum().backward()
    assert spec.freeze(frozen).training_flops(64) == counter.get_total_flops()
    theirs = spec_of("torchvision:resnet18")
    assert theirs.freeze(frozen).training_flops(64) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_roles_follow_from_the_layers() -> None:
    roles = {p.name: p.role for p in spec_of(f"{USER}:Tokens").parameters}
    assert roles == {
        "cls_token": "embedding",
        "pos_embed": "embedding",
        "gamma": "norm_scale",
        "mixing": "weight",
        "patch.weight": "weight",
        "patch.bias": "bias",
        "table.weight": "embedding",
        "norm.weight": "norm_scale",
        "norm.bias": "norm_bias",
        "head.weight": "weight",
        "head.bias": "bias",
    }


def test_frozen_parameters_are_arrays_of_the_checkpoint_and_constants_are_not() -> None:
    spec = spec_of(f"{USER}:Frozen", 3)
    assert [p.name for p in spec.parameters] == ["norm.weight", "norm.bias", "fc.weight", "fc.bias"]
    assert [b.name for b in spec.buffers] == ["norm.running_mean", "norm.running_var", "scale"]
    network = build_model(ModelSection(name=f"{USER}:Frozen"), 3)
    assert {name: tuple(array.shape) for name, array in model_arrays(network).items()} == spec.array_shapes
    assert spec_of(f"{USER}:Tokens").buffers == ()


def test_a_models_own_epsilon_and_momentum_stay_unless_the_document_sets_them() -> None:
    def norm(**values: float) -> Any:
        return build_model(ModelSection(name=f"{USER}:Frozen", batch_norm=BatchNormSection(**values)), 3).norm

    assert (norm().eps, norm().momentum) == (1e-3, 0.01)
    changed = norm(eps=1e-4, momentum=0.2)
    assert (changed.eps, changed.momentum) == (1e-4, 0.2)


@pytest.mark.parametrize("rows", [(6, 4), (6, 4, 5), (6, 4, 5, 3), (6, 4, 3, 2, 2)])
def test_converted_batch_norm_computes_what_torchs_does(rows: tuple[int, ...]) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(rows)]
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Identity(), kind(4))
    nn.init.uniform_(theirs[1].weight)
    ours = convert_batch_norm(deepcopy(theirs), BatchNormSection(), "x")
    assert isinstance(ours[1], BatchNorm)  # type: ignore[index]
    x = torch.randn(rows)
    assert torch.equal(ours(x), theirs(x))
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(ours[1], name), getattr(theirs[1], name))  # type: ignore[index]
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_timms_batch_norm_with_activation_is_converted_with_it() -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed (pip install 'podscale[timm]')")
    theirs = timm.create_model("test_efficientnet", num_classes=4)
    ours = convert_batch_norm(deepcopy(theirs), BatchNormSection(), "x")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in ours.modules())
    x = torch.randn(3, 3, 32, 32)
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]


def test_initial_weights_depend_on_the_seed_alone() -> None:
    """The entry is derived before or after; its random numbers are not those of the weights."""
    section = ModelSection(name=f"{USER}:depthwise")
    weights = []
    for derives in (False, True):
        torch.manual_seed(4)
        if derives:
            models.model_spec(section, 7)
        weights.append(build_model(section, 7))
    for first, second in zip(*(network.parameters() for network in weights), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("torchvision:resnt50", {}, "model.name"),
        (f"{USER}:nothing", {}, "model.name"),
        ("python:no_such_module_here:f", {}, "model.name"),
        (f"{USER}:NOT_CALLABLE", {}, "model.name"),
        (f"{USER}:no_module", {}, "model.name"),
        (f"{USER}:fails", {}, "model.name"),
        (f"{USER}:without_statistics", {}, "model.name"),
        (f"{USER}:TwoHeads", {}, "model.name"),
        (f"{USER}:Counting", {}, "model.name"),
        (f"{USER}:Unused", {}, "model.name"),
        ("torchvision:googlenet", {}, "model.name"),
        (f"{USER}:depthwise", {"chanels": 4}, "model.options.chanels"),
        (f"{USER}:depthwise", {"num_classes": 4}, "model.options.num_classes"),
        (f"{USER}:depthwise", {"channels": 3}, "model.options"),
        ("torchvision:vit_b_16", {"weights": "DEFAULT"}, "model.options.weights"),
        ("torchvision:vit_b_16", {}, "input.image_size"),
        (f"{USER}:Tokens", {"side": 3}, "input.image_size"),
    ],
)
@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_models_that_cannot_be_trained_are_refused_before_anything_starts(
    name: str, options: dict[str, Any], key: str
) -> None:
    config = RunConfig.model_validate({"model": {"name": name, "options": options}, "input": {"image_size": 16}})
    error = model_problem(config, 4)
    assert error is not None
    assert error.field == key


def test_similar_names_are_proposed() -> None:
    with pytest.raises(InputError) as error:
        find_factory("torchvision:resnt50")
    assert "torchvision:resnet50" in error.value.hint
    with pytest.raises(InputError) as error:
        find_factory(f"{USER}:depthwse")
    assert "depthwise" in error.value.hint
    with pytest.raises(InputError) as error:
        find_factory("torchvision:vit_b_16").check_options({"atention_dropout": 0.1})
    assert "attention_dropout" in error.value.hint


def test_the_size_of_evaluation_is_tried_too() -> None:
    values = {
        "model": {"name": f"{USER}:Tokens"},
        "input": {"image_size": 16},
        "evaluate": {"image_size": 32},
    }
    error = model_problem(RunConfig.model_validate(values), 4)
    assert error is not None
    assert (error.field, error.got) == ("input.image_size", 32)
