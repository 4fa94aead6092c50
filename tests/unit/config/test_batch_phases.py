"""Batches by phase: inherited values, and the documents of the how-to page."""

import re
from pathlib import Path

import pytest

from podscale.config import TrainSection, loads
from podscale.config.batch_phases import batch_phases, format_batches, largest_batch, largest_pass
from podscale.training import schedules

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "batch-by-phase.md"
DOCUMENTS = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
IMAGENET, CIFAR = 1_281_167, 50_000


def test_a_phase_inherits_what_it_does_not_set() -> None:
    phases = [
        {"start": 1, "global_batch": 64},
        {"start": 2, "momentum": 0.5},
        {"start": 3, "accumulation": 4},
        {"start": 4, "global_batch": 32, "accumulation": 1},
    ]
    train = TrainSection.model_validate({"epochs": 9, "global_batch": 16, "accumulation": 2, "phases": phases})
    found = batch_phases(train)
    assert [(p.start, p.global_batch, p.accumulation) for p in found] == [
        (0, 16, 2),
        (1, 64, 2),
        (3, 64, 4),
        (4, 32, 1),
    ]
    assert [p.batch_option for p in found] == [
        "train.global_batch",
        "train.phases.0.global_batch",
        "train.phases.0.global_batch",
        "train.phases.3.global_batch",
    ]
    assert (largest_batch(train).start, largest_pass(train).start) == (1, 1)
    assert format_batches(train) == "16, then 64 from epoch 1, then 32 from epoch 4"


def test_the_page_shows_four_documents() -> None:
    assert len(DOCUMENTS) == 4


@pytest.mark.parametrize(
    ("number", "samples", "batches", "rates"),
    [
        (0, IMAGENET, [8192, 16384], {20: 3.2, 50: 3.2, 70: 0.32, 85: 0.032}),
        (1, CIFAR, [128, 640, 3200, 16000], {1: 0.1, 199: 0.1}),
        (2, IMAGENET, [34816, 69632], {18: 29.0, 54: 29.0 / 4}),
        (3, IMAGENET, [32768], {1: 6.4, 50: 0.075 * 12.8, 75: 0.01 * 12.8, 88: 0.001 * 12.8}),
    ],
)
def test_the_documents_of_the_page_are_valid(
    number: int, samples: int, batches: list[int], rates: dict[float, float]
) -> None:
    train = loads(DOCUMENTS[number]).train
    assert [phase.global_batch for phase in batch_phases(train)] == batches
    epochs, values = schedules.sample_for_plot(train, samples, points=4000)
    for epoch, rate in rates.items():
        nearest = abs(epochs - epoch).argmin()
        assert values[nearest, 0] == pytest.approx(rate, rel=0.02), epoch
