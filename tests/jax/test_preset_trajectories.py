"""The JAX engine trains the published presets as the PyTorch engine does: the same golden losses."""

import numpy as np
import pytest

from podscale.config import RunConfig
from podscale.config.engine_support import find_unsupported_option
from tests.support.preset_trajectories import golden, published_presets, tiny, train_in_jax

TOLERANCE = 2e-2
"""Relative to loss + 0.1. Kernels round differently, which ReLUs amplify: 8e-3 in fast runs, 4e-7 in slow ones."""
pytestmark = pytest.mark.timeout(900)  # compiles, possibly on a busy machine


def supported(config: RunConfig) -> bool:
    return find_unsupported_option(config) is None and config.train.accumulation == 1


def test_presets_follow_their_golden_trajectories() -> None:
    """All presets that this engine can train, in one test: they share the compiled gradients."""
    trained = [name for name in published_presets() if supported(tiny(name))]
    assert {"ying2018-32k", "kumar2019-32k", "codreanu2017-64nodes"} <= set(trained)
    worst = {}
    for name in trained:
        want = np.array(golden()[name].losses)
        losses = train_in_jax(tiny(name, engine="jax"))
        worst[name] = float((np.abs(losses - want) / (want + 0.1)).max())
    assert max(worst.values()) < TOLERANCE, worst
