"""Throughput sweeps of `podscale bench train`: variants of one document, measured in separate processes.

A variant that runs out of memory, does not compile or hangs becomes a row with its reason. Results are written to a
JSON file after every variant; a restarted sweep measures only what is missing.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from podscale.bench.images import write_synthetic_shard_set
from podscale.bench.ranks import run_workers
from podscale.bench.variants import BenchVariant
from podscale.config import RunConfig
from podscale.data.loaders.build_loader import open_shard_set
from podscale.errors import InputError
from podscale.util import host_info
from podscale.util.files import write_json
from podscale.util.locations import Location

MOST_PROFILED_STEPS = 5
"""Steps that a profile may add."""
BENCHMARK_MODULES = {
    "pytorch": "podscale.pytorch.throughput_benchmark",
    "jax": "podscale.jax.throughput_benchmark",
}
"""Module that measures a variant, by engine."""
SYNTHETIC_BATCHES = 4
"""Batches in the synthetic training split; few keep its index small."""
MIN_SECONDS_LEFT = 10.0
"""Minimal time left in the sweep's budget to start a variant, seconds."""


@dataclass(frozen=True)
class SweepSettings:
    """Settings of a sweep.

    Args:
        warmup: Training steps before the measurement.
        steps: Training steps of the throughput measurement.
        parts: Training steps of the per-phase measurement.
        time_limit: Seconds of one variant.
        budget: Seconds of all variants.
        shard_set: Location of the real images.
        profile: List the kernels of a step (GPU), and count its bytes.
    """

    warmup: int = 20
    steps: int = 50
    parts: int = 5
    time_limit: float = 300.0
    budget: float = 86400.0
    shard_set: str | None = None
    profile: bool = False


@dataclass
class SweepRow:
    """Result of one variant. Fields are keys of the results file.

    Args:
        key: Settings that identify the measurement (see `row_key`).
        found: Measured values; None if the variant failed.
        reason: Cause of the failure.
        seconds: Wall time of the variant.
    """

    name: str
    key: dict[str, Any]
    found: dict[str, Any] | None = None
    reason: str = ""
    seconds: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = self.key["options"]
        return options


BaseDocument = Callable[[list[str]], RunConfig]
"""Returns the base document with changes (`a.b=c`) applied."""
RowCallback = Callable[[SweepRow, list[SweepRow]], None]


def run_sweep(
    base: BaseDocument, variants: Sequence[BenchVariant], settings: SweepSettings, results: Path, on_row: RowCallback
) -> list[SweepRow]:
    """Measure each variant that the file `results` lacks; return the rows of all variants in order.

    `on_row` gets each row and all rows so far. Raises InputError before the first measurement if a document is invalid.
    """
    documents = [variant_document(base, variant, settings) for variant in variants]
    earlier = [row for row in read_rows(results) if row.found]
    rows: list[SweepRow] = []
    deadline = time.monotonic() + settings.budget
    for variant, config in zip(variants, documents, strict=True):
        row = SweepRow(variant.name, row_key(config, variant, settings))
        if known := next((old for old in earlier if old.key == row.key), None):
            row.found, row.seconds = known.found, known.seconds
        else:
            _measure(row, config, variant, settings, deadline - time.monotonic())
        rows.append(row)
        keys = [other.key for other in rows]
        write_json(results, [asdict(other) for other in (*rows, *(old for old in earlier if old.key not in keys))])
        on_row(row, rows)
    return rows


