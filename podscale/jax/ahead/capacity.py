"""The largest batch that fits, as far as compilations that were made anyway tell it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podscale.jax.ahead.request import CompileRequest, cached_result
from podscale.jax.ahead.sweep import allowed_batches, with_batch

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
