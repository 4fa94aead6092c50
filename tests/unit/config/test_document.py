"""Reading a run document: wrong input, and the messages about it."""

import errno
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from podscale.config import RunConfig, dumps, load, loads, result_values
from podscale.config.fields import FieldClass
from podscale.config.identity import field_values
from podscale.config.yaml_reader import NotYaml
from podscale.errors import ABSENT, ExitCode, InputError, InputErrors
from tests.support.refusals import refused


def refusal(text: str, *overrides: str) -> InputError:
    with pytest.raises(InputError) as caught:
        loads(text, "run.yaml", overrides)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    return caught.value


def test_an_empty_document_is_all_defaults(tmp_path: Path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load(tmp_path / "empty.yaml") == loads("") == load(None) == RunConfig()


def test_values_arrive_and_the_document_is_frozen():
    config = loads("train:\n  global_batch: 512\n  schedule: {milestones: [10, 20]}\n")
    assert config.train.global_batch == 512
    assert config.train.schedule.milestones == (10.0, 20.0)
    with pytest.raises(ValidationError) as frozen:
        config.train.global_batch = 1  # type: ignore[misc]
    assert [error["type"] for error in frozen.value.errors()] == ["frozen_instance"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian:\n  epochs: 3\n", "run.yaml:1: trian: unknown key. Did you mean train?"),
        ("train:\n  epoch: 3\n", "run.yaml:2: train.epoch: unknown key. Did you mean train.epochs?"),
        (
            "train:\n  optimizer:\n    momentun: 0.9\n",
            "run.yaml:3: train.optimizer.momentun: unknown key. Did you mean train.optimizer.momentum?",
        ),
        ("image_size: 3\n", "run.yaml:1: image_size: unknown key. Did you mean input.image_size?"),
    ],
)
def test_a_misspelt_key_gets_a_suggestion(text: str, message: str):
    assert str(refusal(text)) == message


def test_a_key_like_no_other_gets_a_list():
    error = refusal("launch:\n  qqqq: 3\n")
    assert (error.field, error.location) == ("launch.qqqq", "run.yaml:2")
    assert "backend, hardware, " in error.hint


@pytest.mark.parametrize(
    ("text", "location", "field", "got"),
    [
        ("train:\n  epochs: -1\n", "run.yaml:2", "train.epochs", -1),
        ("train:\n  epochs: .inf\n", "run.yaml:2", "train.epochs", math.inf),
        ("train:\n  epochs: many\n", "run.yaml:2", "train.epochs", "many"),
        ("run:\n  id: My_Run\n", "run.yaml:2", "run.id", "My_Run"),
        ("model:\n  name: resnet19\n", "run.yaml:2", "model.name", "resnet19"),
        ("train: 3\n", "run.yaml:1", "train", 3),
        ("train:\n  epochs: 3\n  epochs: 4\n", "run.yaml:3", "train.epochs", ABSENT),
        ("train: {epochs: 3}\ntrain: {epochs: 4}\n", "run.yaml:2", "train", ABSENT),
        ("a: &x 1\nb: *x\n", "run.yaml:1", "b", ABSENT),
        ("train: &x {epochs: 3}\ninput: *x\n", "run.yaml:1", "input", ABSENT),
        ("- 1\n", "run.yaml", "", "list"),
        ("just words\n", "run.yaml", "", "single value"),
        ("? [a]\n: 1\n", "run.yaml:1", "", "list"),
    ],
)  # fmt: skip
def test_one_error_names_key_file_and_line(text: str, location: str, field: str, got: object):
    error = refusal(text)
    assert type(error) is InputError
    assert (error.location, error.field, error.got) == (location, field, got)
    assert str(error).startswith(f"{location}: {field}: " if field else f"{location}: ")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.epochs=many", "not a number"),
        ("train.global_batch=2.5", "not an integer"),
        ("train.cuda_graph=maybe", "not true or false"),
        ("run.workspace=3", "not text"),
        ("train=3", "not a section of options"),
        ("train.phases=3", "not a list"),
    ],
)
def test_values_of_a_wrong_type(override: str, problem: str):
    assert refusal("", override).problem == problem


