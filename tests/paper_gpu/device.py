"""CUDA on paper: streams, events and pinned memory in Python, and a mode that watches every operator of a step.

The tensors are fake (shapes, dtypes and memory formats without values), so a step of a real network takes a second.
Every operator runs on the current stream of the timeline. NCCL's calls run on a stream of their group, which the
current stream waits for if the call is synchronous, or once `wait` is called.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.paper_gpu.timeline import Access, Clock, Memory, Timeline, on_device

WAITING_OPERATORS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::_unique2",
)
"""Operators whose result the host needs, so that it waits for the device."""
COLLECTIVE_WRITES = {
    "c10d::allreduce_": (0,),
    "c10d::broadcast_": (0,),
    "c10d::reduce_": (0,),
    "c10d::_allgather_base_": (0,),
    "c10d::_reduce_scatter_base_": (0,),
    "c10d::recv_": (0,),
    "c10d::send": (),
}
"""Arguments that a collective writes; it reads all tensors."""


class PaperGpu:
    """Recorder of everything that a run does on the device."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.memory = Memory(self.timeline)
        self.stream: Any = None  # set below
        self.default_stream = PaperStream(self, number=0)
        self.stream = self.default_stream
        self.capturing = False
        self.step = 0
        self.host_waits: list[str] = []
        self.copies: list[str] = []
        self.mixed: list[str] = []
        self.operators: Counter[str] = Counter()
        self.collectives: list[tuple[str, str, int, str, int]] = []
        """(group, operator, elements, dtype, root or peer) of each call, in order."""
        self.first_used_in_capture: list[str] = []
        self._groups: set[str] = set()
        self._pinned: dict[int, StorageWeakRef] = {}

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

    made = 0

    def __init__(self, gpu: PaperGpu, number: int | None = None) -> None:
        PaperStream.made += 1
        self.gpu, self.number = gpu, PaperStream.made if number is None else number
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: "PaperStream") -> None:
        self.gpu.timeline.wait(self.number, self.gpu.timeline.record(other.number))

    def wait_event(self, event: "PaperEvent") -> None:
        self.gpu.timeline.wait(self.number, event.clock)

    def record_event(self, event: "PaperEvent | None" = None) -> "PaperEvent":
        event = event or torch.cuda.Event()  # type: ignore[assignment]
        assert event is not None
        event.record(self)
        return event

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

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.gpu.wait_on_host("an event", self.clock, self.gpu.step - self.step)

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
        self._check_devices(name, tensors, args, kwargs)
        pinned = kwargs.pop("pin_memory", False) if kwargs.get("pin_memory") else False
        if name == "aten::_to_copy":
            args[0].constant = None  # else torch moves the value of a single number to the device
        result = func(*args, **kwargs)
        if pinned:
            gpu.pin(result)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(on_device(t) or gpu.is_pinned(t) for t in (*tensors, *outputs)):
            self._run(func, name, args, kwargs, tensors, outputs)
        return result

    def _check_devices(self, name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> None:
        """Note copies that make the host wait, and operators on tensors of both devices."""
        kinds = {tensor.device.type for tensor in tensors}
        if name in ("aten::_to_copy", "aten::copy_"):
            into = name == "aten::copy_"
            source = args[1] if into else args[0]
            to = args[0].device if into else torch.device(kwargs.get("device") or source.device)
            waits = not (kwargs.get("non_blocking") or (into and len(args) > 2 and args[2]))
            host = source if source.device.type == "cpu" else args[0] if into else None
            if source.device.type == to.type:
                return
            if waits:
                self.gpu.copies.append(f"blocking {source.device.type} to {to.type} at {where()}")
            elif host is None or not self.gpu.is_pinned(host):
                self.gpu.copies.append(f"unpinned {source.device.type} to {to.type} at {where()}")
        elif kinds == {"cpu", "cuda"}:
            self.gpu.mixed.append(f"{name} at {where()}")

    def _run(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        gpu, schema = self.gpu, func._schema
        stream, call = gpu.stream.number, where()
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        for tensor in outputs:
            if tensor.untyped_storage()._cdata not in known:
                gpu.memory.allocate(tensor, stream, call)
        is_collective = name.startswith("c10d::")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if (is_view and not is_collective) or name.split("::")[1].startswith(("empty", "new_empty", "detach")):
            return
        written = COLLECTIVE_WRITES[name] if is_collective else None
        if is_collective:
            stream = self._start_collective(name, args, tensors)
        gpu.operators[name] += 1
        access = Access(stream, gpu.timeline.launch(stream), name, call)
        for position, argument in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            info = argument.alias_info
            writes = position in written if written is not None else info is not None and info.is_write
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor) and (on_device(tensor) or gpu.is_pinned(tensor)):
                    gpu.memory.use(tensor, access, writes=writes)
        for tensor in outputs:
            if tensor.untyped_storage()._cdata not in known:
                gpu.memory.use(tensor, access, writes=True)
        if is_collective and args[-1 if isinstance(args[-1], bool) else -2] is not True:
            gpu.timeline.wait(gpu.stream.number, gpu.timeline.record(stream))

    def _start_collective(self, name: str, args: Any, tensors: list[Tensor]) -> str:
        """Note the call and return the stream of its group, ordered after the current one."""
        group = next(a for a in tree_leaves(args) if type(a).__name__ in ("ProcessGroup", "ScriptObject"))
        ranks = group_name(group)
        numbers = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
        gpu = self.gpu
        gpu.collectives.append((ranks, name, tensors[0].numel(), str(tensors[0].dtype), numbers[0] if numbers else -1))
        if ranks not in gpu._groups:
            gpu._groups.add(ranks)
            if gpu.capturing:
                gpu.first_used_in_capture.append(f"{ranks} at {where()}")
        stream = f"nccl {ranks}"
        gpu.timeline.wait(stream, gpu.timeline.record(gpu.stream.number))
        return stream


def _scalar_like(tensor: Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return True
    return 0.5 if tensor.dtype.is_floating_point else 0


def group_name(group: Any) -> str:
    from torch import distributed as dist

    process_group = group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
    return process_group.group_name


@contextmanager
def paper_gpu() -> Iterator[PaperGpu]:
    """Replace CUDA by a device on paper, and all new tensors by fake ones."""
    gpu = PaperGpu()

    class Stream(PaperStream):
        def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
            super().__init__(gpu)

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

    def wait_for_work(work: Any, *timeout: Any) -> bool:
        for stream in [name for name in gpu.timeline.clocks if isinstance(name, str)]:
            gpu.timeline.wait(gpu.stream.number, gpu.timeline.record(stream))
        return True

    from torch._C import _distributed_c10d

    replaced: dict[str, Any] = {
        "Stream": Stream,
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
        record = lambda tensor, stream: gpu.memory.record_stream(tensor, stream.number)  # noqa: E731
        stack.enter_context(mock.patch.object(Tensor, "record_stream", record))
        stack.enter_context(mock.patch.object(_distributed_c10d.Work, "wait", wait_for_work))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is a copy that the mode sees
        stack.enter_context(Watch(gpu))
        yield gpu
