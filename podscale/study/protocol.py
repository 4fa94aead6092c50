"""Protocol of a study: proof that criteria, options and seeds were fixed before the run.

The digest covers everything in the document that decides what runs and how it is judged. Each launch under a new
protocol is logged with the document's commit, so that `git show COMMIT:FILE` gives the document as it was.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from podscale.study.document import StudyDocument
from podscale.study.sections import ProvenanceSection

_PROSE = {"title", "question", "reading", "x", "papers", "time_box_minutes", "cell_seconds", "provenance"}
"""Keys of the document that affect neither trials nor verdicts."""
_PLACEMENT = {"launch", "telemetry", "checkpoint", "run"}
"""Sections of a run document that do not change its numbers."""
_PLACEMENT_OPTIONS = {
    "input.workers",
    "input.prefetch",
    "input.decoded_cache_bytes",
    "input.decoded_cache_form",
    "input.record_cache_bytes",
}


@dataclass(frozen=True)
class ProtocolLaunch:
    """First launch of a study under a protocol.

    Args:
        date: UTC, ISO 8601.
        commit: Last commit of the document; None if the file differed from it.
        committed: Date of that commit.
    """

    digest: str
    date: str
    file: str = ""
    commit: str | None = None
    committed: str | None = None


def protocol_digest(study: StudyDocument) -> str:
    """Return the SHA-256 of the protocol; the same for another workspace, another place of the data, or other prose."""
    values = study.model_dump(mode="json", exclude=_PROSE, exclude_defaults=True)
    assert isinstance(study.run, Mapping)
    del values["run"]
    values["set"] = {**_relevant(study.run), **_relevant(study.set)}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _relevant(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted options without those of placement, and with the last component of the data's path only."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        option = f"{prefix}{name}"
        if option.partition(".")[0] in _PLACEMENT or option in _PLACEMENT_OPTIONS:
            continue
        if isinstance(value, Mapping):
            found |= _relevant(value, f"{option}.")
        else:
            found[option] = Path(str(value)).name if option == "data.source" else value
    return found


def record_launch(study: StudyDocument, directory: Path) -> None:
    """Log a launch in the study's directory, unless one under the same protocol and commit is the newest."""
    launches, source = read_launches(directory), study.provenance or ProvenanceSection()
    digest = protocol_digest(study)
    if launches and (launches[-1].digest, launches[-1].commit) == (digest, source.commit):
        return
    date = datetime.now(UTC).isoformat(timespec="seconds")
    _append(directory, [ProtocolLaunch(digest, date, source.file, source.commit, source.committed)])


def add_launches(launches: Sequence[ProtocolLaunch], directory: Path) -> None:
    """Log launches of other workspaces, unless the log has some: it then has these or later ones."""
    if launches and not read_launches(directory):
        _append(directory, launches)


def _append(directory: Path, launches: Sequence[ProtocolLaunch]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "launches.jsonl").open("a", encoding="utf-8") as log:
        log.writelines(f"{json.dumps(asdict(launch))}\n" for launch in launches)


def read_launches(directory: Path) -> list[ProtocolLaunch]:
    """Return the launches of a study under each protocol, the oldest first."""
    path = directory / "launches.jsonl"
    if not path.exists():
        return []
    return [ProtocolLaunch(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line]


def first_launch(launches: Sequence[ProtocolLaunch], digest: str) -> ProtocolLaunch | None:
    """Return the first launch under the protocol of this digest."""
    return next((launch for launch in launches if launch.digest == digest), None)


def describe_protocol(study: StudyDocument, launches: Sequence[ProtocolLaunch]) -> list[str]:
    """Return lines of text about the protocol: its digest, its commit, its first launch, and earlier protocols."""
    digest = protocol_digest(study)
    first = first_launch(launches, digest)
    if first is None:
        source = study.provenance or ProvenanceSection()
        where = f", {source.file} at commit {source.commit[:12]}" if source.commit else ""
        lines = [f"Protocol: sha256 {digest}{where}; not launched yet"]
    elif first.commit is None:
        lines = [f"Protocol: sha256 {digest}, first launched {first.date}; the document was not committed then"]
    else:
        lines = [
            f"Protocol: sha256 {digest}, {first.file} at commit {first.commit[:12]} of {first.committed}; "
            f"first launched {first.date}"
        ]
    before = launches if first is None else launches[: launches.index(first)]
    if earlier := {launch.digest: launch for launch in before if launch.digest != digest}:
        texts = (f"{old[:12]} of {launch.date}" for old, launch in earlier.items())
        lines.append(f"Launched before under other protocols: {', '.join(texts)}")
    return lines
