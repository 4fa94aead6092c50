"""Progress of an unfinished study as one file, with which it continues in another workspace or on another machine.

`<name>.progress.jsonl` lies beside the results that `podscale study --out` writes. It has a line for each launch and
each finished trial. It is removed with the last trial, when the results have everything.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from podscale.errors import InputError
from podscale.study.grid import TrialGrid
from podscale.study.protocol import ProtocolLaunch, add_launches, read_launches
from podscale.study.records import RecordStore, TrialRecord, parse_record
from podscale.util.files import write_atomically


def progress_path(folder: Path, study: str) -> Path:
    return folder / f"{study}.progress.jsonl"


def write_progress(grid: TrialGrid, records: RecordStore, folder: Path) -> None:
    """Write the progress of a study into the folder of its results; remove the file if no trial is left."""
    name, path = grid.study.name, progress_path(folder, grid.study.name)
    if not grid.due_trials(records.get) and not grid.pending_trials(records.get):
        path.unlink(missing_ok=True)
        return
    lines = [{"launch": asdict(launch)} for launch in read_launches(records.study_directory(name))]
    found = (records.get(key) for key in grid.known_trials(records.get))
    lines += [{"record": asdict(record)} for record in found if record is not None]
    write_atomically(path, "".join(f"{json.dumps(line)}\n" for line in lines))


def read_progress(grid: TrialGrid, records: RecordStore, folder: Path) -> int:
    """Add launches and trials that the workspace lacks, and return the number of these trials.

    Trials of another grid or protocol do no harm: their keys are never asked for.

    Raises:
        InputError: The file is damaged.
    """
    path = progress_path(folder, grid.study.name)
    if not path.exists():
        return 0
    launches, found = list[ProtocolLaunch](), list[TrialRecord]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            launch, record = _parse_line(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            hint = "Remove the file to run its trials again, or restore it."
            raise InputError(f"line {number} is damaged: {error}", field=str(path), hint=hint) from None
        if launch is not None:
            launches.append(launch)
        if record is not None:
            found.append(record)
    added = [record for record in found if records.get(record.cell) is None]
    for record in added:
        records.add(record)
    add_launches(launches, records.study_directory(grid.study.name))
    return len(added)


def _parse_line(values: dict[str, Any]) -> tuple[ProtocolLaunch | None, TrialRecord | None]:
    """Parse a line: a launch or a record."""
    if "launch" in values:
        return ProtocolLaunch(**values["launch"]), None
    return None, parse_record(values["record"])
