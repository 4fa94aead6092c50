"""Collectives of a compiled program, read from its text (HLO after all of XLA's passes).

The compiled program counts, not the step's source: the compiler may merge messages, fuse them with their users, start
them early, or turn one kind into another.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

COLLECTIVE_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
NETWORK_AXIS = "network"
"""In the place of axes: between slices, through hosts and the data-centre network."""
DTYPE_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "token": 0,
}
"""Of an element; 4 for all others."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
    rf"^\s+(?:ROOT )?(?P<name>%\S+) = (?P<type>.+?) (?P<kind>{'|'.join(COLLECTIVE_KINDS)})(?P<start>-start)?\("
)
_SEND = re.compile(r"^\s+(?:ROOT )?%\S+ = (?P<type>.+?) send\(.*_xla_megascale_transfer_type=\"(?P<kind>\w+)\"")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{(\{.*?\})\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
_SCATTERS = re.compile(r"^all-reduce-scatter")
"""The computation that the compiler fuses an all-reduce and the slice of its result into."""
_CARRIED_ON = re.compile(r"^async_collective_fusion")
"""Computations that work while a message is under way, and name it again: it began elsewhere."""
_DONE = re.compile(r" custom-call\((?P<operands>[^)]*)\), custom_call_target=\"AsyncCollectiveDone\"")
"""Ends such a message, and names it a last time."""

_CYCLES = re.compile(r"^\s+(?:ROOT )?%\S+ = .+? (?P<kind>[\w\-]+)\(.*\"estimated_cycles\":\"(?P<cycles>\d+)\"")


class CompilerCycles(NamedTuple):
    """What the compiler expects its operations to take, in cycles of a core: all, and copies into another layout."""

    total: int
    copies: int


class Collective(NamedTuple):
    """One message. bytes: of the whole array, as it is before a reduce-scatter and after an all-gather.

    axes: of the mesh, those of which more than one place takes part. members: devices of a group.
    """

    kind: str
    axes: str
    members: int
    bytes: int

    @property
    def bytes_sent(self) -> float:
        """Bytes that a device sends at least: those of a ring, in which no link carries anything twice."""
        if self.axes == "none":
            return 0.0
        if self.kind == "collective-permute" or self.axes == NETWORK_AXIS:
            return float(self.bytes)
        ways = 2 if self.kind == "all-reduce" else 1
        return ways * (self.members - 1) / self.members * self.bytes


def find_collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """The collectives of a program; mesh: its axes and their sizes, in the order in which they count its devices."""
    found = []
    done = {name for match in _DONE.finditer(text) for name in re.findall(r"%[\w.\-]+", match["operands"])}
    scatters = carried_on = False
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            scatters, carried_on = bool(_SCATTERS.match(header["name"])), bool(_CARRIED_ON.match(header["name"]))
        elif match := _COLLECTIVE.match(line):
            if carried_on or match["name"] in done:
                continue
            kind = "reduce-scatter" if scatters and match["kind"] == "all-reduce" else match["kind"]
            axes, members = _axes(line, mesh)
            size = _size(match["type"], kind, started=bool(match["start"]))
            # The type of a fused scatter is that of its all-reduce, which is whole already.
            whole = size * members if kind == "reduce-scatter" and not scatters else size
            found.append(Collective(kind, axes, members, whole))
        elif match := _SEND.match(line):
            sizes = list(_sizes(match["type"]))
            found.append(
                Collective(match["kind"].lower().replace("_", "-"), NETWORK_AXIS, mesh.get("slice", 1), sizes[0])
            )
    return found


def find_cycles(text: str) -> CompilerCycles:
    """The cycles that stand at the operations of a program; collectives and updates in place have none."""
    total = copies = 0
    for line in text.splitlines():
        if "estimated_cycles" in line and (match := _CYCLES.match(line)):
            total += int(match["cycles"])
            copies += int(match["cycles"]) if match["kind"] == "copy" else 0
    return CompilerCycles(total, copies)


def summarise_collectives(collectives: Sequence[Collective]) -> list[dict[str, int | str | float]]:
    """Messages of the same kind along the same axes together: their number, bytes, and bytes sent, largest first."""
    together: dict[tuple[str, str, int], list[Collective]] = {}
    for one in collectives:
        together.setdefault((one.kind, one.axes, one.members), []).append(one)
    rows: list[dict[str, int | str | float]] = [
        {
            "kind": kind,
            "axes": axes,
            "members": members,
            "messages": len(messages),
            "bytes": sum(one.bytes for one in messages),
            "sent": sum(one.bytes_sent for one in messages),
        }
        for (kind, axes, members), messages in together.items()
    ]
    return sorted(rows, key=lambda row: -float(row["bytes"]))


def axes_of_groups(groups: npt.NDArray[np.int64], mesh: Mapping[str, int]) -> str:
    """The axes along which groups [groups, members] lie: `row+group_row`; `all`, `none`, or `irregular`."""
    sizes = tuple(mesh.values())
    if groups.size == 0 or groups.shape[1] == prod(sizes):
        return "all"
    if groups.shape[1] == 1:
        return "none"
    places = np.array(np.unravel_index(groups, sizes))  # [axes, groups, members]
    varies = (places != places[:, :, :1]).any(axis=(1, 2))
    if prod(size for size, varied in zip(sizes, varies, strict=True) if varied) != groups.shape[1]:
        return "irregular"
    return "+".join(name for name, varied in zip(mesh, varies, strict=True) if varied)


def _axes(line: str, mesh: Mapping[str, int]) -> tuple[str, int]:
    """The axes of an instruction, and how many devices talk with each other."""
    if pairs := _PAIRS.search(line):
        ends = np.array([_numbers(pair) for pair in pairs[1].split("},{")])
        sizes = tuple(mesh.values())
        varies = (np.array(np.unravel_index(ends[:, 0], sizes)) != np.array(np.unravel_index(ends[:, 1], sizes))).any(1)
        return "+".join(name for name, varied in zip(mesh, varies, strict=True) if varied) or "none", 2
    groups = _groups(line, prod(mesh.values()))
    return axes_of_groups(groups, mesh), groups.shape[1]


def _groups(line: str, devices: int) -> npt.NDArray[np.int64]:
    """Groups [groups, members] of an instruction: as lists, or as a count that is reshaped and turned."""
    if listed := _LISTED.search(line):
        return np.array([_numbers(group) for group in listed[1].split("},{")])
    if counted := _COUNTED.search(line):
        shape, counts, turned = (_numbers(part or "") for part in counted.groups())
        numbers = np.arange(prod(counts)).reshape(counts)
        return (numbers.transpose(turned) if turned else numbers).reshape(shape)
    return np.arange(devices)[None]


def _size(text: str, kind: str, *, started: bool) -> int:
    """Bytes of the result of an instruction of this type."""
    sizes = list(_sizes(text))
    if started and kind == "all-gather":  # operands, then results
        return sum(sizes[len(sizes) // 2 :])
    if started and kind == "collective-permute":  # operand, result, two flags
        return sizes[0]
    return sum(sizes)


def _sizes(text: str) -> Iterator[int]:
    for dtype, dimensions in _SHAPE.findall(text):
        yield DTYPE_BYTES.get(dtype, 4) * prod(_numbers(dimensions))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
