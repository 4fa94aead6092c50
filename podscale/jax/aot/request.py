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
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import podscale
from podscale.config import RunConfig
from podscale.config.batch_norm_groups import devices_per_rank
from podscale.config.identity import fingerprint
from podscale.errors import InputError, PodscaleError
from podscale.hardware import Topology
from podscale.util.files import write_atomically, write_json

COMPILER_MODULE = "podscale.jax.aot.compiler"
COMPILER_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_TRACEBACK_FILTERING": "off",
}
"""No accelerator of this machine is touched, no metadata server of Google's cloud is asked, and another process may use
libtpu too (it locks a file of the machine otherwise, because a TPU serves one process). A failure ends with its error:
otherwise jax says last that it has shortened the traceback."""
COMPILER_PACKAGES = ("jax", "jaxlib", "libtpu")
FRAMEWORK_FREE = ("models/*.py", "training/param_layout.py", "config/batch_norm_groups.py")
"""What a compiled step depends on below the engine; the rest of what it imports only reads the document."""


SCHEDULE_STEPS = 2**16
"""Updates whose schedule takes 1 MiB on a device: runs that differ by less share a result."""


@dataclass(frozen=True)
class CompileRequest:
    """A step to compile. steps: of the whole run, whose schedule lies on each device, 16 bytes an update."""

    config: RunConfig
    topology: Topology
    classes: int
    steps: int

    @property
    def ranks(self) -> int:
        """Who has images of its own: a device, or several that share images."""
        return self.topology.device_count // devices_per_rank(self.config)

    @property
    def batch(self) -> int:
        """Images of one rank."""
        return self.config.train.global_batch // self.ranks

    @cached_property
    def cache_inputs(self) -> dict[str, Any]:
        """All that the result depends on."""
        sections = self.config.model_dump(mode="json", include={"model", "train"})
        sections["train"] = {
            name: value
            for name, value in sections["train"].items()
            if name not in ("schedule", "phases", "epochs", "engine", "recipe", "recipe_origin", "target_top1")
        }
        return {
            "options": sections,
            "input": self.config.input.model_dump(mode="json", include={"image_size", "mean", "std"}),
            "topology": str(self.topology),
            "classes": self.classes,
            "schedule": -(-self.steps // SCHEDULE_STEPS),
            "versions": compiler_versions(),
            "sources": source_hash(),
        }

    @property
    def cache_key(self) -> str:
        """Names the result."""
        return fingerprint(self.cache_inputs)


@dataclass(frozen=True)
class CompileResult:
    """findings: see `compiling`; text: of the program; versions: of the packages that made it."""

    findings: dict[str, Any]
    text: str
    versions: dict[str, str]
    from_cache: bool = False


def compiler_versions() -> dict[str, str]:
    """Of what compiles. Raises InputError where it is not installed."""
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
    """A hash of the modules that the step is made of."""
    digest = hashlib.sha256()
    for path in _source_modules():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _source_modules() -> list[Path]:
    """The child and all of this engine that it imports, directly or not, and what is FRAMEWORK_FREE."""
    root = Path(podscale.__file__).parent
    found: set[Path] = set()
    waiting = [COMPILER_MODULE]
    while waiting:
        parts = waiting.pop().split(".")[1:]
        for path in (root.joinpath(*parts).with_suffix(".py"), root.joinpath(*parts, "__init__.py")):
            if path.is_file() and path not in found:
                found.add(path)
                waiting += [name for name in _imports(path) if name.startswith("podscale.jax.")]
    for pattern in FRAMEWORK_FREE:
        matched = set(root.glob(pattern))
        assert matched, f"{pattern} matches no module: results would be reused after a change to what it stood for"
        found |= matched
    return sorted(found)


def _imports(path: Path) -> Iterator[str]:
    """Modules that a module imports, with the packages they are in; some names may be of other things."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def default_cache() -> Path:
    """Where results are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podscale" / "tpu-compile"


def compile_aot(request: CompileRequest, cache: Path, timeout_seconds: float) -> CompileResult:
    """What the compiler says of a request, from `kept` where that holds it, else from a child that may take `limit` s.

    Raises InputError where the document or the topology is refused, PodscaleError where the compiler fails.
    """
    result, text = _cache_files(request, cache)
    found = cached_result(request, cache)
    if found is not None:
        return CompileResult(found, _unpacked(text), request.cache_inputs["versions"], from_cache=True)
    found = _compile_in_child(request, cache, timeout_seconds, text)
    write_json(result, found)
    return CompileResult(found, _unpacked(text), request.cache_inputs["versions"])


def cached_result(request: CompileRequest, cache: Path) -> dict[str, Any] | None:
    """What the compiler said of a request before; None where that is not kept."""
    result, text = _cache_files(request, cache)
    if not (result.exists() and text.exists()):
        return None
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _cache_files(request: CompileRequest, cache: Path) -> tuple[Path, Path]:
    """The result of a request, and the text of its program."""
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
                "updates": request.steps,
            },
        )
        said = folder / "said.txt"
        code = _run_child(folder, said, timeout_seconds)
        if not (folder / "result.json").exists():
            raise PodscaleError(f"compiling for {topology} {_failure_message(code, said, timeout_seconds)}")
        found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if "refused" in found:
            raise InputError(**found["refused"])
        write_atomically(text, (folder / "program.hlo.gz").read_bytes())
        return found


def _run_child(folder: Path, output_file: Path, timeout_seconds: float) -> int | None:
    """The exit code of the child; None where its time was over."""
    with output_file.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", COMPILER_MODULE, str(folder)],
            env={**os.environ, **COMPILER_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            return child.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            child.kill()
            child.wait()


def _failure_message(code: int | None, output: Path, timeout_seconds: float) -> str:
    """What became of a child that left no result."""
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1][:500] if lines else "nothing was printed"
    if code is None:
        return f"took longer than {timeout_seconds:.0f} s; give it more time with --time-limit"
    if code == -signal.SIGKILL:
        return (
            "was killed, most likely because this machine's memory was too small; close other programs, or compile "
            "for a smaller topology or network"
        )
    if code < 0:
        return f"crashed the compiler ({signal.Signals(-code).name}): {last}"
    return f"failed: {last}"


def _unpacked(text: Path) -> str:
    return gzip.decompress(text.read_bytes()).decode()
