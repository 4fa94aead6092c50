"""Independent reader of TensorBoard's event files: framing by its definition, messages by protocol buffers."""

import functools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FIELDS = {
    "Event": [
        ("wall_time", 1, "DOUBLE"),
        ("step", 2, "INT64"),
        ("file_version", 3, "STRING"),
        ("summary", 5, ".Summary"),
        ("session_log", 7, ".SessionLog"),
    ],
    "Summary": [("value", 1, "*.Value")],
    "Value": [("tag", 1, "STRING"), ("simple_value", 2, "FLOAT")],
    "SessionLog": [("status", 1, "INT32")],
}
"""Fields of event.proto and summary.proto in event files of scalars; `*` marks repeated fields."""


def events(path: Path) -> list[Any]:
    """Return the events of one file. Fails if a checksum is wrong or bytes are left."""
    return parsed(path.read_bytes())


def parsed(content: bytes) -> list[Any]:
    """Return the events in a file's content."""
    event = _event_class()
    return [event.FromString(data) for data in _frames(content)]


def _frames(content: bytes) -> Iterator[bytes]:
    while content:
        (length, of_length) = struct.unpack_from("<QI", content)
        data, (of_data,) = content[12 : 12 + length], struct.unpack_from("<I", content, 12 + length)
        assert _unmasked(of_length) == google_crc32c.value(content[:8])
        assert _unmasked(of_data) == google_crc32c.value(data)
        yield data
        content = content[16 + length :]


def _unmasked(value: int) -> int:
    rotated = (value - 0xA282EAD8) % 2**32
    return (rotated >> 17 | rotated << 15) % 2**32


@functools.cache
def _event_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="events.proto", syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            added = message.field.add(name=field, number=number, label=3 if kind.startswith("*") else 1)
            if "." in kind:
                added.type, added.type_name = added.TYPE_MESSAGE, kind.lstrip("*")
            else:
                added.type = getattr(added, f"TYPE_{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Event"))
