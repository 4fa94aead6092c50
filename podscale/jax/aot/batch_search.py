"""Search for the largest batch that fits, with few compilations: memory grows linearly with the batch."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from podscale.config.ranks import fits_devices
from podscale.errors import InputError
from podscale.jax.aot.request import CompileRequest, cached_result
from podscale.util.formatting import format_count

MAX_BATCH = 4096
"""Largest number of images of one rank that is tried."""
BATCH_STEP = 8
"""Batches above this are tried in multiples of it: a TPU's memory holds 8 rows of a tile."""
MAX_SECANTS = 5
"""Number of batches that are chosen by a line through two others, before halving."""


class FitResult(NamedTuple):
    """Memory of a compiled step, bytes of a device.

    `fits` is the compiler's answer: the sizes in its messages are rounded and may be equal.
    """

    fits: bool
    needed: float
    available: float


MeasureFunction = Callable[[CompileRequest], FitResult]


def allowed_batches(request: CompileRequest) -> list[int]:
    """Return the batches of one rank that the document's other options allow, in ascending order."""
    sizes = [size for size in range(1, MAX_BATCH + 1) if size < BATCH_STEP or size % BATCH_STEP == 0]
    devices = request.topology.device_count
    return [size for size in sizes if fits_devices(with_batch(request, size).config, devices)]


def with_batch(request: CompileRequest, batch: int) -> CompileRequest:
    """Return the request for another batch of each rank, and the same number of epochs."""
    before, after = request.config.train.global_batch, batch * request.ranks
    train = request.config.train.model_copy(update={"global_batch": after})
    steps = max(1, round(request.steps * before / after))
    return replace(request, config=request.config.model_copy(update={"train": train}), steps=steps)


def find_largest_batch(request: CompileRequest, measure: MeasureFunction) -> int:
    """Return the largest allowed batch that fits: the next allowed batch does not.

    Tries the document's batch first, then one in proportion to the available memory, then by a line through two
    measurements. Raises InputError if none fits.
    """
    allowed = allowed_batches(request)
    if not allowed:
        raise InputError(
            f"no batch up to {MAX_BATCH} images for each of the {request.ranks} ranks fits the other options of "
            "the document (model.batch_norm.span, model.batch_norm.group)",
            field="--sweep",
            got="batch",
        )
    needs: dict[int, float] = {}
    fitting, failing = -1, len(allowed)  # indices in `allowed`
    index = max(0, bisect_right(allowed, request.batch) - 1)
    while failing - fitting > 1:
        result = measure(with_batch(request, allowed[index]))
        needs[allowed[index]] = result.needed
        if result.fits:
            fitting = index
        else:
            failing = index
        index = _next_index(allowed, needs, result.available, fitting, failing)
    if fitting < 0:
        raise InputError(
            f"not even {format_count(allowed[0], 'image')} for each of the {request.ranks} ranks, the smallest batch "
            f"that the document allows, fits the memory of {request.topology.chip.name}",
            field="--sweep",
            got="batch",
            hint="Choose chips with more memory, a smaller input.image_size or model, or cut images over devices "
            "(train.spatial_partitions).",
        )
    return allowed[fitting]


def _next_index(allowed: Sequence[int], needs: dict[int, float], available: float, fitting: int, failing: int) -> int:
    """Return the index to try: by a line through the two outermost measurements, or in proportion to a single one."""
    if len(needs) > MAX_SECANTS:
        # Memory is not linear if the compiler recomputes what does not fit: it then needs nearly all memory for many
        # batches, and each line would end just after the last one tried.
        return (fitting + failing) // 2
    low, high = min(needs), max(needs)
    if low != high and needs[high] > needs[low]:
        slope = (needs[high] - needs[low]) / (high - low)
        estimate = low + (available - needs[low]) / slope
    else:
        estimate = high * available / needs[high]
    return min(max(bisect_right(allowed, estimate) - 1, fitting + 1), failing - 1)


ResultsByBatch = Mapping[int, Mapping[str, Any]]
"""The compiler's analysis (`fits` and `memory`), by images of a rank."""


def cached_results(request: CompileRequest, cache: Path) -> dict[int, dict[str, Any]]:
    """Return the cached results of the same step with other batches."""
    results = {batch: cached_result(with_batch(request, batch), cache) for batch in allowed_batches(request)}
    return {batch: result for batch, result in results.items() if result is not None}


def largest_known_batch(request: CompileRequest, results: ResultsByBatch) -> dict[str, Any]:
    """Return the largest batch by one or more results, as JSON values.

    batch: allowed images of a rank; 0 if none fits. basis: `compiled` if that batch fits and the next allowed one does
    not, both compiled; else an estimate, `line` through the memory of two batches or `proportion`. images: estimated
    images that fit, allowed or not; of: the batches that the estimate is from.
    """
    fitting = max((batch for batch, result in results.items() if result["fits"]), default=0)
    failing = min((batch for batch, result in results.items() if not result["fits"] and batch > fitting), default=None)
    allowed = sorted({*allowed_batches(request), *results})
    if next((batch for batch in allowed if batch > fitting), None) == failing:
        of = [batch for batch in (fitting, failing) if batch]
        images, basis = fitting, "compiled"
    else:
        of = _closest(results, fitting, failing)
        memories = [results[batch]["memory"] for batch in of]
        estimate = int(batch_within_memory(memories, of, request.topology.device_available_bytes))
        # A compiled batch overrides the estimate: if memory is short, the compiler recomputes what it stored before.
        images = max(fitting, estimate if failing is None else min(estimate, failing - 1))
        basis = "line" if len(of) == 2 else "proportion"
    batch = max((size for size in allowed if size <= images), default=0)
    return {"batch": batch, "global_batch": batch * request.ranks, "basis": basis, "images": images, "of": of}


def _closest(results: ResultsByBatch, fitting: int, failing: int | None) -> list[int]:
    """Return the two batches closest to the available memory, or one if no other needs more memory."""
    known = sorted(results)
    if fitting and failing:
        pair = [fitting, failing]
    else:
        pair = known[-2:] if fitting else known[:2]
    rises = results[pair[-1]]["memory"]["needed"] > results[pair[0]]["memory"]["needed"]
    return pair if rises else pair[-1:]


def batch_within_memory(memories: Sequence[Mapping[str, Any]], batches: Sequence[int], available: float) -> float:
    """Estimate the images that fit the available bytes, from one or two batches.

    Two batches give a line. With one, temporaries grow in proportion; weights, momentum and program stay. If that step
    does not fit, the compiler reports only the sum, and all of it is assumed to grow. The compiler's `available` counts
    if it is less.
    """
    available = min(memory.get("available", available) for memory in memories)
    first, last = memories[0], memories[-1]
    if len(memories) == 2:
        bytes_per_image = (last["needed"] - first["needed"]) / (batches[1] - batches[0])
    else:
        bytes_per_image = last.get("temporaries", last["needed"]) / batches[0]
    return float(batches[-1] + (available - last["needed"]) / bytes_per_image)
