"""Throughput sweeps of `podscale bench train`: variants of one document, measured in separate processes.

A variant that runs out of memory, does not compile or hangs becomes a row with its reason, and the sweep continues.
Results are written to a JSON file after every variant; a restarted sweep measures only what is missing. Variants with
synthetic images read a shard set that has an index like ImageNet's and no image bytes.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from podscale.bench.ranks import run_workers
from podscale.config import RunConfig
from podscale.data import index
from podscale.data.manifest import MANIFEST_FILE as MANIFEST
from podscale.data.manifest import SCHEMA_VERSION, Shard, ShardSetManifest, SplitSummary, classes_sha256
from podscale.errors import InputError
from podscale.util import host_info
from podscale.util.files import write_json

BENCHMARK_MODULE = "podscale.pytorch.throughput_benchmark"
SYNTHETIC_EPOCHS = 4
"""Batches in the synthetic training split, which keeps its index small."""
MIN_SECONDS_LEFT = 10.0
"""Least time left in the sweep's budget to start another variant, seconds."""
WIDTH, HEIGHT = 500, 375
"""Most frequent image size in ImageNet, pixels."""


@dataclass(frozen=True)
class BenchVariant:
    """One variant of a sweep.

    Args:
        changes: options that differ from the base document, by dotted name.
        batch: images per rank; default: the document's.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    batch: int | None = None
    real_images: bool = False
    """Read the shard set given to the sweep instead of synthetic images."""


@dataclass(frozen=True)
class SweepSettings:
    """Settings of a sweep.

    Args:
        warmup: training steps before the measurement.
        steps: training steps of the throughput measurement.
        parts: training steps of the per-phase measurement.
        time_limit: of one variant, seconds.
        budget: of all variants, seconds.
        shard_set: location of the real images.
    """

    warmup: int = 20
    steps: int = 50
    parts: int = 5
    time_limit: float = 300.0
    budget: float = 86400.0
    shard_set: str | None = None


@dataclass
class SweepRow:
    """Result of one variant.

    Args:
        key: settings that identify the measurement, see row_key.
        found: measured values; None if the variant failed.
        reason: cause of the failure.
        seconds: wall time of the variant.
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
    """Measure each variant that `results` does not hold yet; return the rows of all variants in order.

    Args:
        results: JSON file of the rows.
        on_row: called with each row and all rows so far.

    Raises:
        InputError: the document of a variant is not valid; raised before the first measurement.
    """
    documents = [variant_document(base, variant, settings) for variant in variants]
    known = {json.dumps(row.key, sort_keys=True): row for row in read_rows(results) if row.found}
    rows: list[SweepRow] = []
    deadline = time.monotonic() + settings.budget
    for variant, config in zip(variants, documents, strict=True):
        key = row_key(config, variant, settings)
        row = known.get(json.dumps(key, sort_keys=True))
        if row is None:
            row = _run_variant(SweepRow(variant.name, key), config, variant, settings, deadline - time.monotonic())
        rows.append(SweepRow(variant.name, key, row.found, row.reason, row.seconds))
        others = [old for old in known.values() if old.key not in [r.key for r in rows]]
        write_json(results, [asdict(r) for r in [*rows, *others]])
        on_row(rows[-1], rows)
    return rows


def read_rows(results: Path) -> list[SweepRow]:
    """Read the rows of an earlier sweep; empty if the file does not exist. Raises InputError for any other file."""
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
    """Return the settings that identify a measurement."""
    sections = {"input", "model", "train", "launch"}
    options = {
        f"{section}.{name}": value
        for section, values in config.model_dump(mode="json", include=sections).items()
        for name, value in values.items()
    }
    kept = {name: value for name, value in options.items() if not name.startswith("train.schedule")}
    images = "real" if variant.real_images else "synthetic"
    return {"images": images, "steps": settings.steps, "warmup": settings.warmup, "options": kept}


GRAPH = {"train.cuda_graph": True}
COMPILED = {**GRAPH, "train.compile": "default"}
AUTOTUNED = {**GRAPH, "train.compile": "max-autotune-no-cudagraphs"}
FOLDED = {"train.stem_compute": "space_to_depth"}
BF16, PURE, FP16, FP32 = ({"train.precision": name} for name in ("bf16", "bf16-pure", "fp16", "fp32"))

