"""Bytes of device memory that the operators and Triton kernels of a step read and write, counted from their tensors.

A tensor counts with all its elements for each pass over it. The device's caches and changes of layout inside cuDNN are
not seen, so this is an estimate; NVIDIA's ncu measures. Collectives are not counted, nor calls on other threads than
those of the step.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    "aten::native_batch_norm": {"input": 2},
    "aten::native_batch_norm_backward": {"grad_out": 2, "input": 2},
    "aten::cudnn_batch_norm": {"input": 2},
    "aten::cudnn_batch_norm_backward": {"grad_output": 2, "input": 2},
    "aten::max_pool2d_with_indices_backward": {"self": 0},
    "aten::copy_": {"self": 0},
    "aten::fill_": {"self": 0},
    "aten::zero_": {"self": 0},
    "aten::_foreach_copy_": {"self": 0},
    "aten::_foreach_zero_": {"self": 0},
}
"""Times that an operator reads an argument, if that is not once."""

NOT_COUNTED = ("prim::", "c10d::")
"""Namespaces of operators that are not counted: questions about tensors, and collectives."""

KERNELS: dict[str, dict[str, tuple[int, ...]]] = {
    "podscale.pytorch.optim.fused_momentum": {"_norms_kernel": (), "_momentum_kernel": (0, 2)},
    "podscale.pytorch.batch_norm.fused_kernels": {
        "_moments_kernel": (),
        "_finish_moments_kernel": (4, 5),
        "_normalise_kernel": (),
        "_gradient_sums_kernel": (),
        "_finish_gradient_sums_kernel": (),
        "_input_gradient_kernel": (),
    },
    "podscale.pytorch.batch_norm.fused_pool_kernels": {
        "_pool_kernel": (),
        "_pool_gradient_sums_kernel": (),
        "_pool_input_gradient_kernel": (),
    },
    "podscale.pytorch.batch_norm.gemm_kernels": {
        "_gemm_forward_kernel": (),
        "_gemm_data_gradient_kernel": (),
        "_gemm_merge_kernel": (),
        "_gemm_weight_gradient_kernel": (),
        "_gemm_add_splits_kernel": (),
    },
}
"""Triton kernels of a step by module: positions of the tensors that a kernel reads and then writes."""


def size_in_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements in memory: those of an expanded dimension count once."""
    sides = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return tensor.element_size() * prod(sides)


def bind_arguments(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the schema."""
    return dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs


def written_arguments(schema: Any) -> set[str]:
    """Return the names of the arguments that an operator writes."""
    return {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}


def new_tensors(tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of an operator that share no memory with its arguments `tensors`."""
    known = {tensor.untyped_storage()._cdata for tensor in tensors}
    return [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]


def touches_no_memory(schema: Any) -> bool:
    """Return True if an operator returns a view, or memory that it does not write."""
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return is_view or schema.name.split("::")[1].startswith(("empty", "new_empty", "detach"))


def operator_bytes(
    schema: Any,
    arguments: dict[str, Any],
    written: Collection[str | None],
    allocated: Sequence[Tensor],
    *,
    device: str = "cuda",
) -> int:
    """Return the bytes that an operator reads and writes in the memory of one kind of device.

    Args:
        arguments: of the call, by name.
        written: names of the arguments that it writes.
        allocated: its outputs in new memory.
    """
    reads = READS.get(schema.name, {})
    if schema.name == "aten::convolution_backward":  # the gradient of each argument is a kernel of its own
        reads = {"grad_output": len(allocated)}
    outputs = {argument.name for argument in schema.arguments if argument.is_out}
    total = sum(size_in_bytes(tensor) for tensor in allocated if tensor.device.type == device)
    for argument, value in arguments.items():
        passes = reads.get(argument, argument not in outputs) + (argument in written)
        tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.device.type == device)
        total += passes * sum(map(size_in_bytes, tensors))
    return total


