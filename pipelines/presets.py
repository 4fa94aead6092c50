"""The documents that come with Podscale, by their names: run documents in runs/, studies in studies/."""

import difflib
from pathlib import Path

from podscale.errors import InputError

DIRECTORY = Path(__file__).parent / "runs"
STUDIES = Path(__file__).parent / "studies"
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
    return _resolve(argument, DIRECTORY, names(), "preset")


def studies() -> list[str]:
    """The study documents that come with Podscale, in alphabetical order."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def resolve_study(argument: str) -> Path:
    """The study document that a person means: a path, or the bare name of one that comes with Podscale.

    Raises InputError, with the nearest name, where there is neither.
    """
    return _resolve(argument, STUDIES, studies(), "study")


def _resolve(argument: str, folder: Path, known: list[str], kind: str) -> Path:
    if argument in known and not Path(argument).is_file():
        return folder / f"{argument}.yaml"
    path = Path(argument)
    if path.exists() or path.suffix in (".yaml", ".yml", ".json"):
        return path
    close = difflib.get_close_matches(argument, known, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"{_PLURALS[kind].capitalize()}: {', '.join(known)}"
    raise InputError(f"neither a file nor a {kind}", field=argument, hint=hint)


_PLURALS = {"preset": "presets", "study": "studies"}


def claim_line(name: str) -> str:
    """The first comment line of a preset: what it is."""
    first = (DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
