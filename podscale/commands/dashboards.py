"""`podscale dashboards export`: the packaged dashboards as files."""

import importlib.resources
from pathlib import Path

from podscale.errors import InputError
from podscale.monitoring.rule_types import fill_tokens
from podscale.util.files import write_atomically


def export_dashboards(folder: Path, runbooks: str) -> None:
    """Writes every dashboard into `folder` and prints its path.

    runbooks: address of the pages on the alerts, for the links. Raises InputError where that cannot be written.
    """
    if set(runbooks) & set(' "\\'):
        problem = "an address holds no spaces, quotes or backslashes"
        raise InputError(problem, field="--runbooks", got=runbooks)
    packaged = importlib.resources.files("podscale.dashboards")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(packaged.iterdir(), key=lambda file: file.name):
            if file.name.endswith(".json"):
                text = fill_tokens(file.read_text(encoding="utf-8"), {"runbooks": f"{runbooks.rstrip('/')}/"})
                write_atomically(folder / file.name, text)
                print(folder / file.name)
    except OSError as error:
        problem = f"cannot write the dashboards: {error.strerror or error}"
        raise InputError(problem, field=str(folder)) from error