def test_text_for_a_number_is_refused():
    error = refusal("train:\n  epochs: .nan\n")
    assert (error.location, error.field, str(error.got)) == ("run.yaml:2", "train.epochs", "nan")


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("train: [1, 2\n", "run.yaml:2"),
        ("train: !!python/object/apply:os.system [ls]\n", "run.yaml:1"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2"),
        ("a: " + "[" * 100_000, "run.yaml"),
    ],
)
def test_what_is_no_yaml_is_refused_and_no_crash(text: str, location: str):
    error = refusal(text)
    assert type(error) is NotYaml
    assert error.location.startswith(location)


def test_a_long_value_is_cut():
    error = refusal(f"run: {{id: {'x' * 10_000}}}")
    assert error.got == "x" * 10_000
    assert len(str(error)) < 400


def test_all_wrong_values_are_reported_at_once():
    error = refusal("train:\n  epochs: -1\nmodel:\n  width: 3\nrnu: {}\n")
    assert isinstance(error, InputErrors)
    located = [(each.location, each.field) for each in error.errors]
    assert located == [("run.yaml:4", "model.width"), ("run.yaml:2", "train.epochs"), ("run.yaml:5", "rnu")]
    assert str(error).splitlines() == [str(each) for each in error.errors]


@pytest.mark.parametrize(
    ("text", "field", "got", "number"),
    [
        ("train: {global_batch: 100}\nlaunch: {processes: 3}\n", "train.global_batch", 100, "= 3 x 1"),
        ("train: {global_batch: 9, accumulation: 2}\n", "train.global_batch", 9, "train.accumulation 2"),
        ("model: {batch_norm: {group: 3}}\nlaunch: {processes: 4}\n", "model.batch_norm.group", 3, "4 ranks"),
        ("model: {batch_norm: {group: 2, span: 64}}\n", "model.batch_norm.span", 64, "group=2"),
        ("model: {batch_norm: {span: 96}}\n", "model.batch_norm.span", 96, "256 images of one pass"),
        ("model: {batch_norm: {span: 96}}\ntrain: {global_batch: 192, accumulation: 3}\n", "model.batch_norm.span",
         96, "64 images of one pass (train.global_batch 192 / train.accumulation 3)"),
        ("model: {batch_norm: {span: 48}}\ntrain: {global_batch: 192}\nlaunch: {processes: 3}\n",
         "model.batch_norm.span", 48, "64 images of one rank and pass (192 / (3 x 1))"),
        ("model: {batch_norm: {span: 96}}\ntrain: {global_batch: 192}\nlaunch: {processes: 3}\n",
         "model.batch_norm.span", 96, "multiple of the 64 images of one rank and pass"),
        ("train: {all_reduce: {row: 3}}\nlaunch: {processes: 4}\n", "train.all_reduce.row", 3, "4 ranks"),
        ("input: {image_size: 16}\n", "model.stem", "imagenet", "16 px"),
        ("evaluate: {image_size: 16}\n", "model.stem", "imagenet", "16 px"),
        ("train: {epochs: 5, schedule: {warmup_epochs: 5}}\n", "train.schedule.warmup_epochs", 5, "of 5 epochs"),
        ("train: {optimizer: {nesterov: true, momentum: 0}}\n", "train.optimizer.nesterov", ABSENT, "momentum"),
        ("input: {groups: 2}\n", "input.groups", 2, "input.order=blocked"),
        ("input: {order: blocked, groups: 7}\n", "input.groups", 7, "train.global_batch 256"),
        ("input: {crop: {scale: [0.9, 0.5]}}\n", "input.crop.scale", [0.9, 0.5], "low <= high"),
        ("input: {crop: {scale: [0.5, 1.5]}}\n", "input.crop.scale", 1.5, "whole image"),
        ("train: {schedule: {milestones: [30, 20]}}\n", "train.schedule.milestones", [30.0, 20.0], "rising"),
        ("train: {all_reduce: {bucket_mb: 1e-6}}\n", "train.all_reduce.bucket_mb", 1e-6, "4 bytes"),
        ("train: {all_reduce: {algorithm: ring, wire_row: bf16}}\n", "train.all_reduce.wire_row", "bf16",
         "wire_column"),
        ("train: {all_reduce: {algorithm: ddp, wire_column: bf16}}\n", "train.all_reduce.wire_column", ABSENT, "fp32"),
        ("train: {all_reduce: {algorithm: ddp, wire_column: int8}}\n", "train.all_reduce.wire_column", ABSENT, "fp32"),
        ("train: {all_reduce: {algorithm: tree, wire_row: int8}}\n", "train.all_reduce.wire_row", "int8",
         "wire_column"),
        ("train: {all_reduce: {wire_column: int4}}\n", "train.all_reduce.wire_column", "int4", "int8"),
        ("train: {weight_update: sharded, all_reduce: {algorithm: tree}}\n", "train.all_reduce.algorithm", "tree",
         "train.weight_update=sharded"),
        ("data: {only_classes: [cat, dog, cat]}\n", "data.only_classes", ["cat", "dog", "cat"], "twice"),
        ("data: {only_classes: [cat]}\n", "data.only_classes", ["cat"], "at least two"),
        ("data: {only_classes: [cat, dog], classes: [cat, cow]}\n", "data.only_classes", ["cat", "dog"],
         "data.classes"),
        ("launch: {resources: {accelerators: 8}}\n", "launch.resources.accelerator", None, "8"),
    ],
)  # fmt: skip
def test_fields_that_cannot_hold_together(text: str, field: str, got: object, number: str):
    error = refusal(text)
    assert (error.field, error.got) == (field, got)
    assert error.location.startswith("run.yaml")
    assert number in str(error)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1.e-4", 1e-4), (".5", 0.5), ("+1E2", 100.0), ("3", 3.0), ("010", 10.0), ("0x10", 16.0)],
)
def test_numbers_are_those_of_yaml_1_2(text: str, value: float):
    document = f"train: {{epochs: 100, schedule: {{learning_rate: {text}}}}}"
    assert math.isclose(loads(document).train.schedule.learning_rate, value)


