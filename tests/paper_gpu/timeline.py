"""Happens-before order of CUDA streams, and the accesses to memory that this order does not separate.

A stream's clock holds, for every stream, how many of its operations are over before the stream's next one. Two accesses
to the same bytes, one of them a write, race if the later one's stream has not waited for the earlier one. Bytes are
exact: a bucket is a slice of one storage, and its parts are reduced by different streams.

The caching allocator gives a freed block to the next operation of the stream that allocated it. So a block must not be
freed while another stream may still use it, unless `record_stream` told the allocator of that stream.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Stream = int | str
Clock = dict[Stream, int]
MOST_RANGES = 256
"""Ranges into which a strided view is cut at most; beyond that the whole span counts as used."""


class Timeline:
    """Clocks of the streams and of the host."""

    def __init__(self) -> None:
        self.clocks: dict[Stream, Clock] = defaultdict(dict)
        self.host: Clock = {}

    def launch(self, stream: Stream) -> int:
        """Append an operation to a stream; it follows all that the host waited for. Returns its number."""
        self.wait(stream, self.host)
        clock = self.clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def record(self, stream: Stream) -> Clock:
        return dict(self.clocks[stream])

    def wait(self, stream: Stream, event: Clock) -> None:
        _merge(self.clocks[stream], event)

    def wait_on_host(self, event: Clock) -> None:
        _merge(self.host, event)

    def launches(self) -> Clock:
        """Return the number of operations of each stream."""
        return {stream: clock.get(stream, 0) for stream, clock in self.clocks.items()}

    def wait_for_all(self) -> None:
        """Let the host wait for the device."""
        self.wait_on_host(self.launches())

    def is_over(self, number: int, of: Stream, *, before: Stream) -> bool:
        """Return True if operation `number` of stream `of` is over before the next operation of stream `before`."""
        return of == before or max(self.clocks[before].get(of, 0), self.host.get(of, 0)) >= number

    def is_over_on_host(self, number: int, of: Stream) -> bool:
        return self.host.get(of, 0) >= number


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number


@dataclass(frozen=True)
class Access:
    """One access to memory."""

    stream: Stream
    number: int
    operator: str
    where: str


@dataclass
class _Cell:
    """Bytes with the same history: the last write, and the last read of each stream since."""

    write: Access | None = None
    reads: dict[Stream, Access] = field(default_factory=dict)


@dataclass
class _Block:
    """Memory of one storage."""

    alive: StorageWeakRef
    stream: Stream
    bounds: list[int]
    cells: list[_Cell]
    users: dict[Stream, Access] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)

    def cells_of(self, start: int, stop: int) -> list[_Cell]:
        first, last = self._cut(start), self._cut(stop)
        return self.cells[first:last]

    def _cut(self, at: int) -> int:
        """Return the index of the cell that begins at byte `at`, after cutting the cell around it."""
        if at >= self.bounds[-1]:
            if at > self.bounds[-1]:
                self.bounds.append(at)
                self.cells.append(_Cell())
            return len(self.cells)
        index = bisect_left(self.bounds, at)
        if self.bounds[index] != at:
            before = self.cells[index - 1]
            self.bounds.insert(index, at)
            self.cells.insert(index, _Cell(before.write, dict(before.reads)))
        return index


@dataclass(frozen=True)
class Touch:
    """Bytes [start, stop) of a block that an operation of a CUDA graph uses."""

    block: _Block
    start: int
    stop: int
    writes: bool


class Memory:
    """Accesses to every storage of the device, and those that race."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._blocks: dict[int, _Block] = {}
        self._shared: dict[int, _Block] = {}  # blocks that another stream than the allocating one used
        self.races: list[str] = []
        self.recorded: list[Touch] | None = None
        """Accesses of the CUDA graph that is being recorded."""

    def allocate(self, tensor: Tensor, stream: Stream, where: str) -> None:
        """Note that `tensor` got new memory; report blocks that it may have got while another stream uses them."""
        for key, block in list(self._shared.items()):
            if block.stream == stream and block.alive.expired():
                for user, access in block.users.items():
                    over = self._timeline.is_over(access.number, user, before=stream)
                    if not over and user not in block.recorded:
                        self.races.append(f"freed while in use by {access.operator} at {access.where}; next {where}")
                del self._shared[key], self._blocks[key]
        self._block(tensor, stream)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self._block(tensor, stream).recorded.add(stream)

    def use(self, tensor: Tensor, access: Access, *, writes: bool) -> None:
        block = self._block(tensor, access.stream)
        if access.stream != block.stream:
            block.users[access.stream] = access
            self._shared[tensor.untyped_storage()._cdata] = block
        for start, stop in byte_ranges(tensor):
            touch = Touch(block, start, stop, writes)
            self._use_bytes(touch, access)
            if self.recorded is not None:
                self.recorded.append(touch)

    def repeat(self, touches: Iterable[Touch], access: Access) -> None:
        """Use the memory of a CUDA graph in one operation. Memory that the graph itself has freed is its own."""
        alive = [touch for touch in touches if not touch.block.alive.expired()]
        for touch in sorted(alive, key=lambda touch: touch.writes):
            self._use_bytes(touch, access)

    def _use_bytes(self, touch: Touch, access: Access) -> None:
        for cell in touch.block.cells_of(touch.start, touch.stop):
            self._check(cell, access, writes=touch.writes)
            if touch.writes:
                cell.write, cell.reads = access, {}
            else:
                cell.reads[access.stream] = access

    def read_on_host(self, tensor: Tensor, where: str) -> None:
        """Report a read by the host of memory that a stream may still write."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is None:
            return
        for start, stop in byte_ranges(tensor):
            for cell in block.cells_of(start, stop):
                write = cell.write
                if write and not self._timeline.is_over_on_host(write.number, write.stream):
                    self.races.append(f"the host reads what {write.operator} writes at {write.where}: {where}")

    def _check(self, cell: _Cell, access: Access, *, writes: bool) -> None:
        earlier: Iterable[Access | None] = [cell.write, *(cell.reads.values() if writes else ())]
        for other in earlier:
            if other and not self._timeline.is_over(other.number, other.stream, before=access.stream):
                self.races.append(f"{access.operator} at {access.where} after {other.operator} at {other.where}")

    def _block(self, tensor: Tensor, stream: Stream) -> _Block:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            size = max(1, storage.nbytes())
            block = _Block(StorageWeakRef(storage), stream, [0, size], [_Cell()])
            self._blocks[storage._cdata] = block  # the weak reference keeps the key from being used again
        return block


def byte_ranges(tensor: Tensor) -> Sequence[tuple[int, int]]:
    """Return the [start, stop) bytes of its storage that a tensor covers."""
    if tensor.numel() == 0:
        return []
    item, run = tensor.element_size(), 1
    start = int(tensor.storage_offset()) * item
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    dims = sorted((stride, size) for stride, size in strides if size > 1 and stride > 0)
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    if prod(size for _, size in dims) > MOST_RANGES:
        return [(start, start + item * (run + sum(stride * (size - 1) for stride, size in dims)))]
    offsets = (sum(at) for at in product(*([stride * n for n in range(size)] for stride, size in dims)))
    return sorted((start + item * offset, start + item * (offset + run)) for offset in offsets)


def on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"
