"""torch.compile for the forward pass and, through it, for backward.

Alone, the whole forward pass is one graph. With other ranks it is one graph per region of the network, because the
gradients of a graph all arrive at its end: as one graph, no bucket could be on its way while backward is running.
The reducer's hooks stay outside; gradients are accumulated into its buffer as ever.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from podscale.pytorch.models import AlexNet, ResNet

Forward = Callable[[Tensor], Tensor]
CompileMode = Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def build_forward(
    prepare: Forward,
    module: nn.Module,
    mode: CompileMode,
    *,
    ranks: int,
    backend: str | Callable[..., Any] = "inductor",
) -> Forward:
    """What a step calls with a batch's images: `prepare`, then `module` (the network, or its DDP wrapper)."""
    regions: Sequence[Forward] = module.regions() if ranks > 1 and isinstance(module, ResNet | AlexNet) else [module]
    first, *rest = regions
    regions = [lambda images: first(prepare(images)), *rest]
    if mode != "off":
        chosen: dict[str, Any] = {"mode": mode} if backend == "inductor" else {}
        regions = [torch.compile(region, backend=backend, dynamic=False, **chosen) for region in regions]
    return lambda images: reduce(lambda x, region: region(x), regions, images)
