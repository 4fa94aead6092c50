"""Networks of both engines: one safetensors file gives the same outputs, gradients and running statistics."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from podscale import models
from podscale.config import ModelSection, RunConfig
from podscale.jax.models import build_model, initialise
from podscale.jax.train_state import load_weights_file
from podscale.pytorch.models import build_model as build_torch_model
from podscale.pytorch.models import set_stem_compute
from podscale.pytorch.train_state import load_weights_file as load_into_torch
from podscale.runs.model_files import WEIGHTS_FILE
from podscale.training.model_weights import TrainedModel, export_model
from podscale.training.run_progress import RunProgress
from tests.support.refusals import refused

CLASSES = 7


def section(name: str, **options: Any) -> ModelSection:
    return ModelSection.model_validate({"name": name, "width": 8, **options})


def torch_network(model: ModelSection) -> torch.nn.Module:
    """Return a network without arrays of zeros or ones."""
    torch.manual_seed(3)
    network = build_torch_model(model, CLASSES)
    for name, parameter in network.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.2)
    for name, buffer in network.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
        else:
            buffer.normal_(0.0, 0.3)
    return network


def load_torch(network: torch.nn.Module, parameters: Any, statistics: Any) -> None:
    arrays = {**parameters, **statistics}
    network.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})


def images(side: int, count: int = 6) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).normal(size=(count, side, side, 3)).astype(np.float32)


def save_torch(network: torch.nn.Module, directory: Path) -> Path:
    arrays = {name: t.detach().numpy() for name, t in (*network.named_parameters(), *network.named_buffers())}
    save_file(arrays, directory / WEIGHTS_FILE)
    return directory / WEIGHTS_FILE


def compare_outputs(
    network: torch.nn.Module, model: ModelSection, arrays: tuple[Any, Any], batch: Any, *, ways: tuple[bool, ...]
) -> None:
    """Compare outputs in fp32; `ways` has the values of `train`."""
    of_images = torch.from_numpy(batch).permute(0, 3, 1, 2)
    apply = build_model(model)
    for train in ways:
        load_torch(network.train(train), *arrays)
        outputs = jax.jit(partial(apply, train=train))(*arrays, batch)[0]
        with torch.no_grad():
            np.testing.assert_allclose(outputs, network(of_images), rtol=1e-4, atol=1e-4)


ALEXNETS = ["alexnet", "alexnet of one tower"]


@pytest.mark.shallow
@pytest.mark.parametrize(
    ("model", "side"),
    [
        (section("resnet18"), 33),
        (section("resnet50", stem="small"), 8),
        (section("resnet20", width=64, blurpool=True), 9),
        (section("resnet20", block="v2"), 9),
        (section("resnet50", block="v2"), 33),
        (section("alexnet", alexnet={"groups": 2, "dropout": 0.0}), 63),
        (section("alexnet", alexnet={"groups": 1, "dropout": 0.0, "convolution_norm": False}), 224),
    ],
    ids=["resnet18", "resnet50 with small stem", "resnet20 with blur", "resnet20 v2", "resnet50 v2", *ALEXNETS],
)
def test_one_file_gives_both_engines_the_same_network(model: ModelSection, side: int, tmp_path: Path) -> None:
    """Outputs are compared in fp32, gradients and running statistics in fp64, in which rounding hides no difference."""
    network = torch_network(model)
    spec = models.model_spec(model, CLASSES)
    parameters, statistics = load_weights_file(spec, save_torch(network, tmp_path))
    batch = images(side, 2 if side > 100 else 6)
    compare_outputs(network, model, (parameters, statistics), batch, ways=(False, True))

    of_images = torch.from_numpy(batch).permute(0, 3, 1, 2)
    direction = np.random.default_rng(2).normal(size=(len(batch), CLASSES))
    load_torch(network.double(), parameters, statistics)
    (network(of_images.double()) * torch.from_numpy(direction)).sum().backward()
    with jax.enable_x64(True):
        exact = build_model(model, dtype="float64")
        given = {name: np.asarray(array, np.float64) for name, array in {**parameters, **statistics}.items()}

        def along(trained: Any) -> Any:
            logits, moved = exact(trained, {b.name: given[b.name] for b in spec.buffers}, batch, train=True)
            return (logits * direction).sum(), moved

        gradients, moved = jax.jit(jax.grad(along, has_aux=True))({p.name: given[p.name] for p in spec.parameters})
        for name, parameter in network.named_parameters():
            scale = float(parameter.grad.abs().max())
            tolerance = 1e-12 + 1e-7 * scale  # biases before a batch norm have gradients of rounding only
            np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-6, atol=tolerance, err_msg=name)
        for name, buffer in network.named_buffers():
            np.testing.assert_allclose(moved[name], buffer, rtol=1e-9, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("name", ["resnet34", "resnet101", pytest.param("resnet152", marks=pytest.mark.slow)])
def test_deep_networks_give_both_engines_the_same_outputs(name: str, tmp_path: Path) -> None:
    """The other ImageNet networks, in evaluation mode; only their number of blocks differs."""
    model = section(name)
    network = torch_network(model)
    arrays = load_weights_file(models.model_spec(model, CLASSES), save_torch(network, tmp_path))
    compare_outputs(network, model, arrays, images(32, 4), ways=(False,))


def test_torch_reads_the_weights_that_jax_writes(tmp_path: Path) -> None:
    model = section("resnet18", stem="small")
    parameters, statistics = initialise(model, CLASSES, seed=4)
    export_model(
        {**parameters, **statistics}, TrainedModel(RunConfig(model=model), ["?"] * CLASSES, RunProgress()), tmp_path
    )
    network = build_torch_model(model, CLASSES)
    load_into_torch(network, tmp_path / WEIGHTS_FILE)
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        np.testing.assert_array_equal({**parameters, **statistics}[name], tensor.detach(), err_msg=name)
    with refused("architecture", field=tmp_path / WEIGHTS_FILE):
        load_weights_file(models.model_spec(section("resnet34"), CLASSES), tmp_path / WEIGHTS_FILE)
    with refused("`podscale train`", field=tmp_path / "elsewhere"):
        load_weights_file(models.model_spec(model, CLASSES), tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("name", "count"),
    [("resnet18", 11_689_512), ("resnet50", 25_557_032), ("resnet32", 528_504), ("alexnet", 60_967_112)],
)
def test_parameter_counts(name: str, count: int) -> None:
    """Counts of torchvision, and of the published AlexNet with two values per channel instead of each bias."""
    model = ModelSection(name=name)
    parameters, statistics = initialise(model, 1000, seed=0)
    assert sum(array.size for array in parameters.values()) == count
    spec = models.model_spec(model, 1000)
    assert {name: array.shape for name, array in parameters.items()} == {p.name: p.shape for p in spec.parameters}
    assert {name: array.shape for name, array in statistics.items()} == {b.name: b.shape for b in spec.buffers}


@pytest.mark.parametrize(
    "model",
    [{"name": "resnet18"}, {"name": "resnet50"}, {"name": "resnet50", "block": "v2"}, {"name": "alexnet"}],
    ids=["resnet18", "resnet50", "resnet50 v2", "alexnet"],
)
def test_initial_weights_have_torchs_distributions(model: Any) -> None:
    """Zeros and ones are in the same places, and standard deviations are equal."""
    model = ModelSection.model_validate({**model, "width": 16})
    parameters, statistics = initialise(model, CLASSES, seed=1)
    torch.manual_seed(0)
    network = build_torch_model(model, CLASSES)
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        ours, theirs = np.asarray({**parameters, **statistics}[name]), tensor.detach().numpy()
        if theirs.std() == 0:
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
        else:
            few = 6 / np.sqrt(theirs.size)
            np.testing.assert_allclose(ours.std(), theirs.std(), rtol=few, err_msg=name)
            assert abs(ours.mean()) < few * theirs.std(), name
    again, other = (initialise(model, CLASSES, seed=seed)[0]["conv1.weight"] for seed in (1, 2))
    np.testing.assert_array_equal(again, parameters["conv1.weight"])
    assert not np.array_equal(other, parameters["conv1.weight"])


@pytest.mark.parametrize("compute", ["padded4", "space_to_depth"])
def test_every_way_equals_the_plain_stem(compute: Any) -> None:
    from podscale.jax.models.layers import stem_convolution

    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        for kernel, stride, padding in ((7, 2, 3), (11, 4, 2), (5, 3, 0)):
            for side in ((64, 64), (63, 50)):
                batch = jnp.asarray(generator.normal(size=(2, *side, 3)))
                weight = jnp.asarray(generator.normal(size=(4, 3, kernel, kernel)))

                def of(way: Any, batch: Any = batch, stride: int = stride, padding: int = padding) -> Any:
                    return lambda filters: stem_convolution(batch, filters, stride, padding, way)

                want, back = jax.vjp(of("plain"), weight)
                outputs, other_back = jax.vjp(of(compute), weight)
                np.testing.assert_allclose(outputs, want, rtol=1e-11, atol=1e-12)
                direction = jnp.asarray(generator.normal(size=want.shape))
                np.testing.assert_allclose(other_back(direction)[0], back(direction)[0], rtol=1e-11, atol=1e-10)


def test_a_folded_stem_has_no_stride() -> None:
    """It has twelve input channels and a 4 x 4 kernel at stride 1. A stem of stride 1 stays plain."""
    from podscale.jax.models.layers import stem_convolution

    def lowered(stride: int, kernel: int) -> str:
        shapes = (
            jax.ShapeDtypeStruct((1, 32, 32, 3), "float32"),
            jax.ShapeDtypeStruct((8, 3, kernel, kernel), "float32"),
        )
        return (
            jax.jit(lambda x, w: stem_convolution(x, w, stride, kernel // 2, "space_to_depth")).lower(*shapes).as_text()
        )

    assert "tensor<1x19x19x12xf32>, tensor<8x12x4x4xf32>" in lowered(2, 7)
    assert "tensor<1x32x32x3xf32>, tensor<8x3x3x3xf32>" in lowered(1, 3)


def test_a_network_with_a_folded_stem_equals_torchs() -> None:
    model = section("resnet18")
    network = torch_network(model).eval()
    set_stem_compute(network, "space_to_depth")
    arrays = {
        name: jnp.asarray(t.detach().numpy()) for name, t in (*network.named_parameters(), *network.named_buffers())
    }
    outputs, _ = jax.jit(lambda batch: build_model(model, stem="space_to_depth")(arrays, arrays, batch, train=False))(
        images(32)
    )
    with torch.no_grad():
        want = network(torch.from_numpy(images(32)).permute(0, 3, 1, 2))
    np.testing.assert_allclose(outputs, want, rtol=1e-4, atol=1e-4)


def test_bf16_is_for_activations_only() -> None:
    """As in Ying 2018: activations are bf16; variables, statistics and logits are fp32, and near those of fp32."""
    model = section("resnet18", stem="small")
    parameters, statistics = initialise(model, CLASSES, seed=0)
    short, long = (
        jax.jit(partial(build_model(model, dtype=dtype), train=True)).lower(parameters, statistics, images(16))
        for dtype in ("bfloat16", "float32")
    )
    convolutions = [line for line in short.as_text().splitlines() if "stablehlo.convolution" in line]
    assert len(convolutions) == 20
    assert all("xf32>" not in line for line in convolutions)
    (logits, moved), (exact, exactly) = (way.compile()(parameters, statistics, images(16)) for way in (short, long))
    assert {array.dtype for array in (logits, *moved.values())} == {jnp.dtype("float32")}
    assert not np.array_equal(logits, exact)
    np.testing.assert_allclose(logits, exact, atol=0.03 * float(np.abs(exact).max()))
    for name, array in exactly.items():
        np.testing.assert_allclose(moved[name], array, rtol=0.05, atol=0.02, err_msg=name)


def test_dropout_acts_in_training_only_and_is_keyed() -> None:
    model = section("alexnet", alexnet={"dropout": 0.5})
    parameters, statistics = initialise(model, CLASSES, seed=0)
    parameters["fc8.weight"] = 100 * parameters["fc8.weight"]
    apply = build_model(model)

    @jax.jit
    def outputs(key: jax.Array) -> Any:
        return [apply(parameters, statistics, images(63), train=train, key=key)[0] for train in (True, False)]

    first, again, other = (outputs(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first[0], again[0])
    assert not np.allclose(first[0], other[0], atol=1e-2)
    np.testing.assert_array_equal(first[1], other[1])


def test_dropout_keeps_the_mean() -> None:
    from podscale.jax.models.alexnet import dropout

    kept = np.asarray(dropout(jnp.ones((100, 1000)), 0.3, jax.random.key(0), 0))
    assert set(np.unique(kept).round(6)) == {0.0, np.float32(1 / 0.7).round(6)}
    assert kept.mean() == pytest.approx(1.0, abs=0.01)
