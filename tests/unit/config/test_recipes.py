"""Recipe table against constants written here a second time; properties of the interpolation; documents."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podscale.config import dumps, loads
from podscale.config.recipes import MLPERF_LARS, nearest_divisor, recipe_row, recipe_values
from tests.support.refusals import refused

# mlcommons/training_results_*: batch -> learning rate, warm-up epochs, momentum, weight decay, epochs to 75.9 %, span
LOGGED = {
    816: (5.3, 2, 0.9, 5e-5, 35, 408),
    1632: (7.4, 2, 0.9, 5e-5, 35, 408),
    2048: (9.0, 3, 0.9, 5e-5, 35, 256),
    3200: (10.5, 2, 0.9, 5e-5, 35, 400),
    3264: (10.5, 2, 0.9, 5e-5, 35, 408),
    4096: (12.0, 2, 0.9, 5e-5, 36, 256),
    8192: (17.0, 5, 0.9, 1e-4, 41, 128),
    13056: (12.8, 9, 0.94, 2.5e-5, 45, 204),
    16384: (26.5, 7, 0.9, 5e-5, 47, 128),
    20480: (22.0, 12, 0.9, 2.5e-5, 50, 40),
    32768: (29.0, 18, 0.929, 1e-4, 60, 64),
    33280: (21.2, 16, 0.94, 2.5e-5, 56, 65),
    35840: (21.9, 17, 0.94, 2.5e-5, 58.4, 35),
    55296: (25.67, 29, 0.94053, 1e-4, 78.4, 64),
    57344: (23.0, 32, 0.95, 2.5e-5, 77, 32),
    65536: (24.699, 31, 0.951807, 1e-4, 87.2, 64),
}
# decay_steps as logged: whole epochs of the schedule, or steps after the warm-up
IN_EPOCHS = {816: 37, 1632: 37, 3200: 37, 3264: 37, 4096: 37, 13056: 48, 20480: 52, 33280: 58, 35840: 60, 57344: 78}
IN_STEPS = {2048: 20626, 8192: 5929, 16384: 3355, 32768: 1653, 55296: 1190, 65536: 1133}


def test_the_table_is_that_of_the_logs() -> None:
    recipe_values = {
        row.batch: (row.learning_rate, row.warmup, row.momentum, row.weight_decay, row.reached, row.span)
        for row in MLPERF_LARS
    }
    assert recipe_values == LOGGED
    assert list(recipe_values) == sorted(recipe_values)


@pytest.mark.parametrize("row", MLPERF_LARS, ids=lambda row: str(row.batch))
def test_a_schedule_is_as_long_as_logged(row) -> None:
    if row.batch in IN_EPOCHS:
        assert row.epochs == IN_EPOCHS[row.batch]
    else:
        steps = IN_STEPS[row.batch] + row.warmup * 1_281_167 / row.batch
        assert row.epochs == round(steps * row.batch / 1_281_167)
    assert row.epochs >= row.reached - 0.5


@pytest.mark.parametrize("batch", LOGGED)
def test_a_batch_of_the_table_gets_its_row_to_the_digit(batch: int) -> None:
    config = loads(f"train: {{recipe: mlperf-lars, global_batch: {batch}}}")
    rate, warmup, momentum, decay, _, span = LOGGED[batch]
    train = config.train
    assert (train.optimizer.name, train.optimizer.momentum, train.optimizer.weight_decay) == ("lars", momentum, decay)
    assert (train.schedule.learning_rate, train.schedule.warmup_epochs) == (rate, warmup)
    assert (train.schedule.name, train.schedule.power, train.schedule.end_learning_rate) == ("polynomial", 2, 1e-4)
    assert (train.optimizer.trust_coefficient, train.optimizer.eps, train.label_smoothing) == (0.001, 0, 0.1)
    assert config.model.batch_norm.span == span
    assert re.findall(r"batch (\d+(?:,\d+)?)", str(train.recipe_origin)) == [f"{batch:,}"]
    assert " between " not in str(train.recipe_origin), "it is one row"


@given(st.integers(816, 65536))
def test_a_batch_between_two_rows_lies_between_them(batch: int) -> None:
    row, origin = recipe_row(batch)
    below = max((r for r in MLPERF_LARS if r.batch <= batch), key=lambda r: r.batch)
    above = min((r for r in MLPERF_LARS if r.batch >= batch), key=lambda r: r.batch)
    for name in ("learning_rate", "warmup", "momentum", "weight_decay", "epochs", "span"):
        low, high = sorted((getattr(below, name), getattr(above, name)))
        assert low * 0.999 <= getattr(row, name) <= high * 1.001, name
    rates = sorted(r.learning_rate / (1 - r.momentum) for r in (below, above))
    assert rates[0] * 0.998 <= row.learning_rate / (1 - row.momentum) <= rates[1] * 1.002
    assert math.log2(row.weight_decay / 1e-4) == pytest.approx(round(math.log2(row.weight_decay / 1e-4)), abs=1e-3)
    if below is not above:
        assert f"{below.batch:,} ({below.submitter})" in origin
        assert f"{above.batch:,} ({above.submitter})" in origin


def test_half_way_is_the_geometric_mean() -> None:
    """4,096 and 8,192 are neighbours; their middle on the logarithmic scale is 5,792.6."""
    row, _ = recipe_row(5793)
    assert row.learning_rate == pytest.approx(math.sqrt(12 * 17), rel=1e-3)
    assert row.warmup == 3.5
    assert row.momentum == 0.9
    assert row.epochs == 40
    wide, _ = recipe_row(round(math.sqrt(35840 * 55296)))
    assert 1 - wide.momentum == pytest.approx(math.sqrt(0.06 * (1 - 0.94053)), abs=1e-5)
    assert wide.weight_decay == 5e-5


def test_a_span_divides_the_batch_or_is_left_open() -> None:
    assert nearest_divisor(6000, 180) == 200
    assert nearest_divisor(4099, 128) is None, "a prime"
    for batch in (5000, 6144, 24576, 49152):
        assert batch % recipe_values("mlperf-lars", batch).values["model.batch_norm.span"] == 0
    config = loads("train: {recipe: mlperf-lars, global_batch: 4099}")
    assert config.model.batch_norm.span is None
    assert "about 256 images" in str(config.train.recipe_origin)


EXPLICIT = """
model: {batch_norm: {group: 2}}
train:
  recipe: mlperf-lars
  global_batch: 6000
  epochs: 20
  label_smoothing: 0.0
  optimizer: {momentum: 0.91}
  schedule: {learning_rate: 9.5}
