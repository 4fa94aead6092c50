"""Programs of the cluster, built from pinned Go modules (tools/cluster/programs.yaml) and kept between clusters."""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.cluster.lab import places
from tests.cluster.lab.commands import attempt
from tests.cluster.lab.errors import LabError, Unavailable

TOOLS = places.ROOT / "tools" / "cluster"
UNREACHABLE = ("dial tcp", "no such host", "403 Forbidden", "connection refused", "i/o timeout", "TLS handshake")
UNREACHABLE += ("module lookup disabled", "requires go >=", "toolchain not available")  # no network, or an old Go


@dataclass(frozen=True, kw_only=True)
class Source:
    """Entry of programs.yaml: a pinned module, or a local folder that pins several, and the programs built from it."""

    name: str
    tier: str
    version: str
    programs: dict[str, str]  # name -> package
    module: str = ""
    sum: str = ""
    directory: str = ""
    stamp: tuple[str, ...] = ()  # packages whose gitVersion is the Kubernetes version that clients see
    needs: tuple[str, ...] = ()  # other entries that it requires

    def pin(self) -> str:
        """Key of the built programs, which changes if and only if the sources or the build change."""
        files = [self.folder / name for name in ("go.mod", "go.sum", "main.go")] if self.directory else []
        content = "".join(file.read_text() for file in files if file.exists())
        text = json.dumps([self.version, self.sum, self.programs, self.stamp, content])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        return TOOLS / self.directory

    def built(self) -> bool:
        marks = [places.bin_dir() / f"{name}.pin" for name in self.programs]
        return all(mark.exists() and mark.read_text() == self.pin() for mark in marks)


def sources() -> list[Source]:
    """Return all sources."""
    entries = yaml.safe_load((TOOLS / "programs.yaml").read_text())
    return [Source(**entry | {name: tuple(entry.get(name, ())) for name in ("stamp", "needs")}) for entry in entries]


def chosen(tier: str, names: Iterable[str] = ()) -> list[Source]:
    """Return the sources of the core tier, with tier "full" all, else the named ones with their requirements."""
    entries = {entry.name: entry for entry in sources()}
    if unknown := set(names) - set(entries):
        raise LabError(f"{', '.join(sorted(unknown))}: unknown program. Choose from {', '.join(entries)}.")
    required = {*names, *(need for name in names for need in entries[name].needs)}
    return [entry for entry in entries.values() if tier == "full" or entry.tier == "core" or entry.name in required]


def source(name: str) -> Source:
    return next(entry for entry in sources() if entry.name == name)


def source_of(program: str) -> Source:
    return next(entry for entry in sources() if program in entry.programs)


def build(entries: Iterable[Source], say: Callable[[str], None]) -> None:
    """Build the programs that are missing or have other pins. Raises Unavailable without Go or the modules."""
    for entry in entries:
        if not entry.built():
            started = time.monotonic()
            say(f"building {entry.name} {entry.version} ({', '.join(entry.programs)})")
            _build(entry)
            say(f"built {entry.name} in {time.monotonic() - started:.0f} s")


def module_directory(entry: Source) -> Path:
    """Return the module's files, including charts and manifests. Raises LabError if they differ from the pin."""
    if shutil.which("go") is None:
        raise Unavailable("Go is not installed: the cluster's programs are built from Go modules")
    done = attempt("go", "mod", "download", "-json", f"{entry.module}@{entry.version}", cwd=TOOLS)
    module = json.loads(done.stdout or "{}")
    if done.returncode:
        raise _failure(entry, module.get("Error", "") + done.stderr)
    if module["Sum"] != entry.sum:
        raise LabError(f"{entry.module} {entry.version} has the checksum {module['Sum']}, but {entry.sum} is pinned")
    return Path(module["Dir"])


def module_files(name: str) -> Path:
    """Return the files of the module from which a source with its own go.mod is built, at the version in go.mod."""
    entry = source(name)
    if entry.module:
        return module_directory(entry)
    package = next(iter(entry.programs.values()))
    done = attempt("go", "list", "-f", "{{.Module.Dir}}", package, cwd=entry.folder, GOFLAGS="")
    if done.returncode:
        raise _failure(entry, done.stderr)
    return Path(done.stdout.strip())


def required_module(name: str, module: str) -> Path:
    """Return the files of a module that the module of a source requires, at the version in its go.mod."""
    entry = source(name)
    done = attempt("go", "list", "-m", "-f", "{{.Dir}}", module, cwd=module_directory(entry), GOFLAGS="")
    if done.returncode or not done.stdout.strip():
        raise _failure(entry, done.stderr)
    return Path(done.stdout.strip())


def go_caches() -> list[Path]:
    """Return Go's build and module caches, which all builds on this machine share."""
    if shutil.which("go") is None:
        return []
    directories = attempt("go", "env", "GOCACHE", "GOMODCACHE").stdout.split()
    return [path for path in map(Path, directories) if path.is_dir()]


def _build(entry: Source) -> None:
    if shutil.which("go") is None:
        raise Unavailable("Go is not installed: the cluster's programs are built from Go modules")
    directory = entry.folder if entry.directory else module_directory(entry)
    places.bin_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=places.bin_dir()) as scratch:
        # Several packages are written to a folder, each under its package's name; a single one to the named file.
        single = len(entry.programs) == 1
        output = f"{scratch}/{next(iter(entry.programs))}" if single else f"{scratch}/"
        command = ["go", "build", "-trimpath", "-ldflags", _ldflags(entry), "-o", output, *entry.programs.values()]
        done = attempt("nice", *command, cwd=directory, CGO_ENABLED="0", GOFLAGS="")
        if done.returncode:
            raise _failure(entry, done.stderr)
        for name, package in entry.programs.items():
            binary = Path(scratch) / (name if single else Path(package).name)
            binary.replace(places.bin_dir() / name)
            (places.bin_dir() / f"{name}.pin").write_text(entry.pin())


def _ldflags(entry: Source) -> str:
    major, minor = entry.version.removeprefix("v").split(".")[:2] if entry.stamp else ("", "")
    values = {"gitVersion": entry.version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamps = [f"-X {package}.{key}={value}" for package in entry.stamp for key, value in values.items()]
    return " ".join(["-s", "-w", *stamps])


def _failure(entry: Source, output: str) -> LabError:
    kind = Unavailable if any(sign in output for sign in UNREACHABLE) else LabError
    return kind(f"{entry.name} {entry.version} could not be built:\n{output[-2000:]}")
