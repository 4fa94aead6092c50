"""TensorBoard: event files in the run directory, for `tensorboard --logdir <workspace>/runs`.

Every launch writes one new file with the whole run, at whose head all that former files said is declared void, and
then removes those: so nothing is lost or told twice, wherever a former launch was killed. Within it, each launch of the
run begins with a session start, at which TensorBoard forgets the updates that were done again.
"""

import os
import socket
import time
from pathlib import Path

from podscale.telemetry.events import Record
from podscale.telemetry.trackers.eventfile import EventFile
from podscale.telemetry.trackers.figures import Figures, launched_after
from podscale.telemetry.trackers.tracker import Ended

PREFIX, SUFFIX = "events.out.tfevents.", ".podscale"
"""Readers look for `tfevents`, and read files in the order of their names; the suffix tells ours from others."""


class TensorBoard:
    """Writes to `directory`, which it makes."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.where = f"{directory}: tensorboard --logdir {directory.parent.parent}"
        self._former = sorted(directory.glob(f"{PREFIX}*{SUFFIX}"))
        self._name = directory / f"{PREFIX}{_later(self._former):010d}.{socket.gethostname()}.{os.getpid()}{SUFFIX}"
        self._begun: Path | None = directory / ".begun"  # no name for readers, until it says what former files say
        self._file = EventFile(self._begun.open("wb"), time.time())
        self._file.session("start", time.time(), 0)
        self._figures = Figures()
        self._step = 0

    def add(self, record: Record) -> None:
        point = self._figures.point(record)
        begins_after = launched_after(record)
        if begins_after is not None:
            self._step = begins_after
            self._file.session("start", record["time"], begins_after + 1)
        elif point is not None:
            self._step = point.step
            self._file.scalars(point.time, point.step, point.values)

    def flush(self) -> None:
        self._file.flush()
        if self._begun is not None:
            self._begun.rename(self._name)
            self._begun = None
            for path in self._former:
                path.unlink(missing_ok=True)

    def close(self, ended: Ended) -> None:
        self._file.session("stop", time.time(), self._step)
        self.flush()
        self._file.close()


def _later(former: list[Path]) -> int:
    """A number for a file's name behind all of these: unix seconds, unless the clock went backwards."""
    numbers = [int(n) for path in former if (n := path.name.removeprefix(PREFIX).partition(".")[0]).isdigit()]
    return max([int(time.time()), *(number + 1 for number in numbers)])
