"""Documents shipped with Podscale, by name: presets in this folder, and studies in `../studies/`."""

import difflib
from pathlib import Path

from podscale.errors import InputError

PRESET_DIRECTORY = Path(__file__).parent
STUDY_DIRECTORY = Path(__file__).parents[1] / "studies"
DEFAULT_PRESET = "digits"
CHART_WORKSPACE, CHART_CLAIM = "/workspace", "podscale-workspace"
"""Path and PersistentVolumeClaim of the workspace of the chart, installed under the name `podscale`."""

CLUSTER_DEFAULTS = "cluster"
"""Name of the chart's defaults in the document's namespace."""


def preset_names() -> list[str]:
    """Return the names of the presets, in alphabetical order."""
    return sorted(path.stem for path in PRESET_DIRECTORY.glob("*.yaml"))


def published_presets() -> list[str]:
    """Return the names of the presets of published runs, in alphabetical order: their claim has a source."""
    from podscale.config import load

    return [name for name in preset_names() if load(resolve_preset(name)).claim.source is not None]


def resolve_preset(argument: str | None) -> Path:
    """Return the path of a run document from a path or a preset's bare name. None is the default preset.

    Raises InputError with the nearest preset's name if there is neither.
    """
    if argument is None:
        return PRESET_DIRECTORY / f"{DEFAULT_PRESET}.yaml"
    return _resolve(argument, PRESET_DIRECTORY, preset_names(), "preset")


def study_names() -> list[str]:
    """Return the names of the study documents shipped with Podscale, in alphabetical order."""
    return sorted(path.stem for path in STUDY_DIRECTORY.glob("*.yaml"))


def resolve_study(argument: str) -> Path:
    """Return the path of a study document from a path or the bare name of one shipped with Podscale.

    Raises InputError with the nearest name if there is neither.
    """
    return _resolve(argument, STUDY_DIRECTORY, study_names(), "study")


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


def preset_summary(name: str) -> str:
    """Return the description of a preset: its first comment line."""
    first = (PRESET_DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
