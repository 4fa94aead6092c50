"""A world or a data set that the batch of a phase does not fit."""

from typing import Any

import pytest

from podscale.config import RunConfig
from podscale.training.startup_checks import validate_world
from tests.support.refusals import refused


def config(phase: dict[str, Any], **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"train": {"epochs": 4, "global_batch": 32, "phases": [{"start": 2, **phase}], **train}}
    )


@pytest.mark.parametrize(
    ("phase", "ranks", "field", "got"),
    [
        ({"global_batch": 200}, 8, "train.phases.0.global_batch", 200),  # more than the images
        ({"global_batch": 36}, 8, "train.phases.0.global_batch", 36),  # no multiple of the ranks
        ({"global_batch": 8}, 8, "train.phases.0.global_batch", 8),  # one image a rank
        ({"accumulation": 4}, 8, "train.global_batch", 32),  # one image a rank and pass
        ({"global_batch": 64}, 5, "train.global_batch", 32),
    ],
)
def test_every_phase_fits_the_world(phase: dict[str, Any], ranks: int, field: str, got: int) -> None:
    with refused(field=field, got=got):
        validate_world(config(phase), ranks, 100)


def test_a_world_that_fits_every_phase() -> None:
    validate_world(config({"global_batch": 96, "accumulation": 3}), 8, 100)
