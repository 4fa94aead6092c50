"""Reading a run document: what a person can get wrong, and what the answer says."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.config import RunConfig, dumps, load, loads
from podscale.errors import ExitCode, InputError


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        loads(text, "run.yaml", overrides)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    return str(caught.value)


def test_an_empty_document_is_all_defaults(tmp_path: Path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load(tmp_path / "empty.yaml") == loads("") == load(None) == RunConfig()


def test_values_arrive_and_the_document_is_frozen():
    config = loads("train:\n  global_batch: 512\n  schedule: {milestones: [10, 20]}\n")
    assert config.train.global_batch == 512
    assert config.train.schedule.milestones == (10.0, 20.0)
    with pytest.raises(ValueError, match="frozen"):
        config.train.global_batch = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian:\n  epochs: 3\n", "run.yaml:1: unknown key trian; did you mean train?"),
        ("train:\n  epoch: 3\n", "run.yaml:2: unknown key train.epoch; did you mean train.epochs?"),
        ("train:\n  optimizer:\n    momentun: 0.9\n", "run.yaml:3: unknown key train.optimizer.momentun; did you mean "
         "train.optimizer.momentum?"),
        ("image_size: 3\n", "run.yaml:1: unknown key image_size; did you mean input.image_size?"),
        ("launch:\n  qqqq: 3\n", "unknown key launch.qqqq; valid here: backend, hardware"),
        ("train:\n  epochs: 3\n  epochs: 4\n", "run.yaml:3: train.epochs is given twice (first on line 2)"),
        ("train: {epochs: 3}\ntrain: {epochs: 4}\n", "run.yaml:2: train is given twice (first on line 1)"),
        ("train:\n  epochs: .nan\n", "run.yaml:2: train.epochs: input should be a finite number (got NaN)"),
        ("train:\n  epochs: .inf\n", "run.yaml:2: train.epochs: input should be a finite number"),
        ("train:\n  epochs: many\n", 'run.yaml:2: train.epochs: input should be a valid number, unable to parse '
         'string as a number (got "many")'),
        ("train:\n  epochs: -1\n", "run.yaml:2: train.epochs: input should be greater than 0 (got -1)"),
        ("run:\n  id: My_Run\n", "run.yaml:2: run.id: string should match pattern"),
        ("model:\n  name: resnet19\n", "run.yaml:2: model.name: input should be 'resnet18', 'resnet34'"),
        ("train: 3\n", "run.yaml:1: train: input should be a valid dictionary"),
        ("a: &x 1\nb: *x\n", "run.yaml:1: YAML aliases are not allowed; write the value out"),
        ("train: &x {epochs: 3}\ninput: *x\n", "YAML aliases are not allowed"),
        ("- 1\n", "run.yaml: a document is a mapping of sections, not a list"),
        ("just words\n", "run.yaml: a document is a mapping of sections, not a single value"),
        ("train: [1, 2\n", "run.yaml:2: not valid YAML"),
        ("train: !!python/object/apply:os.system [ls]\n", "run.yaml:1: not valid YAML: could not determine a "
         "constructor"),
        ("? [a]\n: 1\n", "run.yaml:1: keys are plain words"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: not valid YAML: but found another document"),
    ],
)  # fmt: skip
def test_one_error_names_key_file_and_line(text: str, message: str):
    assert message in refusal(text)


def test_all_wrong_values_are_told_at_once():
    told = refusal("train:\n  epochs: -1\nmodel:\n  width: 3\nrnu: {}\n").splitlines()
    assert [line.split(": ")[0] for line in told] == ["run.yaml:4", "run.yaml:2", "run.yaml:5"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {global_batch: 100}\nlaunch: {processes: 3}\n", "train.global_batch 100 is not divisible by ranks x "
         "accumulation = 3 x 1"),
        ("train: {global_batch: 9, accumulation: 2}\n", "global_batch 9 is not divisible by train.accumulation 2"),
        ("model: {batch_norm: {group: 3}}\nlaunch: {processes: 4}\n", "batch-norm groups of 3 ranks do not divide the "
         "4 ranks"),
        ("model: {batch_norm: {group: 2, span: 64}}\n", "model.batch_norm: span: 64 images and group: 2 ranks both"),
        ("model: {batch_norm: {span: 96}}\n", "span of 96 images does not divide the 256 images of one pass"),
        ("model: {batch_norm: {span: 96}}\ntrain: {global_batch: 192, accumulation: 3}\n", "does not divide the 64 "
         "images of one pass (train.global_batch 192 / train.accumulation 3)"),
        ("model: {batch_norm: {span: 48}}\ntrain: {global_batch: 192}\nlaunch: {processes: 3}\n", "span of 48 images "
         "does not divide the 64 images of one rank and pass (192 / (3 x 1))"),
        ("model: {batch_norm: {span: 96}}\ntrain: {global_batch: 192}\nlaunch: {processes: 3}\n", "span of 96 images "
         "is no multiple of the 64 images of one rank and pass"),
        ("train: {all_reduce: {row: 3}}\nlaunch: {processes: 4}\n", "rows of 3 ranks do not divide the 4 ranks"),
        ("input: {image_size: 16}\n", "run.yaml: images of 16 px are too small for the imagenet stem"),
        ("evaluate: {image_size: 16}\n", "images of 16 px are too small"),
        ("train: {epochs: 5, schedule: {warmup_epochs: 5}}\n", "run.yaml:1: a warm-up of 5.0 epochs does not end"),
        ("train: {optimizer: {nesterov: true, momentum: 0}}\n", "Nesterov's form needs"),
        ("input: {groups: 2}\n", "groups belong to the blocked order"),
        ("input: {order: blocked, groups: 7}\n", "train.global_batch 256 is not divisible by input.groups 7"),
        ("input: {crop: {scale: [0.9, 0.5]}}\n", "scale: needs 0 < low <= high"),
        ("input: {crop: {scale: [0.5, 1.5]}}\n", "a crop cannot keep more than the whole image"),
        ("train: {schedule: {milestones: [30, 20]}}\n", "milestones: must be positive and rising"),
        ("train: {all_reduce: {bucket_mb: 1e-6}}\n", "1e-06 MiB is smaller than one fp32 element"),
        ("train: {all_reduce: {algorithm: ring, wire_row: bf16}}\n", "ring knows no rows; set wire_column"),
        ("train: {all_reduce: {algorithm: ddp, wire_column: bf16}}\n", "ddp sends fp32; choose another algorithm"),
        ("train: {weight_update: sharded, all_reduce: {algorithm: tree}}\n", "tree cannot stop half way"),
        ("launch: {resources: {accelerators: 8}}\n", "name the resource of the 8 accelerators"),
    ],
)  # fmt: skip
def test_fields_that_cannot_hold_together(text: str, message: str):
    assert message in refusal(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1.e-4", 1e-4), (".5", 0.5), ("+1E2", 100.0), ("3", 3.0), ("010", 10.0), ("0x10", 16.0)],
)
def test_numbers_are_those_of_yaml_1_2(text: str, value: float):
    document = f"train: {{epochs: 100, schedule: {{learning_rate: {text}}}}}"
    assert math.isclose(loads(document).train.schedule.learning_rate, value)


def test_words_are_those_of_yaml_1_2():
    """Classes called `no` and `on`, times and dates are text; only true and false are not."""
    words = ["no", "on", "yes", "1:30", "2026-01-01", "1_000", "<<", "="]
    assert loads(f"data: {{classes: [{', '.join(words)}]}}").data.classes == tuple(words)
    assert "got true" in refusal("data: {classes: [true]}")


def test_overrides_win_and_are_named_in_errors():
    config = loads("train: {epochs: 3}\n", overrides=["train.epochs=7", "train.schedule.name=step", "run.id=b"])
    assert (config.train.epochs, config.train.schedule.name, config.run.id) == (7.0, "step", "b")
    assert loads("", overrides=["input.crop.scale=[0.5, 1]"]).input.crop.scale == (0.5, 1.0)
    assert loads("", overrides=["train.all_reduce={row: 2}"]).train.all_reduce.row == 2
    assert loads("", overrides=["input.cache_dir=null"]).input.cache_dir is None
    assert loads("", overrides=["data.source=s3://bucket/a=b"]).data.source == "s3://bucket/a=b"
    told = refusal("train: {epochs: 3}\n", "train.epochs=none")
    assert told.startswith("--set train.epochs=none: train.epochs: ")
    assert "--set lunch.processes=2: unknown key lunch; did you mean launch?" in refusal("", "lunch.processes=2")
    assert "--set train.epoch=2: unknown key train.epoch; did you mean train.epochs?" in refusal("", "train.epoch=2")
    assert "--set run.id=5: run.id:" in refusal("", "run.id=5")
    assert "run.id=2026" not in refusal("", "train.epochs=")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs", "write it as section.key=value"),
        ("=3", "write it as section.key=value"),
        ("train.epochs.more=3", "train.epochs is a value, not a section"),
        ("train..epochs=3", "write it as section.key=value"),
    ],
)
def test_malformed_overrides(override: str, message: str):
    assert message in refusal("train: {epochs: 2}\n", override)


def test_an_override_cannot_smuggle_what_a_document_cannot():
    assert "aliases are not allowed" in refusal("", "input.mean=[&x 0.5, *x, *x]")
    assert "given twice" in refusal("", "train={epochs: 2, epochs: 3}")


def test_unreadable_files(tmp_path: Path):
    with pytest.raises(InputError, match="No such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(InputError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: {id: caf\xe9}\n")
    with pytest.raises(InputError, match="not UTF-8"):
        load(tmp_path / "latin.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(InputError, match="larger than 1048576 bytes"):
        load(tmp_path / "large.yaml")
    (tmp_path / "control.yaml").write_bytes(b"run: {id: a\x00b}\n")
    with pytest.raises(InputError, match="not valid YAML"):
        load(tmp_path / "control.yaml")


def test_deep_nesting_is_refused_not_a_crash():
    assert "not valid YAML" in refusal("a: " + "[" * 100_000)


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
    ("first", "second", "warmup", "place", "text"),
    [
        (6, 4, 1, "d.yaml:7", "phases must begin one after the other"),
        (6, 10, 1, "d.yaml:7", "from epoch 10.0 on never begins"),
        (6, 9, 4, "d.yaml:6", "a warm-up of 4.0 epochs does not end within its schedule of 4 epochs"),
        (0, 9, 1, "d.yaml:5", "greater than 0"),
    ],
)
def test_phases_that_do_not_fit_are_told_by_line(first, second, warmup, place, text):
    with pytest.raises(InputError, match=text) as caught:
        loads(PHASES.format(first=first, second=second, warmup=warmup), "d.yaml")
    assert str(caught.value).startswith(place)


def test_momentum_is_not_corrected_twice():
    told = refusal("train: {schedule: {momentum_correction: true, warmup_epochs: 5}}")
    assert "momentum_form=unscaled" in told
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
    with pytest.raises(InputError, match=r"unknown key train\.phases\.1\.crops; did you mean train\.phases\.1\.crop\?"):
        loads(text.replace("crop:", "crops:"))
    with pytest.raises(InputError, match=r"phases\.0\.schedule\.warmup; did you mean .*schedule\.warmup_start"):
        loads(text.replace("warmup_epochs", "warmup"))
