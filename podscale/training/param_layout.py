"""A fixed layout of named tensors in one flat buffer, cut into buckets; both engines lay out gradients by it.

Which parameters an update decays, and whose rate it scales: what the optimizer section says of each by name.

How Shampoo cuts parameters, so that no matrix has more than `most` rows: small dimensions merged, long ones cut.

A filter is taken as (height, width, inputs, outputs) and a matrix as (inputs, outputs), as Google's MLPerf 1.0 entry
keeps them: with blocks of 128 a 3x3 convolution of 512 channels is (9, 512, 512), and 16 blocks of (9, 128, 128).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise, product
from math import lcm, prod
from typing import NamedTuple

from podscale.config.optimizer import OptimizerSection
from podscale.errors import InputError
from podscale.models import ModelSpec


class ParamOptions(NamedTuple):
    """uses_weight_decay: whether weight decay applies. uses_trust_ratio: whether LARS and LAMB scale its rate."""

    uses_weight_decay: bool
    uses_trust_ratio: bool


def param_options(section: OptimizerSection, spec: ModelSpec) -> dict[str, ParamOptions]:
    """The treatment of each parameter, in the order of the model.

    Raises InputError where a pattern of the skip list matches nothing.
    """
    names = [parameter.name for parameter in spec.parameters]
    for pattern in section.skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"no parameter of {spec.name} has this name",
                field="train.optimizer.skip",
                got=pattern,
                hint=f"Names are such as {', '.join(names[-2:])}, and * stands for any text.",
            )
    found = {}
    for parameter in spec.parameters:
        taken = not any(fnmatchcase(parameter.name, pattern) for pattern in section.skip)
        decays = taken and (section.decay_all or parameter.role == "weight")
        found[parameter.name] = ParamOptions(decays, taken and (section.adapt_all or decays))
    return found


ALIGNMENT_ELEMENTS = 32
"""Every tensor starts at a multiple of this many elements: 128 bytes of fp32, so that kernels read whole vectors."""


@dataclass(frozen=True)
class BucketLayout:
    """Where each tensor lies: tensor i is flat[starts[i] : starts[i] + sizes[i]], in bucket buckets[i].

    Depends on sizes and options alone, never on timing, so that a resumed run adds in the order of the run before it.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    buckets: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    """[start, stop) of each bucket; every bucket's length is a multiple of the `multiple` asked for."""

    @property
    def length(self) -> int:
        return self.bounds[-1][1]


def plan_buckets(
    sizes: Sequence[int],
    bucket_elements: int,
    multiple: int,
    *,
    isolate_last: bool = False,
    alignment: int = ALIGNMENT_ELEMENTS,
) -> BucketLayout:
    """Fills buckets in the order of `sizes`; a tensor larger than a bucket gets one of its own.

    Buckets are padded to a multiple of `multiple` (the shards of a sharded update). With `last_apart` the last tensor
    does not share its bucket. `alignment`: of every tensor's beginning.
    """
    unit = lcm(multiple, alignment)
    starts, buckets, bounds = [], [], []
    bucket_start = position = 0
    for number, size in enumerate(sizes):
        apart = isolate_last and number == len(sizes) - 1
        if position > bucket_start and (apart or position + size - bucket_start > bucket_elements):
            position = _round_up(position, unit)
            bounds.append((bucket_start, position))
            bucket_start = position
        starts.append(position)
        buckets.append(len(bounds))
        position = _round_up(position + size, alignment)
    bounds.append((bucket_start, bucket_start + _round_up(position - bucket_start, unit)))
    return BucketLayout(tuple(starts), tuple(sizes), tuple(buckets), tuple(bounds))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def shampoo_dim_order(dims: int) -> tuple[int, ...]:
    """The dimensions of a parameter that begins with (outputs, inputs), in the order given above."""
    return (*range(2, dims), *reversed(range(min(2, dims))))


def merge_small_dims(shape: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Neighbouring dimensions become one as long as it has at most `most` elements; those of one element vanish."""
    found: list[int] = []
    length = 1
    for size in shape:
        if length * size <= block_size:
            length *= size
        else:
            found += [length] * (length > 1)
            length = size
    return tuple(found + [length] * (length > 1)) or (prod(shape),)


def partition_blocks(shape: Sequence[int], block_size: int) -> list[tuple[tuple[int, int], ...]]:
    """The blocks of a merged parameter as [start, stop) of every dimension; the last dimension runs fastest."""
    return list(product(*(pairwise([*range(0, size, block_size), size]) for size in shape)))


def preconditioner_elements(shape: Sequence[int], block_size: int, *, vectors: bool) -> int:
    """Elements of the matrices of a parameter, one of every dimension of every block."""
    if len(shape) < 2 and not vectors:
        return 0
    blocks = partition_blocks(
        merge_small_dims([shape[dim] for dim in shampoo_dim_order(len(shape))], block_size), block_size
    )
    return sum((stop - start) ** 2 for block in blocks for start, stop in block)
