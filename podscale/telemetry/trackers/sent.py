"""What a tracker that cannot take figures back was given so far."""

import json
import secrets
from pathlib import Path

from podscale.config import RunConfig
from podscale.runs import RunDirectory
from podscale.telemetry.trackers.figures import TrackerPoint
from podscale.util.files import write_json

DEFAULT_PROJECT = "podscale"
"""Of what trackers call a project or an experiment."""


class SentPoints:
    """The tracker's own name of a run, and the newest update that it has of each kind: a file of the run directory.

    Updates that were lost and are done again come out the same, so it is no loss that their first figures stay.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.id = ""
        self._newest_steps: dict[str, int] = {}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            self.id, self._newest_steps = str(found["id"]), dict(found["newest"])
        self._taken_steps = dict(self._newest_steps)
        self._saved_steps = dict(self._newest_steps)

    @classmethod
    def for_run(cls, run: RunDirectory, tracker: str) -> "SentPoints":
        return cls(run.trackers / f"{tracker}.json")

    def take(self, point: TrackerPoint) -> bool:
        """Whether this point is to be sent: it was not, nor is it on its way, nor is one of a later update."""
        if point.step <= self._taken_steps.get(point.kind, -1):
            return False
        self._taken_steps[point.kind] = point.step
        return True

    def mark_sent(self, point: TrackerPoint) -> None:
        """It need not be sent again by later launches."""
        self._newest_steps[point.kind] = point.step

    def save(self) -> None:
        """Keeps what has arrived, where that is news."""
        if self._newest_steps != self._saved_steps:
            self.save_id(self.id)

    def save_id(self, name: str) -> None:
        """Keeps the tracker's name of the run too."""
        self.id = name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"id": self.id, "newest": self._newest_steps})
        self._saved_steps = dict(self._newest_steps)


def new_run_name(config: RunConfig) -> str:
    """A name for a run that no other run has, for people to recognise."""
    return f"{config.run.id}-{secrets.token_hex(4)}"
