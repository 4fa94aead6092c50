"""Batch norm groups: images per statistics and the ranks that share them."""

from dataclasses import dataclass
from math import prod

from podscale.config.fields import conflict_error
from podscale.config.run import RunDocument


@dataclass(frozen=True)
class BatchNormGroup:
    """Images that share statistics: `images` of each of `ranks` consecutive ranks, in one forward pass.

    With one rank, `images` may be a part of its batch.
    """

    ranks: int
    images: int

    @property
    def total(self) -> int:
        """Images per set of statistics, `model_bn_span` in MLPerf's logs."""
        return self.ranks * self.images


def devices_per_rank(config: RunDocument) -> int:
    """Return the number of devices that share an image, as one rank of the sample order."""
    return prod(config.train.spatial_partitions)


def batch_norm_group(config: RunDocument, devices: int) -> BatchNormGroup:
    """Return the batch-norm group for a number of devices; raises a conflict if it does not fit.

    A group is measured in batches of one rank and forward pass: global batch / (ranks x accumulation) images.
    """
    section, train = config.model.batch_norm, config.train
    ranks = devices // devices_per_rank(config)
    batch = train.global_batch // (ranks * train.accumulation)
    if section.span is None:
        if ranks % section.group:
            raise conflict_error(
                "model.batch_norm.group",
                f"does not divide the {ranks} ranks of the run",
                got=section.group,
            )
        return BatchNormGroup(section.group, batch)
    images = f"{batch} images of one rank and pass ({train.global_batch} / ({ranks} x {train.accumulation}))"
    if section.span <= batch:
        if batch % section.span:
            raise conflict_error(
                "model.batch_norm.span",
                f"does not divide the {images}",
                got=section.span,
                hint="Use a divisor or a multiple.",
            )
        return BatchNormGroup(1, section.span)
    group, rest = divmod(section.span, batch)
    if rest:
        raise conflict_error(
            "model.batch_norm.span",
            f"not a multiple of the {images}",
            got=section.span,
            hint="Use a multiple or a divisor.",
        )
    assert ranks % group == 0, "check_batch_norm_span: the span divides a pass"
    return BatchNormGroup(group, batch)


def check_batch_norm_span(config: RunDocument) -> None:
    """Raise if the batch-norm span does not divide the images of one pass, so that no number of ranks fits."""
    section, train = config.model.batch_norm, config.train
    if section.span is None:
        return
    images = train.global_batch // train.accumulation
    if images % section.span:
        raise conflict_error(
            "model.batch_norm.span",
            f"does not divide the {images} images of one pass "
            f"(train.global_batch {train.global_batch} / train.accumulation {train.accumulation})",
            got=section.span,
        )
