"""The set of options is frozen, every option has a class and a description, and the committed schema is the model's."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from podscale import config
from podscale.cli.documents import json_schema_text
from podscale.config import RunConfig, dumps, json_schema, loads, option_names, result_values
from podscale.config.data import DataSection
from podscale.config.fields import FieldClass, result_field
from podscale.config.identity import (
    add_later_options,
    changed_result_values,
    data_fingerprint,
    differences,
    field_values,
    fingerprint,
)

OPTIONS = Path(__file__).parent / "test_options.txt"
SCHEMA = Path(config.__file__).parent / "schema.json"


def fields(model: type[BaseModel], prefix: str = ""):
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from fields(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def test_the_set_of_options_is_frozen():
    """A new option is a decision: add it to test_options.txt, to the schema and to the documentation."""
    classed = {name: info.json_schema_extra["x-class"] for name, info in fields(RunConfig)}
    assert list(classed) == option_names()
    written = dict(line.split() for line in OPTIONS.read_text().splitlines())
    assert classed == written


@pytest.mark.parametrize(("name", "info"), list(fields(RunConfig)))
def test_every_option_says_what_it_is(name, info):
    assert info.json_schema_extra["x-class"] in set(FieldClass)
    assert info.description
    assert info.description.rstrip().endswith(".")


def test_every_option_is_in_exactly_one_class():
    config = RunConfig()
    names = [name for kind in FieldClass for name in field_values(config, kind)]
    assert sorted(names) == sorted(option_names())


def test_placement_and_display_do_not_change_identity():
    changed = ["launch.processes=2", "run.id=other", "telemetry.port=9", "checkpoint.keep_last=5", "claim.top1=0.5"]
    assert result_values(loads("", overrides=changed)) == result_values(RunConfig())
    before, now = result_values(RunConfig()), result_values(loads("", overrides=["train.epochs=3", "run.seed=1"]))
    assert [str(change) for change in differences(before, now)] == [
        "run.seed: was 0, is 1",
        "train.epochs: was 90.0, is 3.0",
    ]
    assert differences({"gone": 1}, {"new": 2}) == [*differences({"gone": 1}, {}), *differences({}, {"new": 2})]


def test_fingerprints_are_stable_for_ever():
    """Shard sets on disk have these names; after a change no existing set is found."""
    assert fingerprint({"b": [1, 2.5, None], "a": "\u00e9"}) == fingerprint({"a": "\u00e9", "b": [1, 2.5, None]})
    assert fingerprint({"b": [1, 2.5, None], "a": "\u00e9"}) == "84afbf1d4853005f"
    assert data_fingerprint(DataSection()) == "4c9bb8270e03cbff"
    assert data_fingerprint(DataSection(source="a")) != data_fingerprint(DataSection(source="b"))


def test_an_option_that_comes_later_keeps_the_names_of_shard_sets():
    class NewerSection(DataSection):
        later: int = result_field(3, "Option of a newer version.")

    assert data_fingerprint(NewerSection()) == data_fingerprint(DataSection())
    assert data_fingerprint(NewerSection(later=4)) != data_fingerprint(DataSection())
    assert data_fingerprint(DataSection(holdout_fraction=0.1)) == "926914fb0a7332cb"
    sections = [DataSection(), DataSection(only_classes=("0", "1")), DataSection(images_per_class=9)]
    assert len({data_fingerprint(section) for section in sections}) == 3


def test_every_data_option_but_the_decode_index_is_of_class_result():
    """The shard stage gets only this section, and its cache is keyed by it. A decode index changes no pixels."""
    assert set(field_values(DataSection(), FieldClass.RESULT)) == set(DataSection.model_fields) - {"decode_index"}


def test_the_committed_schema_is_current():
    assert SCHEMA.read_text(encoding="utf-8") == json_schema_text(), (
        "run: podscale config --schema > podscale/config/schema.json"
    )


def test_the_schema_accepts_documents_and_refuses_what_the_model_refuses():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validate = jsonschema.Draft202012Validator(schema)
    validate.validate(yaml.safe_load(dumps(RunConfig())))
    for wrong in ({"trian": {}}, {"train": {"epochs": 0}}, {"model": {"name": "vgg"}}, {"run": {"id": "A"}}):
        with pytest.raises(jsonschema.ValidationError):
            validate.validate(json.loads(json.dumps(wrong)))


def test_changed_values_leave_defaults_out():
    """An option that a later version adds must not change the key of a study's trial."""
    assert changed_result_values(RunConfig()) == {}
    config = RunConfig.model_validate(
        {"train": {"epochs": 7, "global_batch": 256, "phases": [{"start": 3, "momentum": 0.5}]}, "launch": {"nodes": 2}}
    )
    assert changed_result_values(config) == {
        "train.epochs": 7.0,
        "train.phases": [{"start": 3.0, "momentum": 0.5}],
    }


def test_changed_values_count_a_default_of_its_own_place():
    """The crop of a collapse has another default than the section of crops."""
    config = loads("ensemble: {cycles: [4, 3]}\ntrain: {phases: [{start: 4, crop: {}, accumulation: 2}]}")
    assert changed_result_values(config) == {
        "train.epochs": 7.0,
        "ensemble.cycles": [4.0, 3.0],
        "train.phases": [{"start": 4.0, "crop": {}}],
    }
    changed = loads("ensemble: {collapse: {crop: {short_side: null}}}")
    assert changed_result_values(changed) == {"ensemble.collapse.crop.short_side": None}
    saved = {name: value for name, value in result_values(RunConfig()).items() if "collapse" not in name}
    assert add_later_options(saved, result_values(RunConfig())) == result_values(RunConfig())


def test_a_list_of_sections_is_a_value_of_its_own_class():
    volume = {"path": "/data", "claim": "images"}
    config = RunConfig.model_validate({"launch": {"cluster": {"volumes": [volume]}}})
    placement = field_values(config, FieldClass.PLACEMENT)
    assert volume.items() <= placement["launch.cluster.volumes"][0].items()
