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

from podscale.errors import PodscaleError

COLLECTIVE_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
NETWORK_AXIS = "network"
"""Name of the axis between slices, through hosts and the data-centre network."""
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
"""Bytes of an element; 4 for all others."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
    rf"^\s+(?:ROOT )?(?P<name>%\S+) = (?P<type>.+?) (?P<kind>{'|'.join(COLLECTIVE_KINDS)})(?P<start>-start)?\("
)
_SEND = re.compile(r"^\s+(?:ROOT )?%\S+ = (?P<type>.+?) send\(.*_xla_megascale_transfer_type=\"(?P<kind>\w+)\"")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{(\{.*?\})\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[(?P<sizes>[^\]]*)\] \{(?P<axes>[^}]*)\}")
"""Groups by the axes of a mesh (jaxlib 0.11): `mesh['a'=4,'b'=2] {'b'}`; `'a':(2)2` is the faster half of `a`."""
_MESH_SIZE = re.compile(r"'(\w+)'=(\d+)")
_MESH_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_ALL_DEVICES = re.compile(r"replica_groups=\{\}|^(?!.*replica_groups=)")
_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
_FUSED_SCATTER = re.compile(r"^all-reduce-scatter")
"""Computation into which the compiler fuses an all-reduce and the slice of its result."""
_ASYNC_FUSION = re.compile(r"^async_collective_fusion")
"""Computations that run while a message is in flight. They repeat its instruction."""
_DONE = re.compile(r" custom-call\((?P<operands>[^)]*)\), custom_call_target=\"AsyncCollectiveDone\"")
"""Instruction that waits for such a message and names it once more."""
_START = re.compile(r" custom-call\((?P<operand>%[\w.\-]+)[,)].*custom_call_target=\"AsyncCollectiveStart\"")
"""Instruction that starts such a message."""
_SPLIT_START = re.compile(rf"^\s+(?P<name>%\S+) = .+? (?:{'|'.join(COLLECTIVE_KINDS)})-start\(")
_SPLIT_DONE = re.compile(rf" (?:{'|'.join(COLLECTIVE_KINDS)})-done\((?:.* )?(?P<start>%[\w.\-]+)\)")
_CYCLES = re.compile(r"^\s+(?:ROOT )?%\S+ = .+? (?P<kind>[\w\-]+)\(.*\"estimated_cycles\":\"(?P<cycles>\d+)\"")


class CompilerCycles(NamedTuple):
    """The compiler's estimate, in cycles of a core: all operations, and copies into another layout."""

    total: int
    copies: int


class Collective(NamedTuple):
    """One message.

    Args:
        axes: mesh axes along which the devices of a group differ.
        members: devices of a group.
        bytes: size of the array before a reduce-scatter or after an all-gather.
        is_early: start and end are two instructions with work in between, which can overlap with the message. Not
            known between slices.
    """

    kind: str
    axes: str
    members: int
    bytes: int
    is_early: bool = False

    @property
    def bytes_sent(self) -> float:
        """Least number of bytes that a device sends, as in a ring."""
        if self.axes == "none":
            return 0.0
        if self.kind == "collective-permute" or self.axes == NETWORK_AXIS:
            return float(self.bytes)
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * (self.members - 1) / self.members * self.bytes


def find_collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Return the collectives of a program; `mesh` has axes and their sizes, in the order of the devices."""
    collectives = []
    early = _early_messages(text)
    done = {name for match in _DONE.finditer(text) for name in re.findall(r"%[\w.\-]+", match["operands"])}
    in_fused_scatter = in_async_fusion = False
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            in_fused_scatter = bool(_FUSED_SCATTER.match(header["name"]))
            in_async_fusion = bool(_ASYNC_FUSION.match(header["name"]))
        elif match := _COLLECTIVE.match(line):
            if in_async_fusion or match["name"] in done:
                continue
            kind = "reduce-scatter" if in_fused_scatter and match["kind"] == "all-reduce" else match["kind"]
            axes, members = _axes(line, mesh)
            size = _size(match["type"], kind, started=bool(match["start"]))
            if kind == "reduce-scatter" and not in_fused_scatter:  # a fused one has the type of its all-reduce
                size *= members
            collectives.append(Collective(kind, axes, members, size, match["name"] in early))
        elif match := _SEND.match(line):
            kind, size = match["kind"].lower().replace("_", "-"), next(_sizes(match["type"]))
            collectives.append(Collective(kind, NETWORK_AXIS, mesh.get("slice", 1), size))
    return collectives


def _early_messages(text: str) -> set[str]:
    """Return the names of the instructions whose messages are in flight during other operations.

    These are all that run beside fused operations, and pairs of start and done between which the schedule has an
    operation with cycles.
    """
    early = {match["operand"] for match in _START.finditer(text)}
    in_flight: set[str] = set()
    for line in text.splitlines():
        if start := _SPLIT_START.match(line):
            in_flight.add(start["name"])
        elif done := _SPLIT_DONE.search(line):
            in_flight.discard(done["start"])
        elif in_flight and (operation := _CYCLES.match(line)) and int(operation["cycles"]):
            early |= in_flight
    return early


def find_cycles(text: str) -> CompilerCycles:
    """Return the estimated cycles of a program's operations; collectives and in-place updates have none."""
    total = copies = 0
    for line in text.splitlines():
        if "estimated_cycles" in line and (match := _CYCLES.match(line)):
            total += int(match["cycles"])
            copies += int(match["cycles"]) if match["kind"] == "copy" else 0
    return CompilerCycles(total, copies)


