"""Shapes that fake tensors have computed in a forked case, handed to the cases after it.

torch keeps the shapes, strides and dtypes of an operator's results by operator and arguments. To compute them is half
of a case's CPU time, and most cases train the same network.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, _DispatchCacheKey

BY_NAME = (torch.dtype, torch.layout, torch.memory_format)
"""Kinds of constants of torch that are not pickled by name."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[str, ...] | None:
        if isinstance(value, torch._ops.OpOverload):
            return (*value._schema.name.split("::"), value._overloadname)
        return (str(value).removeprefix("torch."),) if isinstance(value, BY_NAME) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        found: Any = torch if len(name) == 1 else torch.ops
        for part in name:
            found = getattr(found, part)
        return found


def recorder() -> Callable[[], bytes]:
    """Return a function that returns the shapes which were computed since this call."""
    known = set(FakeTensorMode.cache)

    def new_shapes() -> bytes:
        written = io.BytesIO()
        for key, entry in FakeTensorMode.cache.items():
            if key not in known:
                start = written.tell()
                try:
                    _Pickler(written).dump((key.key, entry))
                except (RuntimeError, TypeError, AttributeError, pickle.PicklingError):  # as the group of a collective
                    written.seek(start)
                    written.truncate()
        return written.getvalue()

    return new_shapes


def add(shapes: bytes) -> None:
    """Add the shapes that a case has returned."""
    read = io.BytesIO(shapes)
    while read.tell() < len(shapes):
        key, entry = _Unpickler(read).load()
        FakeTensorMode.cache[_DispatchCacheKey(key)] = entry
