"""Run documents of the Python API: what may name one, and overrides as values."""

from pathlib import Path

import pytest

import podscale
from podscale.config import dumps, load
from podscale.pipelines import presets
from podscale.util import env
from tests.support.refusals import refused

DIGITS = load(presets.resolve_preset("digits"))


def test_a_document_is_a_path_a_preset_values_or_a_document(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dumps(DIGITS))
    given = (None, "digits", str(path), path, DIGITS, DIGITS.model_dump(), podscale.Run(DIGITS))
    assert [podscale.load(document) for document in given] == [DIGITS] * len(given)


def test_overrides_are_sections_or_dotted_names() -> None:
    changed = load(presets.resolve_preset("digits"), ["train.epochs=7", "run.id=mine"])
    assert podscale.load("digits", train={"epochs": 7}, run={"id": "mine"}) == changed
    assert podscale.load(DIGITS, **{"train.epochs": 7, "run.id": "mine"}) == changed


def test_a_section_in_an_override_changes_only_its_options() -> None:
    config = podscale.load("digits", train={"optimizer": {"momentum": 0.5}}, run={"workspace": Path("/work")})
    assert config.train.optimizer.momentum == 0.5
    assert config.train.optimizer.name == DIGITS.train.optimizer.name
    assert config.run.workspace == "/work"


def test_a_mapping_that_is_a_value_replaces_it_whatever_its_keys() -> None:
    config = podscale.load("digits", train={"learning_rate_scale": {"layer1.*": 0.1}})
    assert dict(config.train.learning_rate_scale) == {"layer1.*": 0.1}


def test_another_optimizer_leaves_out_options_that_it_does_not_have() -> None:
    config = podscale.load(DIGITS, train={"optimizer": {"name": "adam"}})
    assert config == load(presets.resolve_preset("digits"), ["train.optimizer.name=adam"])


@pytest.mark.parametrize("override", [{"train": {"epoch": 3}}, {"train.epoch": 3}])
def test_an_unknown_option_names_the_likely_one(override: dict[str, object]) -> None:
    with refused("train.epochs", field="train.epoch"):
        podscale.load("digits", **override)


def test_a_wrong_value_is_an_argument() -> None:
    with refused("argument", field="train.epochs", got="many"):
        podscale.load("digits", train={"epochs": "many"})


def test_a_pod_has_the_document_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.RUN_DOCUMENT, dumps(podscale.load(DIGITS, run={"seed": 9})))
    assert podscale.load(run={"id": "pod"}).run.seed == 9
    assert podscale.load("digits").run.seed == DIGITS.run.seed
