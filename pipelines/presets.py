"""The run documents that come with Podscale: every .yaml in runs/, by its name."""

import difflib
from pathlib import Path

from podscale.errors import InputError

DIRECTORY = Path(__file__).parent / "runs"
DEFAULT = "digits"


def names() -> list[str]:
    """The presets, in alphabetical order."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def resolve(argument: str | None) -> Path:
    """The run document that a person means: a path, a preset's bare name, or the default preset where None.

    Raises InputError, with the nearest preset, where there is neither.
    """
    if argument is None:
        return DIRECTORY / f"{DEFAULT}.yaml"
    if argument in names() and not Path(argument).is_file():
        return DIRECTORY / f"{argument}.yaml"
    path = Path(argument)
    if path.exists() or path.suffix in (".yaml", ".yml", ".json"):
        return path
    close = difflib.get_close_matches(argument, names(), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise InputError(f"{argument}: neither a file nor a preset{hint} (presets: {', '.join(names())})")


def claim_line(name: str) -> str:
    """The first comment line of a preset: what it is."""
    first = (DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
