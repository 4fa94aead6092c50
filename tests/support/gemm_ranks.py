"""1x1 convolutions with batch norm over two ranks of 2 and 3 images, beside float64 of all five images.

`python -m tests.support.gemm_ranks` starts the ranks in Triton's interpreter and prints the largest relative error by
kind as JSON.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from podscale.pytorch.batch_norm import BatchNorm
from tests.support.fused_norm_oracle import relative_error
from tests.support.gemm_oracle import HALF_KINDS, Shape, draw_case, prepare_interpreter

SIZES = (2, 3)
SHAPE = Shape(sum(SIZES), 16, 32, 6, 7)


def gradients(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the gradients of outputs of all images."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SHAPE.images, *y.shape[1:], generator=generator) for y in outputs]


def run_rank(rank: int, folder: Path) -> None:
    """Save the results of each kind to `folder`."""
    prepare_interpreter()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    for kind in HALF_KINDS:
        case, _, images = draw_case(kind, SHAPE, torch.float32)
        for module in case.modules():
            if isinstance(module, BatchNorm):
                module.group = dist.group.WORLD
        inputs = [
            image.split(SIZES)[rank].contiguous(memory_format=torch.channels_last).requires_grad_() for image in images
        ]
        outputs = case(*inputs)
        torch.autograd.backward(outputs, [gradient.split(SIZES)[rank] for gradient in gradients(outputs)])
        by_image = [*(y.detach() for y in outputs), *(image.grad for image in inputs if image.grad is not None)]
        summed = [p.grad for p in case.parameters() if p.grad is not None]
        torch.save((by_image, summed, list(case.buffers())), folder / f"{kind}.{rank}")
    dist.destroy_process_group()


def largest_error(kind: str, folder: Path) -> float:
    _, oracle, images = draw_case(kind, SHAPE, torch.float32)
    inputs = [image.double().requires_grad_() for image in images]
    outputs = oracle.separate(*inputs)
    torch.autograd.backward(outputs, [gradient.double() for gradient in gradients(outputs)])
    by_image = [*(y.detach() for y in outputs), *(image.grad for image in inputs if image.grad is not None)]
    summed = [p.grad for p in oracle.parameters() if p.grad is not None]
    first, second = (torch.load(folder / f"{kind}.{rank}") for rank in range(2))
    pairs = [
        *((torch.cat(pair), whole) for *pair, whole in zip(first[0], second[0], by_image, strict=True)),
        *((a + b, whole) for a, b, whole in zip(first[1], second[1], summed, strict=True)),
        *zip(first[2], oracle.buffers(), strict=True),
        *zip(second[2], oracle.buffers(), strict=True),
    ]
    return max(relative_error(found, expected) for found, expected in pairs)


def main() -> None:
    if len(sys.argv) > 1:
        run_rank(int(sys.argv[1]), Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.support.gemm_ranks"]
        ranks = [subprocess.Popen([*command, str(rank), folder]) for rank in range(2)]
        assert [rank.wait(200) for rank in ranks] == [0, 0]
        print(json.dumps({kind: largest_error(kind, Path(folder)) for kind in HALF_KINDS}))


if __name__ == "__main__":
    main()
