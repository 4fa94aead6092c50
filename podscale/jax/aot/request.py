"""Request for one ahead-of-time compilation: its parameters, its cache key, and the child process that runs it."""

import ast
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from podscale import errors
from podscale.config import RunConfig
from podscale.config.identity import fingerprint
from podscale.config.ranks import devices_per_rank
from podscale.errors import InputError, PodscaleError
from podscale.hardware import Topology
from podscale.jax.xla_flags import xla_environment
from podscale.util import env
from podscale.util.files import write_atomically, write_json
from podscale.util.processes import signal_name

COMPILER_MODULE = "podscale.jax.aot.compiler"
COMPILER_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_TRACEBACK_FILTERING": "off",
}
"""Keeps jax off this machine's accelerators and libtpu off Google's metadata server, and lets other processes use
libtpu (which locks a file otherwise, because a TPU serves one process). The last line of a traceback is the error."""
COMPILER_PACKAGES = ("jax", "jaxlib", "libtpu")
FRAMEWORK_FREE = (
    "models/*.py",
    "training/param_layout.py",
    "training/muon.py",
    "training/nlcg_rates.py",
    "training/shampoo.py",
    "config/ranks.py",
    "config/batch_phases.py",
    "data/step_positions.py",
    "training/schedules.py",
)
"""Modules below the engine that a compiled step depends on; its other imports only read the document."""
PROGRAM_INPUT_OPTIONS = {"image_size", "per_image_standardization", "mean", "std"}
"""Options of the input section that a compiled step depends on."""
PROGRAM_PHASE_OPTIONS = {"global_batch", "accumulation", "batch_norm_momentum"}
"""Options of a phase that a compiled step, or its refusal, depends on; the rest of the schedule is data."""
SCHEDULE_STEPS = 2**16
"""Steps whose schedule takes 1 MiB on a device: runs that differ by less share a result."""


