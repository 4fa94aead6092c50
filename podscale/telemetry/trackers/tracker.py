"""What a tracker is."""

import json
from dataclasses import asdict, dataclass
from typing import Protocol

from podscale.errors import ExitCode
from podscale.telemetry.events import EventRecord

FAILURE_PREFIX = "failed: "
"""Begins the line in which a tracker's process says why it ends."""


@dataclass(frozen=True)
class LaunchExit:
    """How the launch ended to which a tracker belongs: its exit code and the error for people."""

    exit_code: int = int(ExitCode.FAILED)
    error: str = ""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "LaunchExit":
        """Of `line()`; a failure where nothing was said."""
        return cls(**json.loads(line)) if line.strip() else cls()


class Tracker(Protocol):
    """Takes the records of a run, from the first one in every launch.

    location: a place to look at, for people.
    """

    location: str

    def add(self, record: EventRecord) -> None:
        """Takes the next record; cheap."""

    def flush(self) -> None:
        """Passes on what was added. Called every second, also where nothing is new."""

    def close(self, launch_exit: LaunchExit) -> None:
        """The launch has ended; nothing more will come."""
