"""The JAX engine trains the published presets along the trajectories of PyTorch (see `tests.support`)."""

import re

import pytest
import yaml

from podscale.pipelines.presets import published_presets
from tests.support.jax_trajectories import refused_presets, train_in_jax
from tests.support.preset_mutations import MUTATIONS
from tests.support.preset_trajectories import STEPS, differences, golden, is_noticed, tiny
from tools.papers_page import DATA

REFUSED = {"rsb-a1": "train.loss", "rsb-a2": "train.loss", "rsb-a3": "train.loss", "torchvision-v2": "train.mix"}
"""Presets that this engine does not take, and the first option that it does not have. Others only name a loader or a
precision of GPUs, or options of PyTorch that change no numbers; their tiny forms have none of these."""
SHOWN = [mutation for mutation in MUTATIONS if mutation[0] not in REFUSED and mutation[2] != "schedule"]
"""Mutations that this engine's part of a step shows. Both engines have the same schedules."""
FIRST = {name: (name, change, part) for name, change, part in reversed(SHOWN)}
"""First mutation of each preset. The others are slow: each compiles a step, and PyTorch's test shows the same file."""
pytestmark = pytest.mark.timeout(900)  # compiles, possibly on a busy machine


def test_the_presets_that_it_refuses() -> None:
    assert refused_presets() == REFUSED
    note = yaml.safe_load(DATA.read_text(encoding="utf-8"))["preset_tests_note"]
    assert re.findall("`([^`]+)`", note) == sorted(REFUSED), "docs/explanation/papers.md names them"


@pytest.mark.parametrize("name", sorted({*published_presets()} - {*REFUSED}))
def test_jax_follows_the_golden_trajectory_of_a_preset(name: str) -> None:
    """If a change is meant, write the file anew: python -m tests.support.preset_trajectories."""
    found, want = train_in_jax(tiny(name)), golden()[name]
    assert len(found.losses) == STEPS
    assert not differences(found, want)


@pytest.mark.parametrize(
    ("name", "change", "shown_by"),
    [pytest.param(*it, marks=() if it in FIRST.values() else pytest.mark.slow) for it in SHOWN],
)
def test_a_changed_constant_or_form_is_noticed(name: str, change: str, shown_by: str) -> None:
    """By a difference of at least ten tolerances; the training ends when the losses have it."""
    mutated, want = tiny(name, [change]), golden()[name]
    if shown_by == "losses":
        assert is_noticed(train_in_jax(mutated, lambda losses: is_noticed(losses, want)).losses, want)
    else:
        assert shown_by in differences(train_in_jax(mutated), want, times=10.0)
