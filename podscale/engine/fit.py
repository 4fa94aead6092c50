"""Whether a run fits the world that it has found."""

from pydantic_core import PydanticCustomError

from podscale.config import RunConfig
from podscale.config.batch_norm_groups import batch_norm_group
from podscale.config.checks import check_ranks
from podscale.config.fields import refusal
from podscale.errors import InputError


def validate_world(config: RunConfig, ranks: int, samples: int) -> None:
    """Raises InputError where the run does not fit this many ranks or this many training images."""
    train = config.train
    try:
        check_ranks(config, ranks)
    except PydanticCustomError as error:
        raise refusal(error) from None
    if train.global_batch > samples:
        raise InputError(
            f"larger than the training split of {samples} images",
            field="train.global_batch",
            got=train.global_batch,
            hint="Lower it, or give more images.",
        )
    if batch_norm_group(config, ranks).total < 2:
        raise InputError(
            f"one image per rank and pass has no variance for batch norm ({ranks} ranks, "
            f"train.accumulation {train.accumulation})",
            field="train.global_batch",
            got=train.global_batch,
            hint="Use at least 2 images per rank and pass.",
        )