def kernel_tensors(arguments: Sequence[Any]) -> dict[int, Tensor]:
    """Return the tensors of a Triton kernel's arguments by position, also those behind tensor descriptors."""
    bases = (argument if isinstance(argument, Tensor) else getattr(argument, "base", None) for argument in arguments)
    return {n: base for n, base in enumerate(bases) if isinstance(base, Tensor)}


def kernel_bytes(arguments: Sequence[Any], updates: Collection[int]) -> int:
    """Return the bytes that a Triton kernel moves: each tensor once, those at the positions `updates` twice."""
    tensors = kernel_tensors(arguments)
    # An argument that a kernel does not use is another one again.
    distinct = {(tensor.untyped_storage()._cdata, tensor.storage_offset()): tensor for tensor in tensors.values()}
    updated = (tensor for position, tensor in tensors.items() if position in updates)
    return sum(map(size_in_bytes, (*distinct.values(), *updated)))


@contextmanager
def count_traffic(device: str = "cuda") -> Iterator[Counter[str]]:
    """Count the bytes of the operators and Triton kernels that run inside, by name. Nothing inside may be compiled.

    Args:
        device: kind of device whose memory counts.
    """
    sizes: Counter[str] = Counter()
    with ExitStack() as stack:
        for module_name, kernels in KERNELS.items():
            module = _import_kernels(module_name)
            for name, updates in kernels.items() if module is not None else ():
                kernel = getattr(module, name)
                stack.callback(setattr, module, name, kernel)
                setattr(module, name, _CountedKernel(kernel, name, updates, sizes))
        stack.enter_context(_OperatorCounter(sizes, device))
        yield sizes


def _import_kernels(name: str) -> Any:
    """Return a module of kernels; None without Triton, whose kernels cannot run then."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None


class _CountedKernel:
    """Launcher of a Triton kernel that adds up the bytes of its launches."""

    def __init__(self, kernel: Any, name: str, updates: Collection[int], sizes: Counter[str]) -> None:
        self._kernel, self._name, self._updates, self._sizes = kernel, name, updates, sizes

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self._kernel[grid]

        def counted(*arguments: Any, **options: Any) -> Any:
            self._sizes[self._name] += kernel_bytes(arguments, self._updates)
            return launch(*arguments, **options)

        return counted


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class _OperatorCounter(TorchDispatchMode):
    """Mode that adds up the bytes of each operator."""

    def __init__(self, sizes: Counter[str], device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes, self._device = sizes, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        result = func(*args, **kwargs)
        if not schema.name.startswith(NOT_COUNTED) and not touches_no_memory(schema):
            tensors, outputs = _tensors((args, kwargs)), _tensors(result)
            arguments, allocated = bind_arguments(schema, args, kwargs), new_tensors(tensors, outputs)
            size = operator_bytes(schema, arguments, written_arguments(schema), allocated, device=self._device)
            if size:
                self._sizes[schema.name] += size
        return result


def count_compiled_graphs() -> None:
    """Let inductor count the bytes of each graph that it compiles from now on, if the installed torch does.

    Its caches keep the count, so a graph that was compiled with the count has it again.
    """
    from torch._inductor import compile_fx, graph

    log = getattr(compile_fx, "inductor_metrics_log", None)
    if log is None or not hasattr(graph.GraphLowering, "count_bytes"):
        return
    log.setLevel(logging.INFO)  # inductor counts if it logs
    log.addFilter(_drop)
    graph.GraphLowering.count_bytes = _count_graph_bytes  # type: ignore[method-assign, assignment]


def compiled_bytes() -> int:
    """Return the bytes of all graphs since `count_compiled_graphs`; 0 if torch did not count."""
    from torch._inductor import metrics

    return int(getattr(metrics, "num_bytes_accessed", 0))


def _drop(record: logging.LogRecord) -> bool:
    return False


def _count_graph_bytes(lowering: Any) -> tuple[int, list[Any], list[Any]]:
    """Return the bytes of a graph without the estimates of time that inductor adds, which ask nvidia-smi."""
    try:
        return sum(node.get_read_write_buffers_sizes() for node in lowering.scheduler.nodes), [], []
    except Exception:  # a graph without a count must still compile
        return 0, [], []
