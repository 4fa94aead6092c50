"""Parameters of a pipeline's run: what they change, what they may not change, and the errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from podscale.components.run_parameters import PipelineJob, RunParameters, load_document, resolve_document
from podscale.config import RunConfig, load
from podscale.pipelines.presets import resolve_preset
from tests.support.refusals import refused

Resolve = Callable[..., RunConfig]


def compiled(*changes: str, preset: str | None = None) -> RunConfig:
    return load(resolve_preset(preset), ["run.workspace=/workspace", *changes])


def defaults(config: RunConfig) -> RunParameters:
    """Values of the parameters if nobody sets one."""
    train, launch = config.train, config.launch
    return RunParameters(
        config.run.id,
        config.data.source,
        train.epochs,
        train.global_batch,
        train.schedule.learning_rate,
        [],
        launch.image,
        launch.launcher_image,
    )


def resolve(config: RunConfig, **parameters: Any) -> RunConfig:
    return resolve_document(config.model_dump_json(), replace(defaults(config), **parameters), PipelineJob())


@pytest.mark.parametrize("preset", ["digits", "digits-ensemble", "mlperf-8xh100", "codreanu2017-64nodes"])
def test_the_defaults_leave_the_document_as_it_is(preset: str) -> None:
    config = compiled(preset=preset)
    assert resolve(config) == config
    assert resolve(config, run_id="", source="", image="", launcher_image="") == config, "an empty field of a form"


def test_every_parameter_sets_its_option() -> None:
    resolved = resolve(
        compiled(),
        run_id="other",
        source="/photos",
        epochs=8.5,
        global_batch=128,
        learning_rate=0.3,
        overrides=["train.optimizer.momentum=0.95", "evaluate.flip=true"],
        image="registry/a:1",
        launcher_image="registry/b:1",
    )
    assert resolved == compiled(
        "run.id=other",
        "data.source=/photos",
        "train.epochs=8.5",
        "train.global_batch=128",
        "train.schedule.learning_rate=0.3",
        "train.optimizer.momentum=0.95",
        "evaluate.flip=true",
        "launch.image=registry/a:1",
        "launch.launcher_image=registry/b:1",
    )


def test_an_override_wins_over_the_parameter_of_the_same_option() -> None:
    assert resolve(compiled(), epochs=8.0, overrides=["train.epochs=9"]).train.epochs == 9


@pytest.mark.parametrize(
    ("parameters", "field", "location"),
    [
        ({"run_id": "nightly-[[ScheduledTime]]"}, "run.id", "run_id"),
        ({"run_id": "a" * 41}, "run.id", "run_id"),
        ({"epochs": 0.0}, "train.epochs", "epochs"),
        ({"global_batch": 0}, "train.global_batch", "global_batch"),
        ({"learning_rate": -1.0}, "train.schedule.learning_rate", "learning_rate"),
        ({"overrides": ["train.optimizer.momentum=high"]}, "train.optimizer.momentum", "overrides"),
        ({"overrides": ["train.optimizer=sgd"]}, "train.optimizer", "overrides"),
        ({"overrides": ["train.momentun=0.9"]}, "train.momentun", "overrides"),
    ],
)
def test_an_invalid_value_names_its_option_and_parameter(parameters: dict[str, Any], field: str, location: str) -> None:
    with refused(field=field) as refusal:
        resolve(compiled(), **parameters)
    assert refusal.error.location == f"parameter {location}"
    assert "images.tag" not in refusal.text, "it is no matter of versions"


@pytest.mark.parametrize("override", ["momentum", "=3", 3, None])
def test_an_override_that_is_none(override: Any) -> None:
    with refused(field="overrides", got=override):
        resolve(compiled(), overrides=[override])


@pytest.mark.parametrize(
    "override",
    [
        "launch.nodes=2",
        "launch={nodes: 2}",
        "launch.cluster.workspace_claim=other",
        "run.workspace=/elsewhere",
        "ensemble.cycles=[1, 1]",
        "train.engine=jax",
        "export.formats=[html]",
        "export={formats: []}",
        "train={epochs: 3}",
        "telemetry.port=1",
        "run={seed: 3}",
    ],
)
def test_an_option_that_shapes_the_pods_is_refused_with_the_remedy(override: str) -> None:
    option = override.partition("=")[0]
    with refused(field=option) as refusal:
        resolve(compiled(), overrides=[override])
    if option != "run":
        assert f"podscale compile RUN --set '{override}'" in refusal.error.hint


@pytest.mark.parametrize("override", ["run.id=other", "run={id: other}"])
def test_the_run_id_has_a_parameter_of_its_own(override: str) -> None:
    with refused(field=override.partition("=")[0]):
        resolve(compiled(), overrides=[override])


def test_options_beside_the_fixed_ones_are_free() -> None:
    resolved = resolve(compiled(), overrides=["run.seed=7", "telemetry.log_every=3"])
    assert (resolved.run.seed, resolved.telemetry.log_every) == (7, 3)


def test_the_batch_of_a_recipe_is_compiled_in() -> None:
    config = compiled(preset="tpu-v5e-16")
    assert config.train.recipe is not None
    with refused(field="train.global_batch"):
        resolve(config, global_batch=2 * config.train.global_batch)
    assert resolve(config, learning_rate=11.0).train.schedule.learning_rate == 11.0


def test_a_document_of_another_version_names_the_image_tag() -> None:
    document = json.loads(compiled().model_dump_json())
    document["input"]["of_tomorrow"] = 1
    with refused("images.tag", field="input.of_tomorrow"):
        load_document(json.dumps(document))