@pytest.mark.parametrize("digits", ["1" * 5000, f"0x{'f' * 5000}"], ids=["decimal", "hexadecimal"])
def test_a_number_of_more_digits_than_python_reads_is_refused(digits: str):
    assert refusal(f"run: {{seed: {digits}}}").field == "run.seed"


def test_scalars_are_those_of_yaml_1_2():
    """Classes called `no` and `on`, times and dates are text; only true and false are booleans."""
    words = ["no", "on", "yes", "1:30", "2026-01-01", "1_000", "<<", "="]
    assert loads(f"data: {{classes: [{', '.join(words)}]}}").data.classes == tuple(words)
    assert refusal("data: {classes: [true]}").got is True


def test_overrides_win_and_are_named_in_errors():
    config = loads("train: {epochs: 3}\n", overrides=["train.epochs=7", "train.schedule.name=step", "run.id=b"])
    assert (config.train.epochs, config.train.schedule.name, config.run.id) == (7.0, "step", "b")
    assert loads("", overrides=["input.crop.scale=[0.5, 1]"]).input.crop.scale == (0.5, 1.0)
    assert loads("", overrides=["train.all_reduce={row: 2}"]).train.all_reduce.row == 2
    assert loads("", overrides=["input.cache_dir=null"]).input.cache_dir is None
    assert loads("", overrides=["data.source=s3://bucket/a=b"]).data.source == "s3://bucket/a=b"
    error = refusal("train: {epochs: 3}\n", "train.epochs=none")
    assert (error.location, error.field, error.got) == ("--set train.epochs=none", "train.epochs", "none")
    suggested = "--set lunch.processes=2: lunch: unknown key. Did you mean launch?"
    assert str(refusal("", "lunch.processes=2")) == suggested
    error = refusal("", "train.epoch=2")
    assert (error.field, error.hint) == ("train.epoch", "Did you mean train.epochs?")
    error = refusal("", "run.id=5")
    assert (error.location, error.field) == ("--set run.id=5", "run.id")
    assert refusal("", "train.epochs=").field == "train.epochs"


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("train.epochs", "--set train.epochs"),
        ("=3", "--set =3"),
        ("train.epochs.more=3", "train.epochs"),
        ("train..epochs=3", "--set train..epochs=3"),
    ],
)
def test_malformed_overrides(override: str, field: str):
    error = refusal("train: {epochs: 2}\n", override)
    assert error.field == field
    assert override in str(error)


def test_an_override_cannot_smuggle_what_a_document_cannot():
    override = "input.mean=[&x 0.5, *x, *x]"
    assert refusal("", override).location == f"--set {override}:1"
    override = "train={epochs: 2, epochs: 3}"
    error = refusal("", override)
    assert (error.location, error.field) == (f"--set {override}:1", "value.epochs")


