"""Search for the largest batch that fits, with few compilations: memory grows linearly with the batch."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from podscale.config.checks import fits_devices
from podscale.errors import InputError
from podscale.jax.aot.request import CompileRequest, cached_result
from podscale.util.formatting import format_count

MAX_BATCH = 4096
"""Images of one rank: more serve no run that is known."""
BATCH_STEP = 8
"""Batches above this are tried in multiples of it: a TPU's memory holds 8 rows of a tile."""

MAX_SECANTS = 5
"""Batches that are found by a line through two others, before halving."""


class FitResult(NamedTuple):
    """What the compiler says of a request; needed, available: bytes of a device.

    Whether it fits, the compiler decides: in the figures of its messages, which are rounded, both may be the same.
    """

    fits: bool
    needed: float
    available: float


MeasureFunction = Callable[[CompileRequest], FitResult]


def allowed_batches(request: CompileRequest) -> list[int]:
    """Batches of one rank that the document's other options allow, in ascending order."""
    sizes = [size for size in range(1, MAX_BATCH + 1) if size < BATCH_STEP or size % BATCH_STEP == 0]
    devices = request.topology.device_count
    return [size for size in sizes if fits_devices(with_batch(request, size).config, devices)]


def with_batch(request: CompileRequest, batch: int) -> CompileRequest:
    """The same with so many images for each rank, and as many epochs: fewer updates of larger batches."""
    before, after = request.config.train.global_batch, batch * request.ranks
    train = request.config.train.model_copy(update={"global_batch": after})
    updates = max(1, round(request.steps * before / after))
    return replace(request, config=request.config.model_copy(update={"train": train}), steps=updates)


def find_largest_batch(request: CompileRequest, measure: MeasureFunction) -> int:
    """The largest allowed batch that fits.

    Begins with the document's own, goes on in proportion, then to where a line through two measurements meets the
    memory that there is; the answer stands when it fits and the next allowed batch does not. Raises InputError where
    none fits.
    """
    allowed = allowed_batches(request)
    if not allowed:
        raise InputError(
            f"no batch up to {MAX_BATCH} images for each of the {request.ranks} ranks goes with the other options of "
            "the document (model.batch_norm.span, model.batch_norm.group)",
            field="--sweep",
            got="batch",
        )
    needs: dict[int, float] = {}
    fitting, failing = -1, len(allowed)  # places in `allowed`
    at = max(0, bisect_right(allowed, request.batch) - 1)
    while failing - fitting > 1:
        found = measure(with_batch(request, allowed[at]))
        needs[allowed[at]] = found.needed
        if found.fits:
            fitting = at
        else:
            failing = at
        at = _next_batch(allowed, needs, found.available, fitting, failing)
    if fitting < 0:
        raise InputError(
            f"not even {format_count(allowed[0], 'image')} for each of the {request.ranks} ranks, the smallest batch "
            f"that the document allows, fits the memory of {request.topology.chip.name}",
            field="--sweep",
            got="batch",
            hint="Choose chips with more, a smaller input.image_size or model, or cut images over devices "
            "(train.spatial_partitions).",
        )
    return allowed[fitting]


def _next_batch(allowed: Sequence[int], needs: dict[int, float], available: float, fitting: int, failing: int) -> int:
    """The place to try: where the line through the two outermost measurements says, else in proportion to the one."""
    if len(needs) > MAX_SECANTS:
        # Memory is no line where the compiler recomputes what it does not hold: it then needs as good as all of it, for
        # batch after batch, and each line would end just behind the one that was tried last.
        return (fitting + failing) // 2
    low, high = min(needs), max(needs)
    if low != high and needs[high] > needs[low]:
        slope = (needs[high] - needs[low]) / (high - low)
        wanted = low + (available - needs[low]) / slope
    else:
        wanted = high * available / needs[high]
    place = bisect_right(allowed, wanted) - 1
    return min(max(place, fitting + 1), failing - 1)


ResultsByBatch = Mapping[int, Mapping[str, Any]]
"""What the compiler said (`fits` and `memory` of it), by images of a rank."""


def cached_results(request: CompileRequest, cache: Path) -> dict[int, dict[str, Any]]:
    """Results in a folder that are of the same step with other batches, all else equal."""
    found = {batch: cached_result(with_batch(request, batch), cache) for batch in allowed_batches(request)}
    return {batch: result for batch, result in found.items() if result is not None}


def largest_known_batch(request: CompileRequest, results: ResultsByBatch) -> dict[str, Any]:
    """The largest batch by what one or more results say, as JSON values.

    batch: images of a rank, out of those that the document allows; 0 where none fits. basis: `compiled` where that
    batch fits and the next allowed one does not, both compiled; else an estimate, `line` through the memory of two
    batches or `proportion`. images: what the memory would hold by that, allowed or not; of: the batches it is from.
    """
    fitting = max((batch for batch, result in results.items() if result["fits"]), default=0)
    failing = min((batch for batch, result in results.items() if not result["fits"] and batch > fitting), default=None)
    allowed = sorted({*allowed_batches(request), *results})
    if next((batch for batch in allowed if batch > fitting), None) == failing:
        of = [batch for batch in (fitting, failing) if batch]
        images, basis = fitting, "compiled"
    else:
        of = _closest(results, fitting, failing)
        held = int(
            batch_within_memory([results[batch]["memory"] for batch in of], of, request.topology.device_available_bytes)
        )
        # What was compiled counts for more than a line: short of memory, the compiler recomputes what it kept before.
        images = max(fitting, held if failing is None else min(held, failing - 1))
        basis = "line" if len(of) == 2 else "proportion"
    batch = max((one for one in allowed if one <= images), default=0)
    return {"batch": batch, "global_batch": batch * request.ranks, "basis": basis, "images": images, "of": of}


def _closest(results: ResultsByBatch, fitting: int, failing: int | None) -> list[int]:
    """The two batches closest to where memory ends, or one where there is no other, or none that needs more."""
    known = sorted(results)
    if fitting and failing:
        pair = [fitting, failing]
    else:
        pair = known[-2:] if fitting else known[:2]
    rises = results[pair[-1]]["memory"]["needed"] > results[pair[0]]["memory"]["needed"]
    return pair if rises else pair[-1:]


def batch_within_memory(memories: Sequence[Mapping[str, Any]], batches: Sequence[int], available: float) -> float:
    """Images for which so many bytes of memory are enough: where the line through two batches ends, or by one alone.

    By one alone, temporaries grow in proportion; weights, momentum and program stay. Where a step does not fit, the
    compiler tells no parts of the memory that it needs, and all of it is taken to grow; what it then says is available
    counts, should that be less.
    """
    available = min(memory.get("available", available) for memory in memories)
    first, last = memories[0], memories[-1]
    if len(memories) == 2:
        each = (last["needed"] - first["needed"]) / (batches[1] - batches[0])
    else:
        each = last.get("temporaries", last["needed"]) / batches[0]
    return float(batches[-1] + (available - last["needed"]) / each)
