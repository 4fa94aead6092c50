"""`podscale tpu compile`: compile the training step of a document for TPUs, without having them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podscale.cli.documents import IMAGENET_IMAGES, load_run_document
from podscale.cli.options import Json, Run, Set
from podscale.errors import InputError
from podscale.util.formatting import format_bytes

if TYPE_CHECKING:
    from podscale.config import RunConfig
    from podscale.hardware import Topology
    from podscale.jax.aot.request import CompileRequest

CompileReport = Callable[["CompileRequest"], dict[str, Any]]
"""Compiles a request, or takes its result from the cache, and returns the report."""

app = typer.Typer(help="Compile and estimate a run for TPUs, without having them.", no_args_is_help=True)


@app.command("compile")
def compile_step(
    document: Run = None,
    changes: Set = [],
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Topology of a slice, such as v5e:16x16; default: launch.hardware."),
    ] = None,
    slices: Annotated[
        int | None, typer.Option(help="Slices of that topology; default: launch.cluster.slices.", min=1)
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="batch", help="Find the largest batch that fits, by several compilations."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of results; default: ~/.cache/podscale/tpu-compile.")
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for one compilation.", min=1)] = 7200.0,
    as_json: Json = False,
) -> None:
    """Compile the training step with the TPU compiler: memory, estimate of the largest batch that fits, collectives,
    FLOP and bytes, estimated speed. Takes minutes; needs libtpu, but no TPU."""
    from podscale.config.batch_phases import largest_pass
    from podscale.jax.aot.compile_report import build_report
    from podscale.jax.aot.request import cached_result, compile_aot, default_cache

    if sweep not in (None, "batch"):
        raise InputError("unknown sweep", field="--sweep", got=sweep, hint="Choose batch.")
    config = load_run_document(document, changes)
    request = build_compile_request(config, _resolve_topology(config, topology, slices))
    cache = cache or default_cache()

    def compile_report_of(variant: "CompileRequest") -> dict[str, Any]:
        if cached_result(variant, cache) is None:
            images = variant.config.train.global_batch
            print(f"compiling {images} images for {variant.topology} ...", file=sys.stderr, flush=True)
        return build_report(variant, compile_aot(variant, cache, time_limit))

    if sweep is None:
        option = largest_pass(config.train).batch_option
        _report_batch(request, option, compile_report_of, cache, phases_note(config), as_json=as_json)
    else:
        _report_sweep(request, compile_report_of, phases_note(config), as_json=as_json)


def _report_batch(
    request: "CompileRequest",
    option: str,
    compile_report_of: CompileReport,
    cache: Path,
    note: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Compile the document's batch and print the report. Raises InputError that names `option` if it does not fit."""
    from podscale.jax.aot.batch_search import cached_results, largest_known_batch
    from podscale.jax.aot.compile_report import format_compile_report

    findings = {**compile_report_of(request), **note}
    findings["largest"] = largest_known_batch(request, {**cached_results(request, cache), request.batch: findings})
    _print_result(findings if as_json else format_compile_report(findings))
    if not findings["fits"]:
        raise _too_large_error(findings, option)


def _report_sweep(
    request: "CompileRequest", compile_report_of: CompileReport, note: dict[str, Any], *, as_json: bool
) -> None:
    """Compile several batches, to find and print the largest that fits."""
    from podscale.jax.aot.batch_search import FitResult, find_largest_batch, largest_known_batch
    from podscale.jax.aot.compile_report import format_compile_report, format_sweep_report

    rows: list[dict[str, Any]] = []

    def measure(variant: "CompileRequest") -> FitResult:
        rows.append(compile_report_of(variant))
        memory = rows[-1]["memory"]
        return FitResult(rows[-1]["fits"], memory["needed"], memory["available"])

    largest = find_largest_batch(request, measure)
    if as_json:
        known = largest_known_batch(request, {row["batch"]: row for row in rows})
        _print_result({"largest": known, "tried": rows, **note})
        return
    best = {**next(row for row in rows if row["batch"] == largest), **note}
    _print_result([*format_compile_report(best), "", *format_sweep_report(rows, largest)])


