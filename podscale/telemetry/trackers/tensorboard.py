"""TensorBoard: event files in the run directory, for `tensorboard --logdir <workspace>/runs`.

One file a launch of the supervisor. It begins where the former ones end, which say themselves how far they are: every
record that has an event has one, so nothing is lost or told twice, wherever a former launch was killed. (Files are
only added: a TensorBoard that is open would stay at one that is changed or removed.) Where the run begins or continues,
a session start makes TensorBoard forget the updates that are done again.
"""

import os
import socket
import time
from pathlib import Path

from podscale.telemetry.events import EventRecord
from podscale.telemetry.trackers.eventfile import EventFile, count_events
from podscale.telemetry.trackers.figures import PointBuilder, launch_step
from podscale.telemetry.trackers.tracker import LaunchExit

PREFIX, SUFFIX = "events.out.tfevents.", ".podscale"
"""Readers look for `tfevents`, and read files in the order of their names; the suffix tells ours from others."""


class TensorBoard:
    """Writes to `directory`, which it makes."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.location = f"{directory} (tensorboard --logdir {directory.parent.parent})"
        former = sorted(directory.glob(f"{PREFIX}*{SUFFIX}"))
        self._already_written = sum(map(count_events, former))
        name = f"{PREFIX}{_next_file_number(former):010d}.{socket.gethostname()}.{os.getpid()}{SUFFIX}"
        self._file = EventFile((directory / name).open("wb"), time.time())
        self._point_builder = PointBuilder()

    def add(self, record: EventRecord) -> None:
        point = self._point_builder.point(record)
        begins_after = launch_step(record)
        if point is None and begins_after is None:
            return
        if self._already_written:
            self._already_written -= 1
        elif point is not None:
            self._file.scalars(point.time, point.step, point.values)
        elif begins_after is not None:
            self._file.session_start(record["time"], begins_after + 1)

    def flush(self) -> None:
        self._file.flush()

    def close(self, launch_exit: LaunchExit) -> None:
        self._file.close()


def _next_file_number(former: list[Path]) -> int:
    """A number for a file's name behind all of these: unix seconds, unless the clock went backwards."""
    numbers = [int(n) for path in former if (n := path.name.removeprefix(PREFIX).partition(".")[0]).isdigit()]
    return max([int(time.time()), *(number + 1 for number in numbers)])
