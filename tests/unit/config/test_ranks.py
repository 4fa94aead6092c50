"""Batch-norm groups of a document's span or group in worlds of different sizes."""

from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from podscale.config import RunConfig
from podscale.config.fields import input_error
from podscale.config.ranks import BatchNormGroup, batch_norm_group


def document(batch: int, accumulation: int = 1, **batch_norm: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"train": {"global_batch": batch, "accumulation": accumulation}, "model": {"batch_norm": batch_norm}}
    )


@pytest.mark.parametrize(
    ("config", "ranks", "want"),
    [
        (document(256), 4, BatchNormGroup(1, 64)),
        (document(256, group=2), 4, BatchNormGroup(2, 64)),
        (document(256, accumulation=2, group=4), 4, BatchNormGroup(4, 32)),
        (document(256, span=64), 4, BatchNormGroup(1, 64)),
        (document(256, span=64), 1, BatchNormGroup(1, 64)),
        (document(256, span=64), 16, BatchNormGroup(4, 16)),
        (document(256, span=64), 256, BatchNormGroup(64, 1)),
        (document(256, accumulation=4, span=64), 4, BatchNormGroup(4, 16)),
        (document(256, span=256), 8, BatchNormGroup(8, 32)),
        (
            document(32768, span=128),
            2048,
            BatchNormGroup(8, 16),
        ),  # Google, MLPerf v0.6 on 2048 cores: groups of 8 x 16 images
        (document(32768, span=64), 8192, BatchNormGroup(16, 4)),
        (document(32768, span=32), 64, BatchNormGroup(1, 32)),
    ],
)
def test_a_span_means_ranks_and_images(config: RunConfig, ranks: int, want: BatchNormGroup):
    group = batch_norm_group(config, ranks)
    assert group == want
    if config.model.batch_norm.span is not None:
        assert group.total == config.model.batch_norm.span


@pytest.mark.parametrize(
    ("config", "ranks", "key", "got", "limit"),
    [
        (document(192, span=48), 3, "span", 48, "divide the 64 images of one rank and pass (192 / (3 x 1))"),
        (document(192, span=96), 3, "span", 96, "multiple of the 64 images"),
        (document(256, group=3), 4, "group", 3, "4 ranks"),
    ],
)
def test_a_span_that_does_not_fit_is_refused(config: RunConfig, ranks: int, key: str, got: int, limit: str):
    with pytest.raises(PydanticCustomError) as caught:
        batch_norm_group(config, ranks)
    error = input_error(caught.value.context)
    assert (error.field, error.got) == (f"model.batch_norm.{key}", got)
    assert limit in error.problem