"""


def test_what_the_person_wrote_stands() -> None:
    config = loads(EXPLICIT, overrides=["train.schedule.power=1.5"])
    train = config.train
    assert (train.epochs, train.label_smoothing, train.optimizer.momentum) == (20, 0.0, 0.91)
    assert (train.schedule.learning_rate, train.schedule.power) == (9.5, 1.5)
    assert (train.optimizer.name, train.schedule.name, train.schedule.end_learning_rate) == ("lars", "polynomial", 1e-4)
    assert train.schedule.warmup_epochs == pytest.approx(3.7)
    assert (config.model.batch_norm.group, config.model.batch_norm.span) == (2, None)


@pytest.mark.parametrize("text", [EXPLICIT, "train: {recipe: mlperf-lars, global_batch: 4099}"])
def test_the_resolved_document_holds_the_values_and_loads_again(text: str) -> None:
    config = loads(text)
    resolved = dumps(config)
    assert "recipe: mlperf-lars" in resolved
    assert loads(resolved) == config
    assert dumps(loads(resolved)) == resolved
    assert type(config).model_validate_json(config.model_dump_json()) == config, "as it travels into pods"


@pytest.mark.parametrize(
    ("text", "field", "got"),
    [
        ("train: {recipe: mlperf-lars}", "train.global_batch", 256),
        ("train: {recipe: mlperf-lars, global_batch: 815}", "train.global_batch", 815),
        ("train: {recipe: mlperf-lars, global_batch: 81920}", "train.global_batch", 81920),
        ("train: {recipe: goyal, global_batch: 8192}", "train.recipe", "goyal"),
        ("train: {recipe: mlperf-lars, global_batch: 8192, optimizer: {name: sgd}}", "train.optimizer.name", "sgd"),
        ("train: {recipe: mlperf-lars, global_batch: many}", "train.global_batch", "many"),
        ("train: {recipe: mlperf-lars, global_batch: 8192, schedule: 5}", "train.schedule", 5),
        ("train: 7", "train", 7),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(text: str, field: str, got: object) -> None:
    with refused(field=field, got=got) as refusal:
        loads(text, "d.yaml")
    assert refusal.error.location == "d.yaml:1"
    assert "\n" not in refusal.text
