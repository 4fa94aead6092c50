"""Phases and members that follow from an ensemble section, against the published runs; sections that are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.config import RunConfig, load, loads
from podscale.data.step_positions import step_positions
from podscale.pipelines import presets
from podscale.runs import ensemble_members
from podscale.training import schedules
from tests.support.refusals import refused

ITERATIONS = 1_281_167 / 4096
"""Iterations of an epoch in Codreanu's 64-node run; the rest is from the authors' solver files."""

PUBLISHED = """
ensemble:
  cycles: [25, 12, 15, 15]
  first_peak: 1.02
  warmup_epochs: [0, 3.2, 3.2]
  decay_epochs: 24
  collapsed: [1, 2, 3]
  collapse: {epochs: 5, weight_decay_factor: 4}
train:
  global_batch: 4096
  optimizer: {momentum_form: unscaled, weight_decay: 5.0e-5}
  schedule:
    {name: polynomial, power: 1, learning_rate: 1.6, warmup_start: 0.1, warmup_epochs: 5, decay_from: start,
     decay_epochs: 60, momentum_correction: true}
run: {id: cycles, workspace: /workspace, seed: 7}
"""


def published(*changes: str) -> RunConfig:
    return loads(PUBLISHED, "published", list(changes))


def test_the_cycles_are_those_of_the_published_run() -> None:
    """Base rates, powers, lengths and warm-ups of its solver files, which give rates with three digits."""
    config = published()
    assert config.train.epochs == 67
    assert config.checkpoint.snapshots == (37, 52, 67)
    rows = [(p.start, p.schedule) for p in config.train.phases if p.schedule is not None and p.reset_momentum]
    assert [start for start, _ in rows] == [25, 37, 52]
    assert [s.learning_rate for _, s in rows] == pytest.approx([1.02, 0.764, 0.572], rel=5e-3)
    assert [s.warmup_start for _, s in rows] == pytest.approx([0, 0.255, 0.19], rel=1e-2)
    assert [s.warmup_epochs for _, s in rows] == [0, 3.2, 3.2]
    assert [s.momentum_correction for _, s in rows] == [False, True, True]
    assert {(s.power, s.decay_epochs, s.decay_from, s.name) for _, s in rows} == {(2, 24, "start", "polynomial")}


def test_the_collapse_is_that_of_the_published_run() -> None:
    last = ensemble_members.ensemble_members(published())[-1].config
    assert last.train.schedule.learning_rate == pytest.approx(0.143, rel=5e-3)
    assert (last.train.schedule.power, last.train.schedule.warmup_epochs, last.train.epochs) == (2, 0, 5)
    assert last.train.optimizer.weight_decay == pytest.approx(2e-4)
    assert (last.input.crop.short_side, last.input.crop.flip) == (0.875, 0.5)
    assert (last.train.start_from.run, last.train.start_from.epoch) == ("cycles", 67)


def test_the_preset_of_the_64_nodes_has_the_same_rates_in_phases() -> None:
    """Learning rates of every step up to the collapse; the preset writes the authors' iterations out as epochs."""
    written = load(presets.resolve_preset("codreanu2017-64nodes")).train
    lengths = ["ensemble.cycles=[24.937,11.989,15.186,15.186]", "ensemble.decay_epochs=23.978"]
    warmups = ["ensemble.warmup_epochs=[0,3.197,3.197]", "train.schedule.warmup_epochs=4.987"]
    derived = published(*lengths, *warmups).train
    steps = np.arange(0, round(67.29 * ITERATIONS), 50)
    near = [
        schedules.hyperparameters_at(train, steps, step_positions(train, round(ITERATIONS * train.global_batch)))[:, 0]
        for train in (written, derived)
    ]
    np.testing.assert_allclose(near[1], near[0], rtol=0.01, atol=2e-3)


def test_members_are_runs_of_their_own() -> None:
    config = published()
    members = ensemble_members.ensemble_members(config)
    assert [(m.cycle, m.config.run.id) for m in members] == [(1, "cycles-c1"), (2, "cycles-c2"), (3, "cycles-c3")]
    assert [m.config.train.start_from.epoch for m in members] == [37, 52, 67]
    assert len({m.config.run.seed for m in members} | {config.run.seed}) == 4
    for member in members:
        assert not member.config.train.phases
        assert not member.config.checkpoint.snapshots
        assert not ensemble_members.ensemble_members(member.config)
        assert member.model == Path(f"/workspace/runs/{member.config.run.id}/model")
    assert ensemble_members.combined_model_directories(config) == [m.model for m in members]
    assert ensemble_members.combined_model_directories(loads("{}")) == []


def test_a_resolved_document_gives_the_same_members() -> None:
    config = published()
    assert RunConfig.model_validate(config.model_dump()) == config


def test_options_of_the_document_override_the_derived_ones() -> None:
    config = published("ensemble.collapse.learning_rate=0.3", "checkpoint.snapshots=[37,52,67,60]", "train.phases=[]")
    assert config.checkpoint.snapshots == (37, 52, 67, 60)
    assert config.train.phases == ()
    assert {m.config.train.schedule.learning_rate for m in ensemble_members.ensemble_members(config)} == {0.3}


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        (["ensemble.collapsed=[3]"], "ensemble.cycles", "at least two"),
        (["ensemble.cycles=[67]", "ensemble.collapsed=null", "ensemble.warmup_epochs=[0]"], "ensemble.cycles", "two"),
        (["ensemble.collapsed=[1,4]"], "ensemble.collapsed", "from 0 to 3"),
        (["ensemble.cycles=[25,0,15,15]"], "ensemble.cycles", "positive"),
        (["ensemble.warmup_epochs=[0,1]"], "ensemble.warmup_epochs", "3 later cycles"),
        (["checkpoint.snapshots=[37,52]"], "checkpoint.snapshots", "epoch 67"),
        (["train.epochs=60"], "checkpoint.snapshots", "60 epochs (got 67"),
        (["evaluate.models=[one]"], "evaluate.models", "two or more"),
        (["train.start_from.epoch=3"], "train.start_from.epoch", "train.start_from.run"),
    ],
)
def test_a_document_is_refused(changes: list[str], field: str, expected: str) -> None:
    with refused(expected, field=field):
        published(*changes)


def test_names_of_members_must_fit_and_exist() -> None:
    name = "r" * 39
    with refused(40, field="run.id", got=name):
        ensemble_members.ensemble_members(published(f"run.id={name}"))
    with refused("1, 2, 3", field="ensemble.cycles", got=0):
        ensemble_members.ensemble_member(published(), 0)
    with refused(field="ensemble", got=0):
        ensemble_members.ensemble_member(loads("{}"), 0)


def test_models_are_named_by_run_or_directory(tmp_path: Path) -> None:
    values: dict[str, Any] = {"run": {"workspace": str(tmp_path)}, "evaluate": {"models": ["one", "two"]}}
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model.json").touch()
    values["evaluate"]["models"] = ["one", str(bare), str(tmp_path / "elsewhere/run")]
    directories = ensemble_members.combined_model_directories(RunConfig.model_validate(values))
    assert directories == [tmp_path / "runs/one/model", bare, tmp_path / "elsewhere/run/model"]
