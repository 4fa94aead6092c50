"""CUDA graphs on paper: a recorded step, whose replay is one operation that touches all memory of the step.

Inside the recording, streams are checked as in an ordinary step. Every stream that works there must have been waited
for at its end, else CUDA refuses the graph.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tests.paper_gpu.device import PaperGpu, PaperStream, where
from tests.paper_gpu.timeline import Access, Touch

LAUNCH = "a graph's launch"


def paper_graphs(gpu: PaperGpu) -> dict[str, Any]:
    """Return what replaces the functions of `torch.cuda` that record and replay graphs."""

    class Graph(PaperGraph):
        pass

    Graph.gpu = gpu
    return {
        "CUDAGraph": Graph,
        "graph": _recorder(gpu),
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda device=None: 0),
        "reset_peak_memory_stats": lambda device=None: None,
    }


class PaperGraph:
    """Recorded step, in place of `torch.cuda.CUDAGraph`."""

    gpu: PaperGpu

    def __init__(self) -> None:
        self.touches: list[Touch] = []

    def replay(self) -> None:
        gpu, stream = self.gpu, self.gpu.stream.number
        gpu.operators[LAUNCH] += 1
        gpu.memory.repeat(self.touches, Access(stream, gpu.timeline.launch(stream), LAUNCH, where()))

    def reset(self) -> None:
        self.touches = []


def _recorder(gpu: PaperGpu) -> Callable[..., AbstractContextManager[None]]:
    @contextmanager
    def record(graph: PaperGraph, *, stream: PaperStream, capture_error_mode: str) -> Iterator[None]:
        timeline = gpu.timeline
        timeline.wait_for_all()  # torch does
        before = timeline.launches()
        gpu.capturing, gpu.memory.recorded = True, graph.touches
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            yield
        gpu.capturing, gpu.memory.recorded = False, None
        for other, number in timeline.launches().items():
            if number > before.get(other, 0) and not timeline.is_over(number, other, before=stream.number):
                gpu.memory.races.append(f"a graph ends before its stream {other}: {where()}")
        timeline.wait_for_all()  # nothing of it ran

    return record
