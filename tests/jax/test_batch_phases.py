"""Global batches that change by phase in the JAX engine: the other engine's losses, bit-exact resume."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.errors import Preempted
from podscale.runs import RunDirectory
from tests.jax.test_trainer import LARS, alike, close, continued, stop_before
from tests.support.engines import document, lines_of, losses_of, state_after, train_in_jax, train_in_torch
from tests.support.refusals import refused
from tests.support.shard_set import make_shard_set

pytestmark = [pytest.mark.timeout(900), pytest.mark.shallow]  # compiles whole steps, possibly on a busy machine
PHASES = ({"start": 1, "global_batch": 48, "accumulation": 3}, {"start": 3, "global_batch": 16, "accumulation": 1})
"""Three steps of 16 images, two of 48 and three of 16."""


@pytest.mark.slow
def test_both_engines_train_alike_when_the_batch_changes(tmp_path: Path) -> None:
    """From PyTorch's checkpoint of step 2 through both changes, one step and up to four steps a call."""
    shards = make_shard_set(tmp_path / "shards")
    settings: dict[str, Any] = {"train__optimizer": LARS, "train__phases": PHASES, "checkpoint__every_steps": 2}
    torch = document(tmp_path, "torch", **settings)
    train_in_torch(torch, shards)
    jax = continued(torch, 2, "jax")
    assert train_in_jax(jax, shards, devices=1).steps == 8
    expected = losses_of(torch)
    alike(losses_of(jax), {step: expected[step] for step in range(3, 9)}, 2e-4)
    close(state_after(jax, 8), state_after(torch, 8), 2e-3)
    epochs = [[line["epoch"] for line in lines_of(run, "step")] for run in (jax, torch)]
    assert epochs[0] == epochs[1][2:]
    for run in (jax, torch):
        changes = [(line["step"], line["global_batch"]) for line in lines_of(run, "event") if line["event"] == "batch"]
        assert changes == [(3, 48), (5, 16)]

    calls: dict[str, Any] = {"train__steps_per_call": 4, "telemetry__log_every": 100, "train__engine": "jax"}
    source = RunDirectory.for_config(continued(torch, 2, "calls"))
    together = document(tmp_path, "calls", **{**settings, **calls, "checkpoint__every_steps": 0})
    assert source.path == RunDirectory.for_config(together).path
    train_in_jax(together, shards, devices=1)
    close(state_after(together, 8), state_after(jax, 8), 1e-4)


@pytest.mark.slow
def test_runs_stopped_around_a_change_resume_to_the_bit(tmp_path: Path) -> None:
    """Two devices with sharded weights; stopped before, at and after the change after step 6.

    A batch-norm group is both devices, then each has its own parts, then both again.
    """
    shards = make_shard_set(tmp_path / "shards")
    settings: dict[str, Any] = {
        "train__optimizer": LARS,
        "train__weight_update": "sharded",
        "train__engine": "jax",
        "train__phases": ({"start": 2, "global_batch": 32}, {"start": 3, "global_batch": 16}),
        "model__batch_norm": {"span": 16},
        "evaluate__every_epochs": 4,
        "checkpoint__every_epochs": 4,
    }
    whole = document(tmp_path, "whole", **settings)
    train_in_jax(whole, shards, 2)
    expected = state_after(whole, 10)
    for step in (5, 6, 7):
        stopped = document(tmp_path, f"stopped{step}", **settings)
        with refused(f"step {step} of 10", kind=Preempted):
            train_in_jax(stopped, shards, 2, stop_before(step - 3))
        assert train_in_jax(stopped, shards, 2).steps == 10
        resumed = state_after(stopped, 10)
        assert [name for name in expected if not np.array_equal(expected[name], resumed[name])] == []
        assert losses_of(stopped) == losses_of(whole)


def test_groups_follow_the_batch_as_in_the_other_engine(tmp_path: Path) -> None:
    """Groups of two of four devices, then of all, then of one; PyTorch has the same groups in the batch of one rank."""
    shards = make_shard_set(tmp_path / "shards")
    settings: dict[str, Any] = {
        "train__optimizer": LARS,
        "train__phases": ({"start": 1, "global_batch": 8}, {"start": 2, "global_batch": 32}),
        "model__batch_norm": {"span": 8},
    }
    torch, jax = (document(tmp_path, name, **settings, checkpoint__every_steps=2) for name in ("torch", "jax"))
    train_in_torch(torch, shards, lambda session: order_by_rank(session, 4))
    jax = continued(torch, 2, "jax")
    assert train_in_jax(jax, shards, devices=4).steps == 12
    expected = losses_of(torch)
    alike(losses_of(jax), {step: expected[step] for step in range(3, 13)}, 5e-4)
    close(state_after(jax, 12), state_after(torch, 12), 5e-3)


def order_by_rank(session: Any, ranks: int) -> None:
    """Let a session of one rank read each global batch in the order of `ranks` ranks, each with its own images."""
    batches = session.loader.batches

    def reordered(start: int, stop: int) -> Iterator[Any]:
        for batch in batches(start, stop):
            order = np.arange(len(batch.labels)).reshape(-1, ranks).T.reshape(-1)
            yield replace(
                batch, **{name: getattr(batch, name)[order] for name in ("images", "labels", "keys", "weights")}
            )

    session.loader.batches = reordered
