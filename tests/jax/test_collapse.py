"""A run that starts from a snapshot takes its weights, statistics and provenance only, in both engines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.config import RunConfig
from podscale.config.optimizer import EmaSection
from podscale.runs import RunDirectory, ensemble_members
from podscale.runs.checkpoint.format import complete_entries
from tests.support.engines import small, state_after, train_in_jax, train_in_torch
from tests.support.refusals import refused
from tests.support.shard_set import make_shard_set

CYCLES = {"cycles": [2, 1.5], "warmup_epochs": [0.3], "collapse": {"epochs": 1}}
FIRST, LAST = 6, 11  # steps: three an epoch, and the last one begins inside an epoch


def cycling(workspace: Path) -> RunConfig:
    values = small(workspace).model_dump(exclude_unset=True)
    del values["train"]["epochs"]  # set by the cycles
    checkpoint = {"keep_last": 1, "keep_best": 0, "every_epochs": 1}
    return RunConfig.model_validate({**values, "ensemble": CYCLES, "checkpoint": checkpoint})


def description(config: RunConfig) -> Any:
    return json.loads((RunDirectory.for_config(config).model / "model.json").read_text())


def beginning(arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Record the state of a PyTorch trainer before its first step."""

    def prepare(session: Any) -> None:
        seek = session.step.seek

        def look(number: int) -> None:
            seek(number)
            arrays.update({name: tensor.clone().numpy() for name, tensor in session.state.tensors().items()})

        session.step.seek = look

    return prepare


@pytest.fixture
def trained(tmp_path: Path) -> tuple[RunConfig, Path]:
    """Train a run in two cycles. Returns its document and its shards."""
    config, shards = cycling(tmp_path), make_shard_set(tmp_path / "shards")
    train_in_torch(config, shards)
    return config, shards


def test_a_member_starts_from_its_snapshot(trained: tuple[RunConfig, Path]) -> None:
    config, shards = trained
    kept = [entry.step for entry in complete_entries(RunDirectory.for_config(config).checkpoints)]
    assert kept == [LAST, FIRST], "the first is not among the newest, but a snapshot"
    first, _last = (member.config for member in ensemble_members.ensemble_members(config))
    ema = first.train.model_copy(update={"ema": EmaSection(decay=0.9)})
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    train_in_torch(first.model_copy(update={"train": ema}), shards, beginning(arrays))
    snapshot = state_after(config, FIRST)
    for name, values in arrays.items():
        kind, _, rest = name.partition("/")
        expected = snapshot[f"model/{rest}"] if kind in ("model", "ema") else np.zeros_like(values)
        np.testing.assert_array_equal(values, expected, err_msg=name)
    assert any(snapshot[name].any() for name in snapshot if name.startswith("optimizer/"))
    started_from = {"run": "tiny", "step": FIRST, "epoch": 2.0, "epochs": 2.0}
    found = description(first)["training"]["started_from"]
    assert started_from.items() <= found.items()
    assert (found["head"], found["skipped"], found["initialised"]) == ("kept", [], [])


def test_the_other_engine_starts_from_it_too(trained: tuple[RunConfig, Path]) -> None:
    config, shards = trained
    last = ensemble_members.ensemble_members(config)[-1].config
    arrays: dict[str, Any] = {}

    def prepare(session: Any) -> None:  # no step, because compiling one takes longest
        session.batches = lambda: iter(())
        session.finish = lambda: arrays.update(arrays=session.capture_state().arrays, origin=session.progress.origin)

    train_in_jax(last, shards, devices=1, prepare=prepare)
    snapshot = state_after(config, LAST)
    assert arrays["arrays"].keys() == {name for name in snapshot if "/" in name}
    for name, values in arrays["arrays"].items():
        expected = snapshot[name] if name.startswith("model/") else np.zeros_like(values)
        np.testing.assert_array_equal(values, expected, err_msg=name)
    assert arrays["origin"]["step"] == LAST


def test_a_member_of_a_member_counts_all_epochs(trained: tuple[RunConfig, Path]) -> None:
    config, shards = trained
    first = ensemble_members.ensemble_members(config)[0].config
    train_in_torch(first, shards)
    start = first.train.start_from.model_copy(update={"run": first.run.id, "epoch": None})
    again = first.model_copy(
        update={
            "run": first.run.model_copy(update={"id": "again"}),
            "train": first.train.model_copy(update={"start_from": start}),
        }
    )
    train_in_torch(again, shards)
    started_from = description(again)["training"]["started_from"]
    assert (started_from["run"], started_from["epoch"], started_from["epochs"]) == ("tiny-c0", 1.0, 3.0)


def test_a_start_that_does_not_fit_is_refused(trained: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, shards = trained
    first = ensemble_members.ensemble_members(config)[0].config

    def start(**changes: Any) -> RunConfig:
        values = first.model_dump()
        for section, change in changes.items():
            values[section] = {**values[section], **change}
        return RunConfig.model_validate(values)

    with refused("model.width: ", "4, ", "8"):
        train_in_torch(start(model={"width": 8}), shards)
    with refused("epochs 2, 3.66667", field="train.start_from.epoch", got=1.0):
        train_in_torch(start(train={"start_from": {"run": "tiny", "epoch": 1.0}}), shards)
    with refused(field="train.start_from.run", got="nobody"):
        train_in_torch(start(train={"start_from": {"run": "nobody"}}), shards)
    others = make_shard_set(tmp_path / "others", classes=["ant", "bee", "cat", "eel"])
    with refused(field="train.head", got="keep"):
        train_in_torch(start(train={"head": "keep"}), others)