GPU_VARIANTS = (
    BenchVariant("bf16", BF16, 256),
    BenchVariant("bf16, graph", {**BF16, **GRAPH}, 256),
    BenchVariant("bf16, compile, graph", {**BF16, **COMPILED}, 256),
    BenchVariant("bf16, compile, graph, 400", {**BF16, **COMPILED}, 400),
    BenchVariant("bf16, compile, graph, 400, real images", {**BF16, **COMPILED}, 400, real_images=True),
    BenchVariant("bf16-pure, compile, graph, 400", {**PURE, **COMPILED}, 400),
    BenchVariant("bf16, compile, graph, 400, folded stem", {**BF16, **COMPILED, **FOLDED}, 400),
    BenchVariant("fp32", FP32, 256),
    BenchVariant("bf16-pure, graph, 400", {**PURE, **GRAPH}, 400),
    BenchVariant("bf16, autotune, graph, 400", {**BF16, **AUTOTUNED}, 400),
    BenchVariant("bf16, compile, graph, 400, padded stem", {**BF16, **COMPILED, "train.stem_compute": "padded4"}, 400),
    BenchVariant("bf16, compile", {**BF16, "train.compile": "default"}, 256),
    BenchVariant("bf16, reduce-overhead", {**BF16, "train.compile": "reduce-overhead"}, 256),
    BenchVariant("fp16, compile, graph, 400", {**FP16, **COMPILED}, 400),
    BenchVariant("bf16, compile, graph, 512", {**BF16, **COMPILED}, 512),
    BenchVariant("bf16, compile, graph, 128", {**BF16, **COMPILED}, 128),
    BenchVariant("bf16, NCHW", {**BF16, "train.channels_last": False}, 256),
    BenchVariant("fp32, compile, graph", {**FP32, **COMPILED}, 256),
    BenchVariant(
        "bf16, compile, graph, 400, torchvision",
        {**BF16, **COMPILED, "input.loader": "torchvision"},
        400,
        real_images=True,
    ),
)
"""ResNet-50 on one GPU, the most informative variants first, so that an interrupted sweep is still useful."""

CPU_VARIANTS = (
    BenchVariant("fp32", FP32, 8),
    BenchVariant("bf16", BF16, 8),
    BenchVariant("fp32, compile", {**FP32, "train.compile": "default"}, 8),
    BenchVariant("fp32, NCHW", {**FP32, "train.channels_last": False}, 8),
)
"""Smoke test of the sweep on a CPU."""

SWEEPS: Mapping[str, Sequence[BenchVariant]] = {"gpu": GPU_VARIANTS, "cpu": CPU_VARIANTS}


def named_sweep(name: str, *, real_images: bool) -> list[BenchVariant]:
    """Return the variants of a sweep; those with real images only if `real_images`. Raises InputError if unknown."""
    if name not in SWEEPS:
        hint = f"There are {', '.join(SWEEPS)}; make others with --vary a.b=x,y"
        raise InputError("unknown sweep", field="--sweep", got=name, hint=hint)
    return [variant for variant in SWEEPS[name] if real_images or not variant.real_images]


def variant_grid(settings: Sequence[str], *, real_images: bool) -> list[BenchVariant]:
    """Return every combination of `a.b=x,y` settings; `batch=` is images per rank. Default: the base document."""
    options = []
    for setting in settings:
        name, separator, values = setting.partition("=")
        if not separator or not values:
            problem = "not an option and its values, such as train.compile=off,default"
            raise InputError(problem, field="--vary", got=setting)
        options.append([(name, value) for value in values.split(",")])
    return [_variant(chosen, real_images) for chosen in product(*options)]


