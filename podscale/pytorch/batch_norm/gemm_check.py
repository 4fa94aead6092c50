"""Check of the kernels of 1x1 convolutions on the device at hand, and the choice of how they load their tiles.

Before a training uses the kernels, two blocks are computed by them and by separate operations. From compute capability
9 on, tiles are loaded by tensor descriptors instead of pointers where that gives the same bits in less time. So the
choice changes no result, and may differ between ranks and after a restart.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podscale.pytorch.batch_norm import gemm, gemm_calls
from podscale.pytorch.batch_norm.layer import BatchNorm
from podscale.pytorch.timing import median_seconds
from podscale.util.kernel_errors import kernel_errors

log = logging.getLogger(__name__)

NEEDED_CAPABILITY = (9, 0)
"""First compute capability with the tensor memory accelerator."""
load_facts: dict[str, str] = {}
"""Facts of the last choice of loads, for the event log: the choice, and microseconds of two blocks by each way."""
WARMUPS, REPEATS = 2, 10

RunBlocks = Callable[["Blocks"], tuple[Tensor, Tensor]]
"""Function that returns the outputs of both blocks."""


class BlockShape(NamedTuple):
    """Images of two blocks: their number, sides, and channels of a block's output and inside it."""

    images: int
    height: int
    width: int
    outer: int
    inner: int


SMALL = BlockShape(3, 10, 9, 64, 32)
"""Images whose rows fill no tile."""
LARGE = BlockShape(64, 56, 56, 256, 64)
"""First stage of ResNet-50, which has full tiles. A tensor of 256 channels has 100 MB, more than a GPU's caches."""


class Blocks:
    """Two blocks with their images, and the gradients of their outputs, drawn from one seed, in bf16."""

    def __init__(self, shape: BlockShape, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device)

        def draw_images(channels: int, stride: int = 1) -> Tensor:
            sides = (-(-side // stride) for side in (shape.height, shape.width))
            return draw(shape.images, channels, *sides).bfloat16().contiguous(memory_format=torch.channels_last)

        outer, inner = shape.outer, shape.inner
        self.x, self.shortcut = (draw_images(outer).requires_grad_() for _ in range(2))
        self.convs = []
        for channels, width, stride in ((outer, inner, 1), (inner, outer, 1), (outer, inner, 1), (outer, inner, 2)):
            conv = nn.Conv2d(channels, width, 1, stride, bias=False, device="meta")  # its values are drawn here
            conv.weight = nn.Parameter(draw(width, channels, 1, 1) / channels**0.5)
            self.convs.append(conv)
        self.norms = [BatchNorm(channels).to(device) for channels in (inner, outer)]
        for norm in self.norms:
            norm.bias.data.copy_(draw(len(norm.bias)))
        self._gradients = [draw_images(inner), draw_images(inner, stride=2)]
        parameters = [parameter for norm in self.norms for parameter in (norm.weight, norm.bias)]
        self._leaves = [self.x, self.shortcut, *(conv.weight for conv in self.convs), *parameters]

    def results(self, run: RunBlocks) -> list[Tensor]:
        """Return outputs, and gradients of the images, weights, scales and shifts."""
        outputs = run(self)
        gradients = torch.autograd.grad(
            outputs, self._leaves, [g.to(y.dtype) for y, g in zip(outputs, self._gradients, strict=True)]
        )
        return [*(y.detach() for y in outputs), *gradients]


def run_kernels(blocks: Blocks) -> tuple[Tensor, Tensor]:
    convs, norms = blocks.convs, blocks.norms
    y, moments = gemm.norm_relu_convolve(norms[0], convs[1], *gemm.convolve(convs[0], blocks.x))
    (y, _), (projected, _) = gemm.sum_convolve_twice(norms[1], y, blocks.shortcut, convs[2], convs[3], moments)
    return y, projected


def run_separately(blocks: Blocks) -> tuple[Tensor, Tensor]:
    def normalise(norm: BatchNorm, y: Tensor) -> Tensor:
        return F.batch_norm(y, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)

    weights = [conv.weight for conv in blocks.convs]
    y = F.conv2d(F.relu(normalise(blocks.norms[0], F.conv2d(blocks.x.float(), weights[0]))), weights[1])
    y = F.relu(normalise(blocks.norms[1], y) + blocks.shortcut)
    return F.conv2d(y, weights[2]), F.conv2d(y, weights[3], stride=blocks.convs[3].stride)


def largest_error(device: torch.device, shapes: Sequence[BlockShape] = (SMALL, LARGE)) -> float:
    """Return the kernels' largest relative error, of outputs and gradients of two blocks in bf16; NaN if one is NaN."""
    errors = []
    for shape in shapes:
        blocks = Blocks(shape, device)
        ours, separate = blocks.results(run_kernels), blocks.results(run_separately)
        errors += [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(ours, separate, strict=True)]
    return float(torch.stack(errors).max())


def choose_loads(device: torch.device) -> None:
    """Let the kernels use tensor descriptors if the device has them, and they give the same bits in less time."""
    gemm_calls.use_descriptors = False
    load_facts.clear()
    load_facts["loads"] = "pointers"
    if not has_descriptors(device):
        return
    try:
        differ, pointer_seconds, seconds = compare_loads(device)
    except kernel_errors() as error:
        log.warning(f"1x1 convolutions load by pointers: tensor descriptors do not run here: {error}")
        load_facts["problem"] = f"tensor descriptors do not run here: {error}"
        return
    gemm_calls.use_descriptors = not differ and seconds < pointer_seconds
    chosen = "tensor descriptors" if gemm_calls.use_descriptors else "pointers"
    load_facts.update(
        loads=chosen,
        pointers_us=f"{1e6 * pointer_seconds:.0f}",
        descriptors_us=f"{1e6 * seconds:.0f}",
        bits="other" if differ else "same",
    )
    times = f"{1e6 * pointer_seconds:.0f} us by pointers, {1e6 * seconds:.0f} us by tensor descriptors"
    bits = ", which give other bits" if differ else ""
    log.info(f"1x1 convolutions load by {chosen}: two blocks take {times}{bits}")


def has_descriptors(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= NEEDED_CAPABILITY


class LoadComparison(NamedTuple):
    """True if any result has other bits by tensor descriptors, and the seconds of a pass by pointers and by them."""

    differ: bool
    pointer_seconds: float
    descriptor_seconds: float


def compare_loads(device: torch.device) -> LoadComparison:
    """Compute and time the blocks by pointers and by tensor descriptors, and leave pointers in use."""
    blocks = [Blocks(shape, device) for shape in (SMALL, LARGE)]
    results, seconds = [], []
    try:
        for by_descriptors in (False, True):
            gemm_calls.use_descriptors = by_descriptors
            results.append([tensor for each in blocks for tensor in each.results(run_kernels)])
            run = partial(blocks[-1].results, run_kernels)
            seconds.append(median_seconds(run, device, warmups=WARMUPS, repeats=REPEATS))
    finally:
        gemm_calls.use_descriptors = False
    return LoadComparison(not all(map(torch.equal, *results)), *seconds)
