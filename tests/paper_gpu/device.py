"""CUDA on paper: streams, events and pinned memory in Python, and a mode that watches every operator of a step.

The tensors are fake (shapes, dtypes and memory formats without values), so a step of a real network takes a second.
Every operator runs on the current stream of the timeline. NCCL's calls run on a stream of their group. The current
stream follows a call when its `wait` is called, which torch does itself in synchronous calls.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from podscale.pytorch.memory_traffic import (
    bind_arguments,
    new_tensors,
    operator_bytes,
    touches_no_memory,
    written_arguments,
)
from tests.paper_gpu.timeline import Access, Clock, Memory, Stream, Timeline, on_device

WAITING_OPERATORS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::bincount",
    "aten::_linalg_eigh",
    "aten::_linalg_svd",
    "aten::linalg_eig",
)
"""Operators whose result the host needs, so that it waits for the device."""
COLLECTIVE_WRITES = {
    "c10d::allreduce_": "tensors",
    "c10d::broadcast_": "tensors",
    "c10d::reduce_": "tensors",
    "c10d::_allgather_base_": "output_tensor",
    "c10d::_reduce_scatter_base_": "output_tensor",
    "c10d::alltoall_base_": "output",
    "c10d::recv_": "tensors",
    "c10d::send": None,
}
"""Argument that a collective writes; it reads all tensors."""
ROOTS_AND_PEERS = ("root_rank", "src", "dst")
"""Arguments with a rank of the collective's group."""


class PaperGpu:
    """Recorder of everything that a run does on the device."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.memory = Memory(self.timeline)
        self._stream_numbers = count()
        self.stream = self.new_stream()
        self.capturing = False
        self.step = 0
        self.host_waits: list[str] = []
        self.copies: list[str] = []
        self.mixed: list[str] = []
        self.operators: Counter[str] = Counter()
        self.phase = ""
        self.bytes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Bytes that operators and kernels move, by phase of the step and name."""
        self.collectives: list[tuple[str, str, int, str, int]] = []
        """(group, operator, elements, dtype, root or peer) of each call, in order."""
        self.first_used_in_capture: list[str] = []
        self.ends: dict[dist.Work, Clock] = {}
        """What is over at the end of each collective."""
        self._groups: set[str] = set()
        self._pinned: dict[int, StorageWeakRef] = {}

    def new_stream(self) -> "PaperStream":
        return PaperStream(self, next(self._stream_numbers))

    def clear(self) -> None:
        """Forget the problems and the calls so far."""
        for problems in (self.host_waits, self.copies, self.mixed, self.collectives, self.memory.races):
            problems.clear()

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def wait_on_host(self, what: str, event: Clock | None, age: int = 0) -> None:
        """Note that the host waits. Waits for events of two or more steps ago are free: the device has passed them."""
        self.timeline.wait_on_host(event if event is not None else self.timeline.record(self.stream.number))
        if age < 2:
            self.host_waits.append(f"{what} at {where()}")


class PaperStream:
    """Stream of the timeline, in place of `torch.cuda.Stream`."""

    def __init__(self, gpu: PaperGpu, number: int) -> None:
        self.gpu, self.number = gpu, number
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: "PaperStream") -> None:
        self.gpu.timeline.wait(self.number, self.gpu.timeline.record(other.number))

    def wait_event(self, event: "PaperEvent") -> None:
        self.gpu.timeline.wait(self.number, event.clock)

    def record_event(self) -> "PaperEvent":
        event: Any = torch.cuda.Event()
        event.record(self)
        return event  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        self.gpu.wait_on_host("a stream", self.gpu.timeline.record(self.number))


class PaperEvent:
    """Event of the timeline, in place of `torch.cuda.Event`."""

    gpu: PaperGpu

    def __init__(self, **options: Any) -> None:
        self.clock: Clock = {}
        self.step = 0

    def record(self, stream: PaperStream | None = None) -> None:
        self.clock = self.gpu.timeline.record((stream or self.gpu.stream).number)
        self.step = self.gpu.step

    def wait(self, stream: PaperStream | None = None) -> None:
        (stream or self.gpu.stream).wait_event(self)

    def synchronize(self) -> None:
        self.gpu.wait_on_host("an event", self.clock, self.gpu.step - self.step)

    def query(self) -> bool:
        return self.gpu.step - self.step >= 2

    def elapsed_time(self, end: "PaperEvent") -> float:
        return 1.0