def write_synthetic_shard_set(directory: Path, *, images: int, classes: int) -> Path:
    """Write a shard set index with `images` training rows and no records; only the synthetic loader can use it."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"class-{number:04d}" for number in range(classes)]
    write_json(directory / "classes.json", names)
    splits = {
        "train": _write_split(directory / "train", images, classes, first_key=0),
        "validation": _write_split(directory / "validation", classes, classes, first_key=images),
    }
    ShardSetManifest(SCHEMA_VERSION, "imaginary", "imaginary", {}, classes_sha256(names), splits).write(directory)
    return directory


def _write_split(directory: Path, images: int, classes: int, *, first_key: int) -> SplitSummary:
    directory.mkdir(parents=True, exist_ok=True)
    labels = np.arange(images) % classes
    zeros = np.zeros(images, dtype=np.int64)
    index.write_index(
        directory / "index",
        {
            "key": np.arange(first_key, first_key + images),
            "offset": zeros,
            "size": zeros,
            "shard": zeros,
            "label": labels,
            "height": zeros + HEIGHT,
            "width": zeros + WIDTH,
            "format": zeros + index.JPEG,
            "flags": zeros,
        },
    )
    counts = tuple(np.bincount(labels, minlength=classes).tolist())
    return SplitSummary(images, 0, counts, "", (Shard("shard-00000-of-00001.tar", images, 0, ""),))


def _run_variant(
    row: SweepRow, config: RunConfig, variant: BenchVariant, settings: SweepSettings, left: float
) -> SweepRow:
    limit = min(settings.time_limit, left)
    if left < MIN_SECONDS_LEFT:
        row.reason = "not measured: the time of the sweep was over"
        return row
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="podscale-bench-") as scratch:
        scratch_path = Path(scratch)
        shard_set = settings.shard_set if variant.real_images else None
        job = scratch_path / "job.json"
        write_json(job, _benchmark_job(config, settings, shard_set, scratch_path))
        log = scratch_path / "log.txt"
        arguments, threads = [str(job), str(scratch_path / "result.json")], config.launch.threads or 0
        codes = run_workers(BENCHMARK_MODULE, arguments, config.launch.processes, limit, threads=threads, log=log)
        if (scratch_path / "result.json").exists():
            row.found = json.loads((scratch_path / "result.json").read_text())
        elif None in codes and not any(codes):
            row.reason = f"ran past its limit of {limit:.0f} s"
        else:
            row.reason = _failure_reason(scratch_path, log)
    row.seconds = round(time.monotonic() - started, 1)
    return row


def _benchmark_job(
    config: RunConfig, settings: SweepSettings, shard_set: str | None, directory: Path
) -> dict[str, Any]:
    """Build the job of the benchmark process: a document that lasts for all steps, and the shard set."""
    updates = settings.warmup + settings.steps + settings.parts
    batch = config.train.global_batch
    if shard_set is None:
        images = SYNTHETIC_EPOCHS * batch
        shard_set = str(write_synthetic_shard_set(directory / "imaginary", images=images, classes=1000))
    else:
        images = ShardSetManifest.parse((Path(shard_set) / MANIFEST).read_text(), shard_set).splits["train"].count
    values = config.model_dump(mode="json")
    values["run"] |= {"id": "bench", "workspace": str(directory)}
    values["train"] |= {"epochs": (updates + 1) * batch / images, "recipe": None, "recipe_origin": None, "phases": []}
    values["train"] = {
        name: value for name, value in values["train"].items() if name in type(config.train).model_fields
    }
    values["train"]["schedule"] |= {"learning_rate": 0.001, "warmup_epochs": 0.0}
    return {
        "config": values,
        "shard_set": shard_set,
        "warmup": settings.warmup,
        "steps": settings.steps,
        "parts": settings.parts,
        "timeout_seconds": settings.time_limit,
    }


def _failure_reason(directory: Path, log: Path) -> str:
    """Return the error of the first rank that reported one, or the last line of the log."""
    for path in sorted(directory.glob("result.[0-9]*")):
        return str(json.loads(path.read_text())["error"])
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"ended without a result: {lines[-1][:300] if lines else 'nothing was printed'}"


def _variant(chosen: Sequence[tuple[str, str]], real_images: bool) -> BenchVariant:
    batch = next((value for name, value in chosen if name == "batch"), None)
    if batch is not None and not batch.isdecimal():
        raise InputError("images per rank, a whole number", field="--vary batch", got=batch)
    changes: dict[str, Any] = {name: _parse_value(value) for name, value in chosen if name != "batch"}
    name = ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in chosen) or "as the document says"
    return BenchVariant(name, changes, None if batch is None else int(batch), real_images)


def _parse_value(text: str) -> Any:
    """Parse a value as YAML, as in a run document."""
    import yaml

    return yaml.safe_load(text)