def test_unreadable_files(tmp_path: Path):
    with refused(os.strerror(errno.ENOENT), field=tmp_path / "missing.yaml"):
        load(tmp_path / "missing.yaml")
    with refused(os.strerror(errno.EISDIR), field=tmp_path):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: {id: caf\xe9}\n")
    with refused("UTF-8", field=tmp_path / "latin.yaml"):
        load(tmp_path / "latin.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (2**20 + 1))
    with refused(2**20, field=tmp_path / "large.yaml"):
        load(tmp_path / "large.yaml")
    (tmp_path / "control.yaml").write_bytes(b"run: {id: a\x00b}\n")
    with refused(kind=NotYaml):
        load(tmp_path / "control.yaml")


@pytest.mark.parametrize("text", ["\x85", "a\u2028b", "\u2029", "a\x85 b"])
def test_unicode_line_breaks_survive(text: str):
    config = RunConfig.model_validate({"data": {"source": text}})
    assert loads(dumps(config)) == config


@settings(max_examples=25, deadline=None)
@given(
    epochs=st.floats(1e-3, 1e6),
    seed=st.integers(0, 2**63 - 1),
    source=st.text(st.characters(exclude_categories=("Cs",)), min_size=1),
    scale=st.tuples(st.floats(0.01, 0.5), st.floats(0.5, 1.0)),
)
def test_round_trip(epochs: float, seed: int, source: str, scale: tuple[float, float]):
    config = RunConfig.model_validate(
        {
            "run": {"seed": seed},
            "data": {"source": source, "classes": [source, "1e3", "null", "no", "010", ""]},
            "input": {"crop": {"scale": scale}},
            "train": {"epochs": epochs},
        }
    )
    assert loads(dumps(config)) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


PHASES = """
train:
  epochs: 10
  phases:
    - start: {first}
      schedule: {{learning_rate: 0.1, warmup_epochs: {warmup}}}
    - start: {second}
      crop: {{short_side: 0.875}}
"""


@pytest.mark.parametrize(
    ("first", "second", "warmup", "location", "field", "got", "limit"),
    [
        (6, 4, 1, "d.yaml:7", "train.phases.1.start", 4, 6.0),
        (6, 10, 1, "d.yaml:7", "train.phases.1.start", 10, "after 10.0 epochs"),
        (6, 9, 4, "d.yaml:6", "train.phases.0.schedule.warmup_epochs", 4, "of 4 epochs"),
        (0, 9, 1, "d.yaml:5", "train.phases.0.start", 0, "greater than 0"),
    ],
)
def test_invalid_phases_are_located_by_line(first, second, warmup, location, field, got, limit):
    with refused(limit, field=field, got=got) as refusal:
        loads(PHASES.format(first=first, second=second, warmup=warmup), "d.yaml")
    assert refusal.error.location == location


@pytest.mark.parametrize("power", [0, -0.5])
def test_a_warm_up_of_no_power_is_refused(power):
    for where in ("train.schedule", "train.phases.0.schedule"):
        prefix = "train: {phases: [{start: 2, schedule: " if "phases" in where else "train: {schedule: "
        suffix = "}]}" if "phases" in where else "}"
        error = refusal(f"{prefix}{{warmup_power: {power}}}{suffix}")
        assert (error.field, error.got) == (f"{where}.warmup_power", power)


@pytest.mark.parametrize(
    ("evaluate", "got"),
    [("{offset: 91}", 91), ("{offset: 1, every_epochs: 0}", 1), ("{offset: -1}", -1)],
)
def test_an_offset_of_the_evaluation_lies_within_the_run(evaluate, got):
    error = refusal(f"evaluate: {evaluate}")
    assert (error.field, error.got) == ("evaluate.offset", got)
    loads("evaluate: {offset: 90, every_epochs: 4}")


def test_momentum_is_not_corrected_twice():
    error = refusal("train: {schedule: {momentum_correction: true, warmup_epochs: 5}}")
    assert error.field == "train.schedule.momentum_correction"
    assert "train.optimizer.momentum_form=unscaled" in error.hint
    loads("train: {schedule: {momentum_correction: true, warmup_epochs: 5}, optimizer: {momentum_form: unscaled}}")
    loads("train: {schedule: {momentum_correction: true, warmup_epochs: 5}, optimizer: {name: lars}}")


def test_phases_are_read_written_and_suggested():
    text = PHASES.format(first=6, second=8, warmup=1)
    config = loads(text)
    assert loads(dumps(config)) == config
    assert config.train.phases[1].crop.short_side == 0.875
    assert config.train.phases[1].schedule is None
    by_option = ["train.epochs=10", "train.phases=[{start: 6, weight_decay: 2e-4}]"]
    assert loads("", overrides=by_option).train.phases[0].weight_decay == 2e-4
    with refused(" train.phases.1.crop?", field="train.phases.1.crops"):
        loads(text.replace("crop:", "crops:"))
    with refused(" train.phases.0.schedule.warmup_start", field="train.phases.0.schedule.warmup"):
        loads(text.replace("warmup_epochs", "warmup"))


def phases_of(*entries, **train):
    listed = ", ".join("{" + ", ".join(f"{name}: {value}" for name, value in entry.items()) + "}" for entry in entries)
    options = "".join(f", {name}: {value}" for name, value in train.items())
    return f"train: {{epochs: 9, phases: [{listed}]{options}}}"


def test_a_batch_that_no_mesh_divides_is_named_by_its_phase():
    later = {"start": 4, "global_batch": 1000}
    loads(phases_of({"start": 2}, later), overrides=["launch.processes=8"])
    for processes, option in ((16, "train.phases.1.global_batch"), (24, "train.global_batch")):
        with refused("ranks", field=option):
            loads(phases_of({"start": 2}, later), overrides=[f"launch.processes={processes}"])
    with refused("accumulation", field="train.phases.1.global_batch", got=1000):
        loads(phases_of({"start": 2}, later, accumulation=64))
    with refused("accumulation", field="train.phases.0.global_batch", got=256):
        loads(phases_of({"start": 2, "accumulation": 3, "global_batch": 256}))
    loads(phases_of({"start": 2, "accumulation": 3, "global_batch": 258}))


@pytest.mark.parametrize("batch", [0, -8, 2.5])
def test_a_phase_of_no_batch_is_refused(batch):
    assert refusal(phases_of({"start": 2, "global_batch": batch})).field == "train.phases.0.global_batch"


def test_what_a_batch_of_a_phase_must_divide():
    with refused("train.phases.0.global_batch 100", field="model.batch_norm.span", got=64):
        loads("model: {batch_norm: {span: 64}}\n" + phases_of({"start": 2, "global_batch": 100}))
    with refused("train.phases.0.global_batch 100", field="input.groups", got=8):
        loads("input: {order: blocked, groups: 8}\n" + phases_of({"start": 2, "global_batch": 100}))
    with refused("neumann", field="train.phases.0.global_batch"):
        loads(phases_of({"start": 2, "global_batch": 100}, optimizer="{name: neumann, neumann: {reset_epochs: 2}}"))


def test_the_accumulation_of_a_phase_is_no_part_of_the_identity():
    entries = ({"start": 2, "global_batch": 512}, {"start": 2, "global_batch": 512, "accumulation": 4})
    plain, split = (loads(phases_of(entry)) for entry in entries)
    assert result_values(plain) == result_values(split)
    assert field_values(split, FieldClass.PLACEMENT)["train.phases.0.accumulation"] == 4
    assert result_values(plain) != result_values(loads(phases_of({"start": 2, "global_batch": 256})))


TWO_SIZES = "{input: {image_size: 160}, train: {epochs: 4, phases: [{start: 2, image_size: 192}]}}"


def test_what_goes_with_several_sizes() -> None:
    config = loads(TWO_SIZES)
    assert config.training_sizes == (160, 192)
    assert config.eval_image_size == 192
    assert loads(TWO_SIZES, overrides=["evaluate.image_size=256"]).eval_image_size == 256
    loads(TWO_SIZES, overrides=["train.cuda_graph=true"])
    with refused("image_size", field="train.phases"):
        loads(TWO_SIZES, overrides=["train.engine=jax"])
    with refused("31 px", 32, field="model.stem"):
        loads(TWO_SIZES, overrides=["train.phases=[{start: 2, image_size: 31}]"])
