"""Receivers of the progress of a launch of the local pipeline."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from podscale.config import RunConfig
from podscale.runs import RunDirectory
from podscale.telemetry.events import EventRecord, FileTail, parse_record

if TYPE_CHECKING:
    from podscale.pipelines.local_runner import LocalLaunch


class LaunchDisplay:
    """Receiver of the progress of a launch; this one ignores it."""

    def moved_aside(self, directory: Path) -> None:
        """Receive the directory of an earlier run of this id."""

    def begin(self) -> None:
        """Receive the start of the launch; the caller holds the lease of the run directory."""

    def update(self, launch: "LocalLaunch") -> None:
        """Receive the state of the launch, about ten times a second."""


class RecordForwarder(LaunchDisplay):
    """Receiver that calls a function with each new record of metrics.jsonl."""

    def __init__(self, config: RunConfig, callback: Callable[[EventRecord], None]) -> None:
        self._path, self._callback = RunDirectory.for_config(config).metrics, callback
        self._lines: FileTail | None = None

    def begin(self) -> None:
        self._lines = FileTail(self._path)

    def update(self, launch: "LocalLaunch") -> None:
        for line in self._lines.read_lines() if self._lines is not None else ():
            if (record := parse_record(line)) is not None:
                self._callback(record)
