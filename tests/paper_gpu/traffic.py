"""Bytes and kernels of a compiled training step on an H100 that is not there, by inductor's own lowering.

`python -m tests.paper_gpu.traffic MODEL IMAGES SIZE [MUTANT]` prints JSON; a mutant is one of `mutants.MUTANTS`. Every
graph that torch.compile finds is lowered and scheduled for sm_90. Its reads and writes are counted as inductor counts
them. No kernel is compiled.
"""

import json
import os
import sys
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import fuse_attention
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import hints
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from podscale.config import InputSection, ModelSection
from podscale.pytorch.device_prefetcher import Normalise
from podscale.pytorch.models import build_model
from podscale.pytorch.train_step import smoothed_cross_entropy
from tests.paper_gpu.device import PaperGpu
from tests.paper_gpu.mutants import MUTANTS
from tests.paper_gpu.training import move_module

H100 = {
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "shared_memory_per_block_optin": 232448,
    "total_memory": 80 << 30,
    "L2_cache_size": 50 << 20,
    "name": "NVIDIA H100",
    "gcnArchName": "",
}


class Count:
    """Bytes and kernels of every graph."""

    def __init__(self) -> None:
        self.graphs: list[dict[str, Any]] = []

    def lower(self, graph_module: Any, inputs: Any, **options: Any) -> Any:
        """Lower and schedule one graph in place of compiling it."""
        fake_mode = compile_fx.fake_tensor_prop(graph_module, inputs)
        with V.set_fake_mode(fake_mode):
            compile_fx._recursive_post_grad_passes(graph_module, False)
        compile_fx.record_original_output_strides(graph_module)
        graph = GraphLowering(graph_module, shape_env=compile_fx.shape_env_from_inputs(inputs), is_inference=False)
        with (
            V.set_debug_handler(DebugContext()),
            V.set_graph_handler(graph),
            V.set_real_inputs(inputs),
            V.set_fake_mode(fake_mode),
        ):
            graph.run(*inputs)
            graph.init_wrapper_code()
            graph._update_scheduler()
            total, _, _ = graph.count_bytes()
            parts: Counter[str] = Counter()
            for node in graph.scheduler.nodes:
                is_library = type(node).__name__ == "ExternKernelSchedulerNode"
                kind = "library" if is_library else "reduction" if node.is_reduction() else "pointwise"
                parts[kind] += node.get_read_write_buffers_sizes()
        self.graphs.append({"bytes": total, "kernels": len(graph.scheduler.nodes), "parts": parts})
        from functorch.compile import make_boxed_func

        return make_boxed_func(graph_module.forward)


def paper_h100(stack: ExitStack) -> None:
    """Let inductor and Triton believe that an H100 is there."""
    import triton
    from triton.backends.compiler import GPUTarget

    driver = mock.MagicMock()
    driver.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    driver.get_current_device.return_value = 0
    triton.runtime.driver.set_active(driver)
    properties = SimpleNamespace(**H100)
    chosen = {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *options, **more: True,
    }
    for name, value in chosen.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, value))
    device = hints.DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=90,
        major=9,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
    )
    stack.enter_context(mock.patch.object(fuse_attention, "_sfdp_init"))  # it runs operators
    create = classmethod(lambda cls, device_of=None: device)
    stack.enter_context(mock.patch.object(hints.DeviceProperties, "create", create))


def measure(name: str, images: int, size: int) -> dict[str, Any]:
    """Return bytes and kernels of forward and backward in bf16, channels_last."""
    count = Count()
    with ExitStack() as stack:
        paper_h100(stack)
        stack.enter_context(inductor_config.patch(joint_graph_constant_folding=False))  # it computes on the device
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        torch._C._set_only_lift_cpu_tensors(True)
        device = torch.device("cuda", 0)
        model = move_module(build_model(ModelSection(name=name), 1000), device, torch.channels_last).train()
        world: Any = SimpleNamespace(device=device, on_gpu=True)
        normalise = Normalise(InputSection(), world, channels_last=True)
        pixels = torch.empty(images, size, size, 3, dtype=torch.uint8, device=device)
        labels = torch.empty(images, dtype=torch.int64, device=device)

        def backend(graph_module: Any, inputs: Any) -> Any:
            return compile_fx.compile_fx(graph_module, inputs, inner_compile=count.lower)

        forward = torch.compile(lambda batch: model(normalise(batch)), backend=backend, dynamic=False)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = forward(pixels)
        smoothed_cross_entropy(logits, labels, 0.1).backward()
    graph_breaks = sum(counters["graph_break"].values())
    return {"graphs": count.graphs, "graph_breaks": graph_breaks}


def main() -> None:
    name, images, size, *mutants = sys.argv[1:]
    with ExitStack() as stack:
        for mutant in mutants:
            stack.enter_context(MUTANTS[mutant](PaperGpu()))
        print(json.dumps(measure(name, int(images), int(size))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
