"""torch.compile for the forward pass and, through it, for backward.

Alone, the whole forward pass is one graph. With other ranks it is one graph per region of the network, because the
gradients of a graph all arrive at its end: as one graph, no bucket could be on its way while backward is running.
The reducer's hooks stay outside; gradients are accumulated into its buffer as ever.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from podscale.pytorch.models import AlexNet, Inception, Outputs, ResNet

PrepareFunction = Callable[[Tensor], Tensor]
ForwardFunction = Callable[[Tensor], Outputs]
Region = Callable[[Any], Any]
CompileMode = Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def build_forward(
    prepare: PrepareFunction,
    module: nn.Module,
    mode: CompileMode,
    *,
    ranks: int,
    backend: str | Callable[..., Any] = "inductor",
) -> ForwardFunction:
    """What a step calls with a batch's images: `prepare`, then `module` (the network, or its DDP wrapper)."""
    if mode == "off":
        return lambda images: cast(Outputs, module(prepare(images)))
    parts: Sequence[Region] = [module]
    if ranks > 1 and isinstance(module, ResNet | AlexNet | Inception):
        parts = module.regions()
    first, *rest = parts
    dtype = next(module.parameters()).dtype  # a region sees nothing of the network's own hooks

    def begin(images: Tensor) -> Outputs:
        return cast(Outputs, first(prepare(images).to(dtype)))

    chosen: dict[str, Any] = {"mode": mode} if backend == "inductor" else {}
    compiler = cast(Callable[[Region], Region], partial(torch.compile, backend=backend, dynamic=False, **chosen))
    regions = [compiler(region) for region in (begin, *rest)]
    return lambda images: reduce(lambda x, region: region(x), regions, images)


def release_cuda_graphs(mode: CompileMode) -> None:
    """Ends the compiler's own CUDA graphs: NCCL waits at the end of a communicator for graphs with a call on it."""
    if mode in ("reduce-overhead", "max-autotune") and torch.cuda.is_available():
        torch.compiler.reset()
