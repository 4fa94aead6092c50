"""Page of a session of gpu_session.sh, from the files that it wrote, with the standard library alone.

    python -m tools.gpu_session_page OUT PAGE 'make bench-gpu REHEARSE=1 ...' 'Remarks on the machine'

Names of folders of the machine are replaced by OUT, TMPDIR, PYTHON and HOME.
"""

import json
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

LONGEST_REASON = 160
"""Characters of a reason in a table."""
COMPILER_CACHE = "gpu-inductor"
"""Folder of OUT whose files are not listed."""
MACHINE_LINES = r"^\w+ +(system|processor|memory|/dev/shm|workspace)\b.*\n"
"""Lines of `podscale doctor` about this machine alone."""


def write_page(out: Path, page: Path, command: str, remarks: str = "") -> None:
    """Write what a session printed at its start, its tests, stages, rows and files."""
    checks, doctor = (_read(out / name) for name in ("gpu-checks.txt", "gpu-doctor.txt"))
    lines = [
        *("# Session of tools/gpu_session.sh", ""),
        f"Command: `{command}`  ",
        f"Date: {time.strftime('%Y-%m-%d')}",
        *(["", *textwrap.wrap(remarks, 120)] if remarks else []),
        *("", "## What was printed at the start", "", "```", *checks.splitlines(), "```"),
        *("", "`podscale doctor`, without the lines on processor, memory and disk:"),
        *("", "```", *re.sub(MACHINE_LINES, "", doctor, flags=re.MULTILINE).splitlines(), "```"),
        *("", "## Tests", "", *_table(("file", "result", "not run"), _test_rows(out))),
        *("", "## The digits through all stages", "", *_table(("engine", "accuracy, or failure"), _stage_rows(out))),
        *("", "## Sweep", "", *_table(("variant", "seconds", "result"), _sweep_rows(out))),
        *("", "## Files", "", *_table(("file of OUT", "bytes"), _file_rows(out))),
    ]
    page.write_text(hide_places("\n".join([*lines, ""]), out), encoding="utf-8")


def hide_places(text: str, out: Path) -> str:
    """Replace the folders of this machine by their names."""
    places = {
        str(out.absolute()): "OUT",
        os.path.realpath(out): "OUT",
        tempfile.gettempdir(): "TMPDIR",
        os.environ.get("PYTHON", sys.executable): "PYTHON",
        str(Path.cwd()): "CHECKOUT",
        str(Path.home()): "HOME",
    }
    for place in sorted(places, key=len, reverse=True):
        text = re.sub(rf"{re.escape(place)}(?![\w-])", places[place], text)
    return text


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _table(columns: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells)]


def _test_rows(out: Path) -> Iterator[Sequence[str]]:
    """Yield each file of tests with pytest's last counts, and what the tests that were not run need."""
    for path in sorted((out / "gpu-tests").glob("*.txt")):
        text = _read(path)
        results = re.findall(r"^(?=.*\d+ (?:passed|failed|skipped|errors?)\b).* in [\d.]+s.*$", text, re.MULTILINE)
        needs = re.findall(r"^Not run: (.*)$", text, re.MULTILINE)
        yield f"`{path.name}`", results[-1].strip("= ") if results else "no summary", needs[-1] if needs else ""


def _stage_rows(out: Path) -> Iterator[Sequence[str]]:
    for path in sorted(out.glob("gpu-run-*.txt")):
        lines = [line for line in _read(path).splitlines() if line.startswith(("top-1", "podscale"))]
        yield path.stem.removeprefix("gpu-run-"), "; ".join(line[:LONGEST_REASON] for line in lines)


def _sweep_rows(out: Path) -> Iterator[Sequence[str]]:
    for path in sorted(out.glob("train-*.json")):
        for row in json.loads(_read(path)):
            found = row["found"]
            result = f"{found['images_per_second']:,.1f} images/s" if found else row["reason"][:LONGEST_REASON]
            yield row["name"], f"{row['seconds']:.0f}", result


def _file_rows(out: Path) -> Iterator[Sequence[str]]:
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.relative_to(out).parts[0] != COMPILER_CACHE:
            yield f"`{path.relative_to(out)}`", str(path.stat().st_size)


if __name__ == "__main__":
    write_page(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