def phases_note(config: "RunConfig") -> dict[str, Any]:
    """Return the batch phases of a run with several, as a part of the report: only the largest pass is compiled."""
    from podscale.config.batch_phases import batch_phases, largest_pass

    phases, compiled = batch_phases(config.train), largest_pass(config.train)
    rows = [
        {
            "epoch": phase.start,
            "global_batch": phase.global_batch,
            "accumulation": phase.accumulation,
            "compiled": phase == compiled,
        }
        for phase in phases
    ]
    return {"phases": rows} if len(rows) > 1 else {}


def _too_large_error(findings: dict[str, Any], option: str) -> InputError:
    largest = findings["largest"]
    hint = (
        f"Lower it to {largest['global_batch']}, or find it with --sweep batch"
        if largest["batch"]
        else "No batch that the document allows fits: choose larger chips, a smaller model or smaller images."
    )
    excess = format_bytes(findings["memory"]["over"])
    problem = f"the step takes {excess} more than a device of {findings['topology']['name']} has"
    return InputError(problem, field=option, got=findings["global_batch"], hint=hint)


def build_compile_request(config: "RunConfig", topology: "Topology") -> "CompileRequest":
    """Build the request to compile the largest pass of a document, as if all steps had its batch.

    Raises InputError for an option that the JAX engine does not have.
    """
    from podscale.config.batch_phases import largest_pass
    from podscale.jax.aot.request import CompileRequest
    from podscale.stages.known_data import known_data
    from podscale.training import schedules
    from podscale.training.preflight import DEFAULT_CLASSES

    config = as_jax_config(config)
    counts, classes = known_data(config)
    steps = schedules.total_steps(config.train, counts.get("train", IMAGENET_IMAGES))
    return CompileRequest(largest_pass(config.train).apply(config), topology, classes or DEFAULT_CLASSES, steps)


def as_jax_config(config: "RunConfig") -> "RunConfig":
    """Return the document for the JAX engine, without PyTorch options that do not change the program.

    Raises InputError for another option that the JAX engine does not have.
    """
    from podscale.config.engine_support import find_unsupported_option

    pytorch_options = {"cuda_graph": False, "compile": "off", "channels_last": True, "deterministic": False}
    reduce = config.train.all_reduce.model_copy(update={"backend": "auto", "overlap": True})
    cluster = config.launch.cluster.model_copy(update={"min_nodes": None})
    jax_config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"engine": "jax", "all_reduce": reduce, **pytorch_options}),
            "input": config.input.model_copy(update={"loader": "auto"}),
            "launch": config.launch.model_copy(update={"cluster": cluster}),
        }
    )
    if unsupported := find_unsupported_option(jax_config):
        raise InputError(
            f"{unsupported.problem} (training on TPUs needs the JAX engine)",
            field=unsupported.key,
            hint=f"Set {unsupported.key}={unsupported.instead}",
        )
    return jax_config


def _resolve_topology(config: "RunConfig", topology: str | None, slices: int | None) -> "Topology":
    """Return the topology of the command line, else that of the document."""
    from podscale.config.engine_support import requests_tpus
    from podscale.hardware import find_topology

    hardware = config.launch.hardware if requests_tpus(config) else None
    name = topology or hardware
    if name is None:
        raise InputError(
            "no TPU",
            field="launch.hardware",
            got=config.launch.hardware,
            hint="Give --topology, such as v5e:4x4, or launch.hardware, such as tpu-v5e-4x4",
        )
    return find_topology(name, slices or config.launch.cluster.slices)


def _print_result(result: dict[str, Any] | list[str]) -> None:
    print(json.dumps(result, indent=2) if isinstance(result, dict) else "\n".join(result))
