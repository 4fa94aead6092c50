"""Reader of a W&B client's .wandb file, a LevelDB log of protocol-buffer records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK, RECORD_HEADER = 7, 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def history(path: Path) -> list[dict[str, Any]]:
    """Return the points of a .wandb file as they were logged."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in items})
    return rows


def exit_code(path: Path) -> int:
    """Return the exit code of the run of a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record

    exits = [Record.FromString(data) for data in _records(path.read_bytes())]
    return next(int(record.exit.exit_code) for record in exits if record.WhichOneof("record_type") == "exit")


def _records(content: bytes) -> Iterator[bytes]:
    assert content.startswith(b":W&B")
    offset, record = HEADER, b""
    while offset + RECORD_HEADER <= len(content):
        remaining = BLOCK - offset % BLOCK
        if remaining < RECORD_HEADER:
            offset += remaining
            continue
        _, length, kind = struct.unpack_from("<IHB", content, offset)
        if kind == 0:
            return
        part = content[offset + RECORD_HEADER : offset + RECORD_HEADER + length]
        offset += RECORD_HEADER + length
        record = part if kind in (FULL, FIRST) else record + part
        if kind in (FULL, LAST):
            yield record
