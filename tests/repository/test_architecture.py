"""Imports between the packages of the library go downwards, without cycles, and frameworks stay in their packages."""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

from podscale.util.plugins import GROUPS

ROOT = Path(__file__).resolve().parents[2]
HOMES = ("podscale", "components", "pipelines")

PACKAGES = {
    "util": "",
    "config": "util",
    "hardware": "util",
    "data": "util config",
    "runs": "util config data",
    "telemetry": "util config data runs",
    "distributed": "util config runs telemetry",
    "models": "util config",
    "training": "util config hardware data runs telemetry distributed models",
    "pytorch": "util config hardware data runs distributed models training",
    "jax": "util config hardware data runs distributed models training",
    "evaluation": "util config data runs telemetry",
    "report": "util config data runs training evaluation",
    "prediction": "util config data runs pytorch evaluation report",
    "export": "util config data runs telemetry pytorch report prediction",
    "serving": "util data telemetry prediction",
    "launch": "util config runs telemetry distributed",
    "kubernetes": "util config hardware data runs",
    "stages": "util config data runs telemetry training evaluation report export launch kubernetes",
    "monitoring": "util config runs telemetry kubernetes",
    "bench": "util config hardware data report",
    "study": "util config runs training evaluation report stages",
    "components": "util config data runs evaluation stages study",
    "pipelines": "util config runs kubernetes stages study components",
    "api": "util config data runs telemetry evaluation prediction launch kubernetes stages monitoring pipelines",
    "cli": (
        "util config hardware data runs telemetry models training pytorch jax evaluation report prediction export "
        "serving kubernetes stages monitoring bench study pipelines api"
    ),
}
"""Packages, lowest first, and what the modules of each may import besides their own package."""
ROOT_MODULES = {"podscale": "api", "podscale.errors": "util", "podscale.version": "util", "podscale.__main__": "cli"}
"""Modules outside of the packages, and the package that each counts as."""

FRAMEWORKS = {"torch", "torchvision", "nvidia", "jax", "flax", "optax"}
FRAMEWORK_PACKAGES = tuple(f"podscale.{package}" for package in ("pytorch", "jax", "data.loaders"))
HEAVY = {"torch", "torchvision", "jax", "flax", "optax", "kfp", "sklearn", "kubernetes"}
LIGHT = ("api", "cli", "config", "stages.local", "launch", "data.sharding", "bench", "study", "jax.worker")
"""Modules, and packages with all their modules, that load nothing of HEAVY."""
MARKERS = (
    *("util", "distributed", "launch", "stages", "telemetry", "training", "pytorch", "jax", "kubernetes"),
    *("evaluation", "report.sections"),
)
"""Packages whose `__init__` a light process passes on the way to a module: it imports nothing of HEAVY either."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "podscale" else ("podscale", *parts))
    return name.removesuffix(".__init__")


MODULES = {module_name(path): path for top in HOMES for path in sorted((ROOT / top).rglob("*.py"))}


def imports_in(tree: ast.AST) -> Iterator[str]:
    """Yield what a module imports, anywhere in it; types alone count too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache  # parsed by the tests, because each process of pytest-xdist imports this file
def imports_of(name: str) -> frozenset[str]:
    """Return what a module imports, by its name."""
    return frozenset(imports_in(ast.parse(MODULES[name].read_text(encoding="utf-8"))))


def module_of(imported: str) -> str | None:
    """Return the module that an import needs: itself, or the one that it takes a name from."""
    if imported in MODULES:
        return imported
    parent = imported.rpartition(".")[0]
    return parent if parent in MODULES else None


def modules_of(name: str) -> set[str]:
    """Return the modules that a module imports, without itself."""
    return {found for imported in imports_of(name) if (found := module_of(imported)) and found != name}


def package_of(module: str) -> str:
    return ROOT_MODULES.get(module) or module.split(".")[1]