def read_rows(results: Path) -> list[SweepRow]:
    """Read the rows of an earlier sweep; empty without the file. Raises InputError for an invalid file."""
    if not results.exists():
        return []
    try:
        return [SweepRow(**row) for row in json.loads(results.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        problem = f"not the results of a benchmark ({error})"
        raise InputError(problem, field=str(results), hint="Choose another --out") from error


def variant_document(base: BaseDocument, variant: BenchVariant, settings: SweepSettings) -> RunConfig:
    """Return the run document of a variant; real images get all cores for decoding."""
    if variant.real_images and settings.shard_set is None:
        raise InputError(f"missing, and {variant.name} reads real images", field="--shard-set")
    plain = base([])
    processes = (
        variant.changes.get("launch.processes") or plain.launch.processes or host_info.default_processes_per_node()
    )
    changes = ["telemetry.enabled=false", f"launch.processes={processes}"]
    if variant.real_images and plain.input.loader == "synthetic":
        changes.append("input.loader=auto")
    if variant.real_images and plain.input.workers == 1:
        changes.append(f"input.workers={max(1, host_info.cpu_count() // processes)}")
    changes += [f"{name}={json.dumps(value)}" for name, value in variant.changes.items()]
    if not variant.real_images:
        changes.append("input.loader=synthetic")
    if variant.batch is not None:
        changes.append(f"train.global_batch={variant.batch * processes}")
    return base(changes)


def row_key(config: RunConfig, variant: BenchVariant, settings: SweepSettings) -> dict[str, Any]:
    """Return the settings that identify a measurement, as JSON values."""
    sections = config.model_dump(mode="json", include={"input", "model", "train", "launch"})
    options = {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in values.items()
        if (section, name) != ("train", "schedule")
    }
    return {
        "images": "real" if variant.real_images else "synthetic",
        "shard_set": _shard_set_name(settings) if variant.real_images else None,
        "device": host_info.gpu_names()[0] if host_info.visible_gpus() else host_info.cpu_name(),
        "steps": settings.steps,
        "warmup": settings.warmup,
        "parts": settings.parts,
        **({"profile": True} if settings.profile else {}),
        "options": options,
    }


def _shard_set_name(settings: SweepSettings) -> str | None:
    """Return the absolute location of the real images."""
    location = settings.shard_set
    return location if location is None or Location.parse(location).is_remote else str(Path(location).absolute())


def _measure(
    row: SweepRow, config: RunConfig, variant: BenchVariant, settings: SweepSettings, seconds_left: float
) -> None:
    """Measure a variant in separate processes and fill its row."""
    if seconds_left < MIN_SECONDS_LEFT:
        row.reason = "not measured: the time limit of the sweep had passed"
        return
    limit = min(settings.time_limit, seconds_left)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="podscale-bench-") as name:
        folder = Path(name)
        job, result, log = (folder / file for file in ("job.json", "result.json", "log.txt"))
        write_json(job, _benchmark_job(config, settings, settings.shard_set if variant.real_images else None, folder))
        arguments, threads = [str(job), str(result)], config.launch.threads or 0
        module = BENCHMARK_MODULES[config.train.engine]
        codes = run_workers(module, arguments, config.launch.processes, limit, threads=threads, log=log)
        if result.exists() and codes == [0] * len(codes):  # a rank may fail after rank 0 has written it
            row.found = json.loads(result.read_text())
        elif None in codes and not any(codes):
            row.reason = f"ran past its limit of {limit:.0f} s"
        else:
            row.reason = _failure_reason(folder, log)
    row.seconds = round(time.monotonic() - started, 1)


def _benchmark_job(config: RunConfig, settings: SweepSettings, shard_set: str | None, folder: Path) -> dict[str, Any]:
    """Build the job of the benchmark process: a document that lasts for all steps, and the shard set."""
    steps = settings.warmup + settings.steps + settings.parts + MOST_PROFILED_STEPS
    batch = config.train.global_batch
    if shard_set is None:
        images = SYNTHETIC_BATCHES * batch
        shard_set = str(write_synthetic_shard_set(folder / "imaginary", images=images))
    else:
        images = open_shard_set(shard_set, config).manifest.splits["train"].count
    values = config.model_dump(mode="json")
    values["run"] |= {"id": "bench", "workspace": str(folder)}
    values["train"] |= {"epochs": (steps + 1) * batch / images, "recipe": None, "recipe_origin": None, "phases": []}
    values["train"]["schedule"] |= {"learning_rate": 0.001, "warmup_epochs": 0.0}
    return {
        "config": values,
        "shard_set": shard_set,
        "warmup": settings.warmup,
        "steps": settings.steps,
        "parts": settings.parts,
        "profile": settings.profile,
        "timeout_seconds": settings.time_limit,
    }


def _failure_reason(folder: Path, log: Path) -> str:
    """Return the error of the first rank that reported one, or the last line of the log."""
    for path in sorted(folder.glob("result.[0-9]*")):
        return str(json.loads(path.read_text())["error"])
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"ended without a result: {lines[-1][:300] if lines else 'nothing was printed'}"
