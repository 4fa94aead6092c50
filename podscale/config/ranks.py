"""Ranks of a run document: the devices that share an image, batch norm groups, and whether a number of devices fits.

A batch norm group is the images that share statistics, and the ranks that compute them together.
"""

from dataclasses import dataclass
from math import prod

from pydantic_core import PydanticCustomError

from podscale.config.batch_phases import check_each_batch
from podscale.config.fields import conflict_error, input_error
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


def check_batch_divisible(config: RunDocument, parts: int = 1, unit: str = "") -> None:
    """Raise if the global batch does not divide into equal passes of `parts` ranks or processes."""
    batch, accumulation = config.train.global_batch, config.train.accumulation
    if batch % (parts * accumulation):
        passes = f"{unit} x accumulation = {parts} x" if unit else "train.accumulation"
        raise conflict_error("train.global_batch", f"not divisible by {passes} {accumulation}", got=batch)


def check_device_count(config: RunDocument, devices: int) -> None:
    """Raise if the document does not fit a number of devices."""
    train, shared = config.train, devices_per_rank(config)
    if devices % shared:
        down, across = train.spatial_partitions
        raise conflict_error(
            "train.spatial_partitions",
            f"{down} x {across} devices share an image, and this does not divide the {devices} devices of the run",
            got=train.spatial_partitions,
        )
    ranks = devices // shared
    check_batch_divisible(config, ranks, "ranks")
    batch_norm_group(config, devices)
    row = train.all_reduce.row
    if row is not None and devices % row:
        raise conflict_error("train.all_reduce.row", f"does not divide the {devices} ranks of the run", got=row)


def check_ranks(config: RunDocument, devices: int) -> None:
    """Raise InputError if a valid document does not fit a number of devices, with the batch of each phase."""
    try:
        check_each_batch(config, lambda each: check_device_count(each, devices))
    except PydanticCustomError as error:
        raise input_error(error.context) from None


def fits_devices(config: RunDocument, devices: int) -> bool:
    """Return True if batch, spans and rows of a document fit the number of devices."""
    try:
        check_each_batch(config, check_batch_norm_span)
        check_each_batch(config, lambda each: check_device_count(each, devices))
    except PydanticCustomError:
        return False
    return True
