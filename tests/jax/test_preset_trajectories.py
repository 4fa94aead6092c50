"""The JAX engine trains the published presets as the PyTorch engine does: the same golden losses."""

import numpy as np
import pytest

from podscale.config import RunConfig
from podscale.config.engine_support import find_unsupported_option
from podscale.pipelines.presets import published_presets
from tests.support.preset_trajectories import golden, tiny, train_in_jax

TOLERANCE = 2e-2
"""Relative to loss + 0.1. Kernels round differently, which ReLUs amplify: 8e-3 in fast runs, 4e-7 in slow ones."""
pytestmark = pytest.mark.timeout(900)  # compiles, possibly on a busy machine


def rule_of(config: RunConfig) -> tuple[object, ...]:
    """Return what the programs of this engine differ in; rates, momenta and decays are data."""
    optimizer = config.train.optimizer.model_copy(update={"momentum": 0.9, "weight_decay": 0.0})
    return optimizer.effective_eps, optimizer.model_copy(update={"eps": None}).model_dump_json()


def test_presets_follow_their_golden_trajectories() -> None:
    """One preset of each rule that this engine has. The constants of all are pinned by the PyTorch engine's test."""
    documents = {name: tiny(name) for name in published_presets()}
    supported = {
        name: config
        for name, config in documents.items()
        if find_unsupported_option(config) is None and config.train.accumulation == 1
    }
    of_rules = {rule_of(config): name for name, config in reversed(supported.items())}
    assert {"ying2018-32k", "kumar2019-32k", "kumar2019-32k-tuned", "codreanu2017-1536nodes"} <= set(of_rules.values())
    worst = {}
    for name in of_rules.values():
        want = np.array(golden()[name].losses)
        losses = train_in_jax(tiny(name, engine="jax"))
        worst[name] = float((np.abs(losses - want) / (want + 0.1)).max())
    assert max(worst.values()) < TOLERANCE, worst
