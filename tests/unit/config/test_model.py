"""Model section of a document: names of the catalogue, and models from elsewhere with what they exclude."""

import pytest

from podscale.config import dumps, load, loads
from podscale.config.model import CATALOGUE_NAMES, ModelSource, is_model_name, model_source
from podscale.pipelines.presets import resolve_preset
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("torchvision:vit_b_16", ("torchvision", "vit_b_16")),
        ("timm:convnext_atto.d2_in1k", ("timm", "convnext_atto.d2_in1k")),
        ("python:my_package.models:Nets.small", ("python", "my_package.models:Nets.small")),
    ],
)
def test_names_with_a_prefix_are_models_from_elsewhere(name: str, source: tuple[str, str]) -> None:
    assert is_model_name(name)
    assert model_source(name) == ModelSource(*source)
    assert load(None, [f"model.name={name}"]).model.is_external


@pytest.mark.parametrize(
    "name", ["resnet19", "vit_b_16", "torchvison:resnet50", "timm:", "python:module", "python:a b:c"]
)
def test_other_names_are_refused(name: str) -> None:
    with refused(field="model.name", got=name):
        load(None, [f'model.name="{name}"'])


def test_a_name_ends_with_its_line() -> None:
    assert not is_model_name("timm:vit\n")


def test_similar_names_and_prefixes_are_proposed() -> None:
    for name, proposal in (("resnett50", "resnet50"), ("torchvison:vit_b_16", "torchvision:vit_b_16")):
        with refused(proposal, field="model.name"):
            load(None, [f"model.name={name}"])
    with refused("torchvision:vit_b_16", field="model.name"):
        load(None, ["model.name=vit_b_16"])


def test_options_are_part_of_the_document() -> None:
    config = load(None, ["model.name=timm:vit", "model.options.img_size=32", "model.options.dims=[1, 2]"])
    assert config.model.options == {"img_size": 32, "dims": [1, 2]}
    assert loads(dumps(config)) == config


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("model.width=32", "model.width"),
        ("model.stem=small", "model.stem"),
        ("model.blurpool=true", "model.blurpool"),
        ("model.inception.dropout=0.5", "model.inception.dropout"),
        ("train.precision=bf16-pure", "train.precision"),
        ("train.stem_compute=padded4", "train.stem_compute"),
        ("train.spatial_partitions=[2, 1]", "train.spatial_partitions"),
        ("train.engine=jax", "model.name"),
    ],
)
def test_what_only_our_networks_have_is_refused(change: str, key: str) -> None:
    with refused(field=key):
        load(None, ["model.name=timm:vit", change])


def test_the_catalogue_has_no_options() -> None:
    with refused(field="model.options"):
        load(None, ["model.options.img_size=32"])
    assert not any(
        load(None, [f"model.name={name}", "input.image_size=299"]).model.is_external for name in CATALOGUE_NAMES
    )


def test_a_presets_option_of_our_networks_is_taken_back_by_its_default() -> None:
    preset = resolve_preset("imagenette")
    with refused("default, 64", field="model.width"):
        load(preset, ["model.name=timm:vit"])
    assert load(preset, ["model.name=timm:vit", "model.width=64"]).model.is_external
