"""The house keeps its shape: imports point downward, and frameworks stay in their rooms."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lower number = lower floor. A module may import from its own room or from floors below, never from beside or above.
FLOORS = {
    "podscale.version": 0,
    "podscale.errors": -2,
    "podscale.util.env": -1,
    "podscale.util.files": 0,
    "podscale.util.processes": 0,
    "podscale.util.host_info": 0,
    "podscale.hardware": 1,
    "podscale.data.rng": 0,
    "podscale.util.processes": 0,
    "podscale.config.recipes": 0,
    "podscale.util.progress_reports": 0,
    "podscale.distributed.store": 0,
    "podscale.util.formatting": 0,
    "podscale.util.processes": 1,
    "podscale.util.terminal": 1,
    "podscale.util.terminal": 2,
    "podscale.config": 1,
    "podscale.models": 2,
    "podscale.training.schedules": 2,
    "podscale.data.sampler": 2,
    "podscale.training.param_layout": 0,
    "podscale.training.param_layout": 0,
    "podscale.training.param_layout": 3,
    "podscale.runs": 3,
    "podscale.distributed.worker_exit": 3,
    "podscale.data.sharding": 3,
    "podscale.runs.checkpoint": 4,
    "podscale.telemetry": 4,
    "podscale.monitoring": 5,
    "podscale.data": 4,
    "podscale.evaluation": 5,
    "podscale.launch": 5,
    "podscale.plan": 5,
    "podscale.training": 6,
    "podscale.pytorch": 7,
    "podscale.jax": 7,
    "podscale.runs.stage_outcomes": 6,
    "podscale.runs.ensemble_members": 4,
    "podscale.stages.local": 8,
    "podscale.monitoring.watch": 8,
    "podscale.stages.on_cluster": 8,
    "podscale.bench": 8,
    "podscale.study": 9,
    "podscale.components": 10,
    "podscale.pipelines": 11,
    "podscale.cli.doctor": 11,
    "podscale.commands": 12,
    "podscale.cli": 13,
    "podscale.__main__": 14,
}
FRAMEWORKS = {"torch", "torchvision", "nvidia", "jax", "flax", "optax"}
FRAMEWORK_ROOMS = ("podscale.pytorch", "podscale.jax", "podscale.data.loaders")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "podscale" else ("podscale", *parts))
    return name.removesuffix(".__init__")


def modules() -> Iterator[tuple[str, Path]]:
    for top in ("podscale", "components", "pipelines"):
        for path in sorted((ROOT / top).rglob("*.py")):
            yield module_name(path), path


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str | None:
    found = [prefix for prefix in FLOORS if name == prefix or name.startswith(f"{prefix}.")]
    return max(found, key=len) if found else None


MODULES = [(name, path) for name, path in modules() if name != "podscale"]


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_imports_point_downward(name: str, path: Path) -> None:
    home = room(name)
    assert home, f"{name} stands in no room: give it a floor here, and say in CONTRIBUTING.md what it is for"
    for imported in imports_of(path):
        target = room(imported)
        if target is not None and target != home:
            assert FLOORS[target] < FLOORS[home], f"{name} imports {imported}, which is not below it"


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_frameworks_stay_in_their_rooms(name: str, path: Path) -> None:
    if name.startswith(FRAMEWORK_ROOMS):
        return
    found = {imported.partition(".")[0] for imported in imports_of(path)} & FRAMEWORKS
    assert not found, f"{name} imports {found}; only {FRAMEWORK_ROOMS} may"


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_engines_know_one_framework_each(name: str, path: Path) -> None:
    """A TPU image has no torch, and a GPU image no jax."""
    others = {"podscale.pytorch": {"jax", "flax", "optax"}, "podscale.jax": {"torch", "torchvision", "nvidia"}}
    foreign = others.get(room(name) or "", set())
    assert not {imported.partition(".")[0] for imported in imports_of(path)} & foreign


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_only_the_launcher_talks_to_an_api_server(name: str, path: Path) -> None:
    if name.startswith("podscale.kubernetes"):
        return
    assert not any(imported.partition(".")[0] == "kubernetes" for imported in imports_of(path))


LIGHT = ["podscale.cli", "podscale.config", "podscale.data.sharding.build_shard_set", "podscale.launch.supervisor"]


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_no_framework(module: str) -> None:
    program = f"import sys, {module}; print(*(set(sys.modules) & {{'torch', 'torchvision', 'kfp', 'sklearn', 'jax'}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_help_loads_no_validation_library() -> None:
    """`podscale --help` answers at once because even pydantic is imported later."""
    program = (
        "import sys; sys.argv = ['podscale', '--help']\nfrom podscale import cli\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "print('loaded:', *(set(sys.modules) & {'pydantic', 'torch', 'kfp', 'numpy', 'yaml'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["loaded:"]
