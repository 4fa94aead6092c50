"""Names of `import podscale`: frozen with their signatures, and light to import."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import podscale
from tools.api_reference import frozen_names

FROZEN = Path(__file__).with_name("names.txt")
"""Names of the API with their signatures: a change of this file is a change of the API."""


def test_the_names_are_frozen() -> None:
    assert frozen_names() == FROZEN.read_text(encoding="utf-8")
    functions = {line.partition("(")[0] for line in frozen_names().splitlines() if line.startswith("def ")}
    assert {name.removeprefix("def ") for name in functions} < set(podscale.__all__)


def test_every_name_loads_and_an_unknown_one_is_an_attribute_error() -> None:
    assert [name for name in podscale.__all__ if not hasattr(podscale, name)] == []
    assert set(podscale.__all__) <= set(dir(podscale))
    assert not hasattr(podscale, "no_such_name")


def test_no_name_is_that_of_a_package() -> None:
    """Importing `podscale.report` anywhere would replace a function of that name."""
    assert not {module.name for module in pkgutil.iter_modules(podscale.__path__)} & set(podscale.__all__)


def test_the_import_is_light() -> None:
    """Counted in modules, because seconds depend on the machine."""
    program = (
        "import sys, typing; before = set(sys.modules); import podscale\n"
        "print(len(set(sys.modules) - before)); podscale.load('digits')\n"
        "print(*(set(sys.modules) & {'torch', 'jax', 'kfp', 'kubernetes', 'typer'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    count, heavy = done.stdout.splitlines()
    assert int(count) == 2, "podscale and podscale.version"
    assert heavy == "", "a document needs no framework"
