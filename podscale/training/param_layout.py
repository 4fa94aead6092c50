"""Layout of parameters and gradients in both engines: flat buffers in buckets, optimizer options."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import lcm
from typing import NamedTuple

from podscale.config.optimizer import OptimizerSection
from podscale.errors import InputError
from podscale.models import ModelSpec
from podscale.training.muon import orthogonalised_names


class ParamOptions(NamedTuple):
    """Optimizer options of one parameter; `uses_trust_ratio` is for LARS and LAMB, and for what Muon orthogonalises."""

    uses_weight_decay: bool
    uses_trust_ratio: bool


def param_options(section: OptimizerSection, spec: ModelSpec) -> dict[str, ParamOptions]:
    """Return the options of each parameter, in model order. Raises InputError if a pattern of `skip` matches none."""
    names = [parameter.name for parameter in spec.parameters]
    for pattern in section.skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"no parameter of {spec.name} has this name",
                field="train.optimizer.skip",
                got=pattern,
                hint=f"Examples of names are {', '.join(names[-2:])}; * matches any text.",
            )
    orthogonalised = orthogonalised_names(section.muon, spec)
    options = {}
    for parameter in spec.parameters:
        is_included = not any(fnmatchcase(parameter.name, pattern) for pattern in section.skip)
        is_treated = section.decay_all or parameter.role == "weight"
        decays = is_treated or (section.decay_biases and parameter.role == "bias")
        adapts = is_treated or section.adapt_all
        if section.name == "muon":
            adapts = parameter.name in orthogonalised
        options[parameter.name] = ParamOptions(is_included and decays, is_included and adapts)
    return options


ALIGNMENT_ELEMENTS = 32
"""Alignment of every tensor's start, elements: 128 bytes of fp32, so that kernels read whole vectors."""


@dataclass(frozen=True)
class BucketLayout:
    """Layout of tensors in a flat buffer: tensor i is flat[starts[i] : starts[i] + sizes[i]], in bucket buckets[i].

    It depends on sizes and options only, never on timing, so that a resumed run sums in the same order.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    buckets: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    """[start, stop) of each bucket; every length is a multiple of `plan_buckets`' `multiple`."""

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
    """Fill buckets in the order of `sizes`. A tensor larger than a bucket gets its own bucket.

    Args:
        multiple: each bucket is padded to a multiple of this, for the shards of a sharded optimizer step.
    """
    unit = lcm(multiple, alignment)
    starts, buckets, bounds = [], [], []
    bucket_start = position = 0
    for index, size in enumerate(sizes):
        is_isolated = isolate_last and index == len(sizes) - 1
        if position > bucket_start and (is_isolated or position + size - bucket_start > bucket_elements):
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
