"""`podscale tpu compile`: the step of a document, compiled for TPUs that are not here."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podscale import schedules
from podscale.commands.documents import load
from podscale.commands.outline import known_data
from podscale.commands.plot import IMAGENET
from podscale.config import RunConfig
from podscale.config.engines import find_lacking, wants_tpus
from podscale.errors import InputError
from podscale.hardware import Topology, find_topology
from podscale.jax.ahead.capacity import kept_results, largest_known
from podscale.jax.ahead.findings import findings
from podscale.jax.ahead.report import report, sweep_report
from podscale.jax.ahead.request import Request, compile_ahead, default_cache, kept_result
from podscale.jax.ahead.sweep import Measured, largest_batch
from podscale.text import human_bytes

CLASSES = 1000
"""Assumed while no shards are made and the document names no classes."""


@dataclass(frozen=True)
class Options:
    """As on the command line."""

    topology: str | None
    slices: int | None
    sweep: str | None
    cache: Path | None
    time_limit: float
    json: bool


def run(document: str | None, changes: Sequence[str], options: Options) -> None:
    """Prints what the TPU compiler says of one update of a document, or of the batches that a sweep tries.

    Raises InputError, once that is printed, where the update does not fit; a sweep looks for one that does.
    """
    if options.sweep not in (None, "batch"):
        raise InputError("there is one sweep, batch", field="--sweep", got=options.sweep)
    config = load(document, changes)
    request = request_of(config, _topology(config, options))
    kept = options.cache or default_cache()

    def examined(one: Request) -> dict[str, Any]:
        if kept_result(one, kept) is None:
            images = one.config.train.global_batch
            print(f"compiling {images} images for {one.topology} ...", file=sys.stderr, flush=True)
        return findings(one, compile_ahead(one, kept, options.time_limit))

    if options.sweep is None:
        found = examined(request)
        found["largest"] = largest_known(request, {**kept_results(request, kept), request.batch: found})
        _print(found if options.json else report(found))
        if not found["fits"]:
            raise _too_large(found)
        return
    rows: list[dict[str, Any]] = []

    def measure(one: Request) -> Measured:
        rows.append(examined(one))
        memory = rows[-1]["memory"]
        return Measured(rows[-1]["fits"], memory["needed"], memory["available"])

    largest = largest_batch(request, measure)
    if options.json:
        _print({"largest": largest_known(request, {row["batch"]: row for row in rows}), "tried": rows})
        return
    best = next(row for row in rows if row["batch"] == largest)
    _print([*report(best), "", *sweep_report(rows, largest)])


def _too_large(found: dict[str, Any]) -> InputError:
    largest = found["largest"]
    smaller = (
        f"Lower it to {largest['global_batch']}, or ask --sweep batch"
        if largest["batch"]
        else "No batch that the document allows fits: choose larger chips, a smaller model or smaller images."
    )
    over = human_bytes(found["memory"]["over"])
    problem = f"the step takes {over} more than a device of {found['topology']['name']} has"
    return InputError(problem, field="train.global_batch", got=found["global_batch"], hint=smaller)


def request_of(config: RunConfig, topology: Topology) -> Request:
    """What there is to compile of a document. Raises InputError for what the JAX engine does not have."""
    config = as_of_jax(config)
    counts, classes = known_data(config)
    updates = schedules.total_steps(config.train, counts.get("train", IMAGENET))
    return Request(config, topology, classes or CLASSES, updates)


def as_of_jax(config: RunConfig) -> RunConfig:
    """A document as the JAX engine would train it: without what only says how the PyTorch engine goes about it.

    Raises InputError for what changes the program and the JAX engine does not have.
    """
    own = {"cuda_graph": False, "compile": "off", "channels_last": True, "deterministic": False}
    reduce = config.train.all_reduce.model_copy(update={"backend": "auto", "overlap": True})
    cluster = config.launch.cluster.model_copy(update={"min_nodes": None})
    found = config.model_copy(
        update={
            "train": config.train.model_copy(update={"engine": "jax", "all_reduce": reduce, **own}),
            "input": config.input.model_copy(update={"loader": "auto"}),
            "launch": config.launch.model_copy(update={"cluster": cluster}),
        }
    )
    if lacking := find_lacking(found):
        raise InputError(
            f"{lacking.problem} (a step for TPUs is one of the JAX engine)",
            field=lacking.key,
            hint=f"Set {lacking.key}={lacking.instead}",
        )
    return found


def _topology(config: RunConfig, options: Options) -> Topology:
    """That of the command line, else that of the document."""
    hardware = config.launch.hardware if wants_tpus(config) else None
    name = options.topology or hardware
    if name is None:
        raise InputError(
            "no TPU",
            field="launch.hardware",
            got=config.launch.hardware,
            hint="Give --topology, such as v5e:4x4, or launch.hardware, such as tpu-v5e-4x4",
        )
    return find_topology(name, options.slices or config.launch.cluster.slices)


def _print(what: dict[str, Any] | list[str]) -> None:
    print(json.dumps(what, indent=2) if isinstance(what, dict) else "\n".join(what))
