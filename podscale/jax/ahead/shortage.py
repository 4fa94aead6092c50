"""What the TPU compiler says where a program does not fit the memory of a device."""

import re
from typing import NamedTuple

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"
_TEMPORARIES = re.compile(rf"memory required for .*? \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm", re.IGNORECASE)


class MemoryShortage(NamedTuple):
    """Bytes of a device that the program needs, and those that the compiler may use."""

    needed: int
    available: int


def parse_memory_shortage(message: str) -> MemoryShortage | None:
    """The shortage that an error of the compiler speaks of; None where it speaks of something else."""
    match = _TEMPORARIES.search(message) or _USED.search(message)
    if match is None:
        return None
    needed, needed_unit, available, available_unit = match.groups()
    return MemoryShortage(round(float(needed) * _UNITS[needed_unit]), round(float(available) * _UNITS[available_unit]))
