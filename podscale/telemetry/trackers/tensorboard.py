"""TensorBoard event files in the run directory, for `tensorboard --logdir <workspace>/runs`.

Each launch writes a new file, because a running TensorBoard does not notice a changed or removed file. Every record
with metrics is one event, so the number of events shows how far a killed launch came. A session start makes TensorBoard
drop the steps that a resumed run repeats.

Two libraries were tried instead in November 2026:

- torch.utils.tensorboard needs tensorboard and torch, which images for TPUs do not have.
- tensorboardX 2.6.5 imports torch if that is installed: the process takes 564 MB beside the training (14 MB here) and
  4 s more to start. Its EventFileWriter.flush does not drain the queue: a killed process lost all events that were
  flushed before. It names files by the second, so two launches within a second write the same file.

Sources: event.proto and summary.proto of TensorBoard (field numbers), tfrecord.md and crc32c.h of TensorFlow (framing,
masked CRC-32C).
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from podscale.telemetry.events import EventRecord
from podscale.telemetry.trackers.base import LaunchExit, PointBuilder, launch_step

VERSION = b"brain.Event:2"
"""First version whose readers take restarts from SessionLog instead of guessing."""
SESSION_START = 1
POLYNOMIAL = 0x82F63B78
"""Castagnoli polynomial, bits reversed."""
HEAD_BYTES, TAIL_BYTES = 12, 4
"""Bytes before and after the data of a TFRecord."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""
PREFIX, SUFFIX = "events.out.tfevents.", ".podscale"
"""Parts of a file name. Readers look for `tfevents` and sort by name; the suffix marks the files of this module."""


class TensorBoard:
    """Tracker that writes event files to `directory`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.location = f"{directory} (tensorboard --logdir {directory.parent.parent})"
        earlier = sorted(directory.glob(f"{PREFIX}*{SUFFIX}"))
        self._already_written = sum(map(count_events, earlier))
        name = f"{PREFIX}{_next_file_number(earlier):010d}.{socket.gethostname()}.{os.getpid()}{SUFFIX}"
        self._file = EventFile((directory / name).open("wb"), time.time())
        self._point_builder = PointBuilder()

    def add(self, record: EventRecord) -> None:
        point = self._point_builder.point(record)
        first_step = launch_step(record)
        if point is None and first_step is None:
            return
        if self._already_written:
            self._already_written -= 1
        elif point is not None:
            self._file.scalars(point.time, point.step, point.values)
        elif first_step is not None:
            self._file.session_start(record["time"], first_step + 1)

    def flush(self) -> None:
        self._file.flush()

    def close(self, launch_exit: LaunchExit) -> None:
        self._file.close()


class EventFile:
    """Writer of events to an open file. The first event is the version; times are unix seconds."""

    def __init__(self, file: BinaryIO, time: float) -> None:
        self._file = file
        self._write(_event(time, 0, _bytes(3, VERSION)))

    def session_start(self, time: float, step: int) -> None:
        """Write the start of a launch at `time`, unix seconds; readers drop earlier events of this and later steps."""
        self._write(_event(time, step, _bytes(7, _key(1, VARINT) + _varint(SESSION_START))))

    def scalars(self, time: float, step: int, values: Mapping[str, float]) -> None:
        """Write one point of each curve, as float32; `time` is in unix seconds."""
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._write(_event(time, step, _bytes(5, summary)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        self._file.write(framed(event))


def count_events(path: Path) -> int:
    """Return the number of complete events in a file, without the version."""
    count, end, size = -1, 0, path.stat().st_size
    with path.open("rb") as file:
        while head := file.read(HEAD_BYTES):
            if len(head) < HEAD_BYTES:
                break
            end += HEAD_BYTES + struct.unpack_from("<Q", head)[0] + TAIL_BYTES
            if end > size:
                break
            count += 1
            file.seek(end)
    return max(0, count)


def framed(data: bytes) -> bytes:
    """Return the data as a TFRecord: length, its checksum, the data, its checksum."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(crc32c(length))) + data + struct.pack("<I", masked(crc32c(data)))


def masked(crc: int) -> int:
    """Mask a checksum as TFRecords do, because the CRC of data that holds its own CRC is weak."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _next_file_number(earlier: list[Path]) -> int:
    """Return a number for a file name that sorts after `earlier`: unix seconds, unless the clock was set back."""
    numbers = [int(n) for path in earlier if (n := path.name.removeprefix(PREFIX).partition(".")[0]).isdigit()]
    return max([int(time.time()), *(number + 1 for number in numbers)])


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_remainder, range(256)))


def _event(time: float, step: int, payload: bytes) -> bytes:
    return _key(1, FIXED64) + struct.pack("<d", time) + _key(2, VARINT) + _varint(step) + payload


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, BYTES) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    try:
        return _key(field, FIXED32) + struct.pack("<f", value)
    except OverflowError:  # beyond float32
        return _float(field, float("inf") if value > 0 else float("-inf"))


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(number: int) -> bytes:
    assert number >= 0, "steps and lengths are not negative"
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