def cycle_in(graph: Mapping[str, Iterable[str | None]]) -> list[str]:
    """Return one cycle of a graph; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycle_in({name: modules_of(name) for name in MODULES}) == []


def test_a_circle_is_found() -> None:
    assert cycle_in({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]})
    tree = ast.parse("if TYPE_CHECKING:\n    from podscale.errors import InputError\n")
    assert "podscale.errors.InputError" in imports_in(tree)


def test_every_module_is_in_a_package_of_the_table() -> None:
    """Add a new one to the table and to docs/explanation/architecture.md."""
    assert [name for name in MODULES if package_of(name) not in PACKAGES] == []


def test_imports_are_those_of_the_table() -> None:
    """Each entry is a module and what its package may not import."""
    wrong = [
        (name, imported)
        for name in MODULES
        if name not in ROOT_MODULES
        for imported in sorted(modules_of(name))
        if package_of(imported) not in (package_of(name), *PACKAGES[package_of(name)].split())
    ]
    assert wrong == []


def test_the_table_points_downwards() -> None:
    order = list(PACKAGES)
    for package, below in PACKAGES.items():
        assert all(order.index(other) < order.index(package) for other in below.split()), package


def test_the_table_allows_nothing_that_no_module_needs() -> None:
    used: defaultdict[str, set[str]] = defaultdict(set)
    for name in MODULES:
        used[package_of(name)].update(map(package_of, modules_of(name)))
    spare = {package: sorted(set(below.split()) - used[package]) for package, below in PACKAGES.items()}
    assert {package: names for package, names in spare.items() if names} == {}


def test_frameworks_stay_in_their_packages() -> None:
    """A TPU image has no torch, and a GPU image no jax."""
    other = {"pytorch": {"jax", "flax", "optax"}, "jax": {"torch", "torchvision", "nvidia"}}
    for name in MODULES:
        found = {imported.partition(".")[0] for imported in imports_of(name)}
        if not name.startswith(FRAMEWORK_PACKAGES):
            assert not found & FRAMEWORKS, f"{name}: only {FRAMEWORK_PACKAGES} may import a framework"
        assert not found & other.get(package_of(name), set()), f"{name}: the other engine's framework"
        assert "kubernetes" not in found or package_of(name) == "kubernetes", (
            f"{name}: only one package talks to an API server"
        )


def loaded_by(modules: Iterable[str]) -> dict[str, list[str]]:
    """Return what of HEAVY each module loads first, in one process that imports them in turn."""
    program = (
        "import importlib, json, sys\n"
        "before, found = set(), {}\n"
        f"for name in {list(modules)!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = set(sys.modules) & {HEAVY!r}\n"
        "    if heavy - before: found[name] = sorted(heavy - before)\n"
        "    before |= heavy\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_light_modules_and_packages_on_the_way_load_no_framework() -> None:
    """In one process: what a module loads is named beside it."""
    inside = {light: [name for name in MODULES if f"{name}.".startswith(f"podscale.{light}.")] for light in LIGHT}
    assert all(inside.values())
    assert loaded_by([*chain(*inside.values()), *(f"podscale.{name}" for name in MARKERS)]) == {}


def test_the_process_of_a_stage_begins_without_numpy() -> None:
    """Five processes of a run load this, and those whose stage is finished need no more."""
    program = "import sys; from podscale.components import steps; print(*(set(sys.modules) & {'numpy', 'kfp', 'rich'}))"
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


AT_THE_TOP = re.compile(r"""^(?:import|from|(?:\w+ = )?pytest\.importorskip\(") ?(?:timm|torchvision)\b""", re.M)


def test_tests_import_timm_and_torchvision_when_they_run() -> None:
    """Each process of pytest-xdist imports every test file, and these two take seconds (with torch._dynamo)."""
    assert AT_THE_TOP.search('x = 1\npytest.importorskip("timm", reason="no")\n')
    assert AT_THE_TOP.search("from torchvision.io import read_image\n")
    files = (path for path in (ROOT / "tests").rglob("*.py") if path.parts[-2] != "gpu")
    assert [path.name for path in files if AT_THE_TOP.search(path.read_text(encoding="utf-8"))] == []


DOTTED = re.compile(r"(?<![\w./-])podscale(?:\.[A-Za-z_]\w*)+(?![\w/-])")
FROM = re.compile(r"from (podscale(?:\.\w+)*) import (\w+(?:, \w+)*)")
NO_NAMES = {"podscale.dev", "podscale.yaml", "podscale.conflist", "podscale.no_such_module"}
"""Labels and files that are written like modules, and a module that a test wants to be missing."""
ENGINES = ("pytorch", "jax")
PLACES = (*HOMES, "tests", "tools", "benchmarks")
TEXTS = ("*.md", "Makefile", "docs/**/*.md", "images/*", *(f"{top}/**/*.yaml" for top in (*HOMES[1:], "manifests")))


def strings_of(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module; a name with an engine in it once for each engine. Loggers are named freely."""
    loggers = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("getLogger", "at_level"))
        for argument in node.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loggers:
            yield node.value
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            for engine in ENGINES:
                parts = [part.value if isinstance(part, ast.Constant) else engine for part in node.values]
                if str(parts[0]).startswith("podscale.") and len(parts) == 3:
                    yield "".join(map(str, parts))


def names_in(text: str) -> Iterator[str]:
    yield from DOTTED.findall(text)
    yield from (f"{module}.{name}" for module, names in FROM.findall(text) for name in names.split(", "))


def named_modules() -> dict[str, set[str]]:
    """Return every dotted name of the library that stands in a string or a text, and the files that have it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (path for place in PLACES for path in (ROOT / place).rglob("*.py")):
        for text in strings_of(ast.parse(path.read_text(encoding="utf-8"))):
            for name in names_in(text):
                found[name].add(str(path.relative_to(ROOT)))
    for path in {path for pattern in TEXTS for path in ROOT.glob(pattern) if path.is_file()}:
        for name in names_in(path.read_text(encoding="utf-8")):
            found[name].add(str(path.relative_to(ROOT)))
    return {name: files for name, files in found.items() if not any(f"{name}.".startswith(f"{no}.") for no in NO_NAMES)}


RESOLVE = """
import importlib.util, json, sys
def missing(name):
    if name.endswith(".__main__"):
        return importlib.util.find_spec(name) is None  # importing it would run it
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("podscale"):
                return False  # a package that is not installed here
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return True
            found = getattr(found, part)
        return False
print(json.dumps([name for name in json.load(sys.stdin) if missing(name)]))
"""


@pytest.mark.slow
def test_names_of_modules_in_strings_and_texts_exist() -> None:
    """Processes are started by module name, and tests replace members by name: a rename does not see those."""
    names = named_modules()
    assert {"podscale.cli", "podscale.config"} <= names.keys(), "the search finds what is there"
    starts = [name for name, files in names.items() if any(file.startswith("podscale/launch") for file in files)]
    assert len(starts) >= 3, "the launcher starts at least three modules by name"
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE], input=json.dumps(sorted(names)), capture_output=True, text=True, check=True
    )
    lost = set(json.loads(done.stdout.splitlines()[-1])) - set(GROUPS.values())  # entry points, no modules
    assert {name: sorted(names[name])[:3] for name in lost} == {}