def summarise_collectives(collectives: Sequence[Collective]) -> list[dict[str, int | str | float]]:
    """Group messages by kind and axes: their number, bytes, and bytes sent, largest first."""
    groups: dict[tuple[str, str, int], list[Collective]] = {}
    for message in collectives:
        groups.setdefault((message.kind, message.axes, message.members), []).append(message)
    rows: list[dict[str, int | str | float]] = [
        {
            "kind": kind,
            "axes": axes,
            "members": members,
            "messages": len(messages),
            "bytes": sum(message.bytes for message in messages),
            "sent": sum(message.bytes_sent for message in messages),
        }
        for (kind, axes, members), messages in groups.items()
    ]
    return sorted(rows, key=lambda row: -float(row["bytes"]))


def axes_of_groups(groups: npt.NDArray[np.int64], mesh: Mapping[str, int]) -> str:
    """Return the axes along which the devices of `groups`, int64 [groups, members], differ, such as `row+group_row`.

    Other values are `all`, `none` and `irregular`.
    """
    sizes = tuple(mesh.values())
    if groups.size == 0 or groups.shape[1] == prod(sizes):
        return "all"
    if groups.shape[1] == 1:
        return "none"
    indices = np.array(np.unravel_index(groups, sizes))  # [axes, groups, members]
    varies = (indices != indices[:, :, :1]).any(axis=(1, 2))
    if prod(size for size, varied in zip(sizes, varies, strict=True) if varied) != groups.shape[1]:
        return "irregular"
    return "+".join(name for name, varied in zip(mesh, varies, strict=True) if varied)


def _axes(line: str, mesh: Mapping[str, int]) -> tuple[str, int]:
    """Return the axes of an instruction, and the number of devices of a group."""
    if pairs := _PAIRS.search(line):
        ends = np.array([_numbers(pair) for pair in pairs[1].split("},{")])
        sizes = tuple(mesh.values())
        varies = (np.array(np.unravel_index(ends[:, 0], sizes)) != np.array(np.unravel_index(ends[:, 1], sizes))).any(1)
        return "+".join(name for name, varied in zip(mesh, varies, strict=True) if varied) or "none", 2
    groups = replica_groups(line, prod(mesh.values()))
    return axes_of_groups(groups, mesh), groups.shape[1]


def replica_groups(line: str, devices: int) -> npt.NDArray[np.int64]:
    """Return the groups [groups, members] of an instruction: given as lists, as a reshaped range, or by mesh axes."""
    if listed := _LISTED.search(line):
        return np.array([_numbers(group) for group in listed[1].split("},{")])
    if counted := _COUNTED.search(line):
        shape, counts, permutation = (_numbers(part or "") for part in counted.groups())
        numbers = np.arange(prod(counts)).reshape(counts)
        return (numbers.transpose(permutation) if permutation else numbers).reshape(shape)
    if by_axes := _MESH.search(line):
        return _groups_of_axes(by_axes["sizes"], by_axes["axes"])
    if not _ALL_DEVICES.search(line):
        raise PodscaleError(f"this version of XLA writes the groups of a collective in an unknown form: {line.strip()}")
    return np.arange(devices)[None]


def _groups_of_axes(sizes: str, axes: str) -> npt.NDArray[np.int64]:
    """Return groups of the devices of a mesh that differ along `axes` only, both as in the program's text."""
    mesh = {name: int(size) for name, size in _MESH_SIZE.findall(sizes)}
    shape, members = tuple(mesh.values()), 1
    rest = dict(zip(mesh, np.unravel_index(np.arange(prod(shape)), shape), strict=True))
    digits: list[npt.NDArray[np.int64]] = []
    indices = dict(rest)
    for name, before, size in _MESH_AXIS.findall(axes):
        length = int(size or mesh[name])
        stride = mesh[name] // (int(before or 1) * length)
        digits.append(indices[name] // stride % length)
        rest[name] = rest[name] - digits[-1] * stride
        members *= length
    return np.lexsort([*reversed(digits), *reversed(rest.values())]).reshape(-1, members)


def _size(text: str, kind: str, *, started: bool) -> int:
    """Return the bytes of the result of an instruction of this type."""
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
