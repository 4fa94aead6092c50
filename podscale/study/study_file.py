"""Reader of a study document, with the run document that it names and the commit of both."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podscale.config import Defaults, option_names
from podscale.config.document import loads_as, merge_values, read_text
from podscale.config.fields import Section
from podscale.errors import InputError
from podscale.study.document import ProvenanceSection, StudyDocument

_GIT_SECONDS = 30


def read_study(
    path: Path, changes: Mapping[str, Any], find_run: Any, defaults: Defaults | None = None
) -> StudyDocument:
    """Read the study at `path` and embed the run document that it names.

    Args:
        changes: options applied to every trial.
        find_run: maps the name of the run (preset or path) to its file.
        defaults: defaults of the run document.

    Raises:
        InputError: the file is not readable, a key is unknown or a value is wrong.
    """
    study = loads_as(StudyDocument, read_text(path), str(path))
    run, files = study.run, [path]
    if isinstance(run, str):
        neighbour = path.parent / run
        file = find_run(str(neighbour) if neighbour.is_file() else run)
        files.append(file)
        # Without built-in defaults, which depend on the study's settings.
        run = _read_mapping(read_text(file), str(file))
    if defaults is not None:
        run = merge_values(_read_mapping(defaults.text, defaults.name), run)
    changed = {"run": run, "set": {**study.set, **changes}, "provenance": document_provenance(*files)}
    study = study.model_copy(update=changed)
    known = set(option_names())
    if unknown := [name for name in study.grid if name not in known]:
        hint = "docs/reference/options.md lists them."
        raise InputError("unknown option", field="grid", got=unknown[0], hint=hint, location=str(path))
    return study


def _read_mapping(text: str, name: str) -> dict[str, Any]:
    return dict(loads_as(_AnyMapping, text, name).model_extra or {})


class _AnyMapping(Section, extra="allow"):
    """Any mapping; its content is checked later, together with the study's settings."""


def document_provenance(path: Path, *others: Path) -> ProvenanceSection:
    """Return the last commit of a document and of the files that it refers to; none if a file differs from it."""
    unknown = ProvenanceSection(file=path.name)
    folder, names = path.resolve().parent, [str(file.resolve()) for file in (path, *others)]
    try:
        changed = _git(folder, "status", "--porcelain", "--", *names)
        last = _git(folder, "log", "-1", "--format=%H %cI", "--", *names).split()
        inside = _git(folder, "ls-files", "--full-name", "--", names[0]).strip()
    except (OSError, subprocess.SubprocessError):
        return unknown
    if changed.strip() or len(last) != 2 or not inside:
        return unknown
    return ProvenanceSection(file=inside, commit=last[0], committed=last[1])


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
    )
    return done.stdout