def where() -> str:
    """Return the innermost lines of the package on the call stack."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < 3:
        if "/podscale/" in frame.f_code.co_filename:
            name = frame.f_code.co_filename.rpartition("/podscale/")[2]
            lines.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)


class Watch(TorchDispatchMode):
    """Mode that runs above fake tensors, and records each operator before they compute its shapes."""

    def __init__(self, gpu: PaperGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, gpu = kwargs or {}, func._schema.name, self.gpu
        if name.startswith("prim::"):
            return func(*args, **kwargs)
        if name == "aten::record_stream":
            return None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in WAITING_OPERATORS and any(map(on_device, tensors)):
            gpu.wait_on_host(name, None)
        if name == "aten::_local_scalar_dense":
            return _scalar_like(args[0])
        blocks = self._check_devices(name, tensors, args, kwargs)
        pinned = kwargs.pop("pin_memory", False) if kwargs.get("pin_memory") else False
        if name == "aten::_to_copy":
            args[0].constant = None  # else torch moves the value of a single number to the device
        result = func(*args, **kwargs)
        if pinned:
            gpu.pin(result)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(on_device(t) or gpu.is_pinned(t) for t in (*tensors, *outputs)):
            end = self._run(func._schema, bind_arguments(func._schema, args, kwargs), tensors, outputs)
            if blocks:
                gpu.timeline.wait_on_host(end)
            if name.startswith("c10d::"):
                gpu.ends[dist.Work.unbox(tree_leaves(result)[-1])] = end
        return result

    def _check_devices(self, name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
        """Note slow copies, and operators on both devices. Returns True for a copy that the host waits for."""
        kinds = {tensor.device.type for tensor in tensors}
        if name in ("aten::_to_copy", "aten::copy_"):
            into = name == "aten::copy_"
            source = args[1] if into else args[0]
            to = args[0].device if into else torch.device(kwargs.get("device") or source.device)
            waits = not (kwargs.get("non_blocking") or (into and len(args) > 2 and args[2]))
            host = source if source.device.type == "cpu" else args[0] if into else None
            if source.device.type == to.type:
                return False
            if waits:
                self.gpu.copies.append(f"blocking {source.device.type} to {to.type} at {where()}")
                return True
            if host is None or not self.gpu.is_pinned(host):
                self.gpu.copies.append(f"unpinned {source.device.type} to {to.type} at {where()}")
        elif kinds == {"cpu", "cuda"}:
            self.gpu.mixed.append(f"{name} at {where()}")
        return False

    def _run(self, schema: Any, arguments: dict[str, Any], tensors: list[Tensor], outputs: list[Tensor]) -> Clock:
        """Record the accesses of an operator or a collective. Returns what is over when it is."""
        gpu, name, call = self.gpu, schema.name, where()
        stream: Stream = gpu.stream.number
        allocated = new_tensors(tensors, outputs)
        for tensor in allocated:
            gpu.memory.allocate(tensor, stream, call)
        if name.startswith("c10d::"):
            stream, written = self._start_collective(name, arguments, tensors[0]), {COLLECTIVE_WRITES[name]}
        elif touches_no_memory(schema):
            return gpu.timeline.record(stream)
        else:
            written = written_arguments(schema)
        gpu.operators[name] += 1
        gpu.bytes[gpu.phase][name] += operator_bytes(schema, arguments, written, allocated)
        access = Access(stream, gpu.timeline.launch(stream), name, call)
        for argument, value in arguments.items():
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor) and (on_device(tensor) or gpu.is_pinned(tensor)):
                    gpu.memory.use(tensor, access, writes=argument in written)
        for tensor in allocated:
            gpu.memory.use(tensor, access, writes=True)
        return gpu.timeline.record(stream)

    def _start_collective(self, name: str, arguments: dict[str, Any], tensor: Tensor) -> str:
        """Note the call and return the stream of its group, ordered after the current one."""
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        ranks = [dist.get_global_rank(group, arguments[key]) for key in ROOTS_AND_PEERS if key in arguments]
        gpu, group_name = self.gpu, group.group_name
        gpu.collectives.append((group_name, name, tensor.numel(), str(tensor.dtype), *(ranks or [-1])))
        if group_name not in gpu._groups:
            gpu._groups.add(group_name)
            if gpu.capturing:
                gpu.first_used_in_capture.append(f"{group_name} at {where()}")
        stream = f"nccl {group_name}"
        gpu.timeline.wait(stream, gpu.timeline.record(gpu.stream.number))
        return stream


def _scalar_like(tensor: Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return True
    return 0.5 if tensor.dtype.is_floating_point else 0


@contextmanager
def paper_gpu() -> Iterator[PaperGpu]:
    """Replace CUDA by a device on paper, and all new tensors by fake ones."""
    gpu = PaperGpu()

    class Event(PaperEvent):
        pass

    Event.gpu = gpu

    @contextmanager
    def use_stream(stream: PaperStream) -> Iterator[None]:
        before, gpu.stream = gpu.stream, stream
        try:
            yield
        finally:
            gpu.stream = before

    def to_list(tensor: Tensor) -> list[Any]:
        if on_device(tensor):
            gpu.wait_on_host("tolist", None)
        gpu.memory.read_on_host(tensor, where())
        return [0] * tensor.numel()

    def wait_for_work(work: dist.Work, *timeout: Any) -> bool:
        gpu.timeline.wait(gpu.stream.number, gpu.ends.get(work, {}))
        return True

    def record_stream(tensor: Tensor, stream: PaperStream) -> None:
        gpu.memory.record_stream(tensor, stream.number)

    replaced: dict[str, Any] = {
        "Stream": lambda device=None, priority=0: gpu.new_stream(),
        "Event": Event,
        "stream": use_stream,
        "current_stream": lambda device=None: gpu.stream,
        "synchronize": lambda device=None: gpu.wait_on_host("the device", None),
        "is_current_stream_capturing": lambda: gpu.capturing,
        "default_generators": (torch.Generator(),),
        "set_device": lambda device: None,
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor: gpu.pin(tensor)))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", to_list))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", record_stream))
        stack.enter_context(mock.patch.object(FakeWork, "wait", wait_for_work))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is a copy that the mode sees
        stack.enter_context(Watch(gpu))
        yield gpu