@dataclass(frozen=True)
class CompileRequest:
    """A step to compile; the schedule takes 16 bytes of each device for every one of the run's `steps`."""

    config: RunConfig
    topology: Topology
    classes: int
    steps: int

    @property
    def ranks(self) -> int:
        """Ranks of the sample order: a device, or several that share images."""
        return self.topology.device_count // devices_per_rank(self.config)

    @property
    def batch(self) -> int:
        """Images of one rank."""
        return self.config.train.global_batch // self.ranks

    @cached_property
    def cache_inputs(self) -> dict[str, Any]:
        """Everything that the result depends on."""
        sections = self.config.model_dump(mode="json", include={"model", "train"})
        sections["train"] = {
            name: value
            for name, value in sections["train"].items()
            if name not in ("schedule", "phases", "epochs", "engine", "recipe", "recipe_origin", "target_top1")
        }
        phases = [
            phase.model_dump(mode="json", include=PROGRAM_PHASE_OPTIONS, exclude_none=True)
            for phase in self.config.train.phases
        ]
        return {
            "options": sections,
            "phases": [phase for phase in phases if phase],
            "input": self.config.input.model_dump(mode="json", include=PROGRAM_INPUT_OPTIONS),
            "topology": str(self.topology),
            "classes": self.classes,
            "schedule": -(-self.steps // SCHEDULE_STEPS),
            "versions": compiler_versions(),
            "flags": self.xla_environment,
            "sources": source_hash(),
        }

    @property
    def xla_environment(self) -> dict[str, str]:
        """Variables with the compiler's flags for the chips."""
        return xla_environment("tpu", os.environ, self.topology.chip.name)

    @property
    def cache_key(self) -> str:
        return fingerprint(self.cache_inputs)


@dataclass(frozen=True)
class CompileResult:
    """Result of a compilation; `analysis` is the compiler's report of the step (see `compiler.compile_step`)."""

    analysis: dict[str, Any]
    text: str
    versions: dict[str, str]
    from_cache: bool = False


def compiler_versions() -> dict[str, str]:
    """Return the versions of the compiler's packages. Raises InputError if one is not installed."""
    try:
        return {name: version(name) for name in COMPILER_PACKAGES}
    except PackageNotFoundError as error:
        raise InputError(
            f"compiling for a TPU needs {error.name}, which is not installed here",
            hint="Install podscale[tpu] (the versions of requirements/tpu.txt), into an environment of its own if need "
            "be: libtpu works without a TPU.",
        ) from error


@cache
def source_hash() -> str:
    digest = hashlib.sha256()
    for path in _source_modules():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _source_modules() -> list[Path]:
    """Return the child's module, all modules of this engine that it imports, directly or not, and FRAMEWORK_FREE."""
    root = Path(errors.__file__).parent
    modules: set[Path] = set()
    names = [COMPILER_MODULE]
    while names:
        parts = names.pop().split(".")[1:]
        for path in (root.joinpath(*parts).with_suffix(".py"), root.joinpath(*parts, "__init__.py")):
            if path.is_file() and path not in modules:
                modules.add(path)
                names += [name for name in _imports(path) if name.startswith("podscale.jax.")]
    for pattern in FRAMEWORK_FREE:
        matches = set(root.glob(pattern))
        assert matches, f"{pattern} matches no module: cached results would survive changes of these modules"
        modules |= matches
    return sorted(modules)


def _imports(path: Path) -> Iterator[str]:
    """Yield the modules that a module imports and their packages; some names may not be modules."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def default_cache() -> Path:
    return env.cache_directory("tpu-compile")


def compile_aot(request: CompileRequest, cache: Path, timeout_seconds: float) -> CompileResult:
    """Compile a step in a child process, or return its result from the folder `cache`.

    Raises InputError if the document or the topology is not valid, and PodscaleError if the compiler fails.
    """
    result, text = _cache_files(request, cache)
    cached = cached_result(request, cache)
    analysis = cached
    if analysis is None:
        analysis = _compile_in_child(request, cache, timeout_seconds, text)
        write_json(result, analysis)
    program = gzip.decompress(text.read_bytes()).decode()
    return CompileResult(analysis, program, request.cache_inputs["versions"], from_cache=cached is not None)


def cached_result(request: CompileRequest, cache: Path) -> dict[str, Any] | None:
    """Return the cached analysis of a request; None if there is none."""
    result, text = _cache_files(request, cache)
    if not (result.exists() and text.exists()):
        return None
    analysis: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return analysis


def _cache_files(request: CompileRequest, cache: Path) -> tuple[Path, Path]:
    """Return the files of a request: its analysis, and the text of its program."""
    return cache / f"{request.cache_key}.json", cache / f"{request.cache_key}.hlo.gz"


def _compile_in_child(request: CompileRequest, cache: Path, timeout_seconds: float, text: Path) -> dict[str, Any]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot hold results: {error.strerror}", field="--cache", got=str(cache), hint="Name another folder."
        ) from error
    with tempfile.TemporaryDirectory(prefix="podscale-tpu-compile-") as scratch:
        folder = Path(scratch)
        topology = request.topology
        write_json(
            folder / "job.json",
            {
                "document": request.config.model_dump(mode="json"),
                "topology": topology.compiler_name,
                "slices": topology.slices,
                "classes": request.classes,
                "steps": request.steps,
            },
        )
        output = folder / "output.txt"
        code = _run_child(folder, output, timeout_seconds, request.xla_environment)
        if not (folder / "result.json").exists():
            raise _compiler_error(str(topology), code, output, timeout_seconds)
        analysis: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if "refused" in analysis:
            raise InputError(**analysis["refused"])
        write_atomically(text, (folder / "program.hlo.gz").read_bytes())
        return analysis


def _run_child(folder: Path, output_file: Path, timeout_seconds: float, flags: dict[str, str]) -> int | None:
    """Return the exit code of the child, run with variables of flags; None if it timed out."""
    with output_file.open("wb") as output, suppress(subprocess.TimeoutExpired):
        return subprocess.run(
            [sys.executable, "-m", COMPILER_MODULE, str(folder)],
            env={**os.environ, **flags, **COMPILER_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=timeout_seconds,
        ).returncode
    return None


def _compiler_error(topology: str, code: int | None, output: Path, timeout_seconds: float) -> PodscaleError:
    """Return the error of a child that wrote no result; its `got` is the signal that killed the child."""
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1][:500] if lines else "nothing was printed"
    if code is None:
        hint = "Give it more time with --time-limit"
        return PodscaleError(f"compiling took longer than {timeout_seconds:.0f} s", field=topology, hint=hint)
    if code >= 0:
        return PodscaleError(f"compiling failed: {last}", field=topology)
    name = signal_name(-code)
    if code == -signal.SIGKILL:
        problem = "the compiler was killed, most likely because this machine's memory was too small"
        hint = "Close other programs, or compile for a smaller topology or network."
        return PodscaleError(problem, field=topology, got=name, hint=hint)
    return PodscaleError(f"the compiler crashed: {last}", field=topology, got=name)
