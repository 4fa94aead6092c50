"""Fused batch norm over two ranks of 2 and 3 images, in Triton's interpreter, beside float64 of all five images.

`python -m tests.support.fused_norm_ranks` starts the ranks and prints the largest relative error by kind as JSON.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist

from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.batch_norm.activations import split_fork
from tests.support.fused_norm_oracle import KINDS, exact_output, relative_error
from tests.support.triton_interpreter import adapt_interpreter

CHANNELS, SIZES, MOMENTUM = 16, (2, 3), 0.3


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(seed: int) -> Tensor:
    return draw(seed, sum(SIZES), CHANNELS, 6, 8) * 1.5 + 1.0


def run_rank(rank: int, folder: Path) -> None:
    """Save the results of each kind to `folder`."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    for kind, function in KINDS.items():
        norm = BatchNorm(CHANNELS, momentum=MOMENTUM)
        norm.is_fused, norm.group = True, dist.group.WORLD
        x, shortcut = (
            images(seed).split(SIZES)[rank].contiguous(memory_format=torch.channels_last).requires_grad_()
            for seed in (1, 2)
        )
        assert norm.runs_fused(x)
        y = split_fork(function(norm, x, shortcut)).branch
        y.backward(draw(3, sum(SIZES), *y.shape[1:]).split(SIZES)[rank])
        assert x.grad is not None
        results = (y.detach(), x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var)
        torch.save(results, folder / f"{kind}.{rank}")
    dist.destroy_process_group()


def largest_error(kind: str, folder: Path) -> float:
    oracle = nn.BatchNorm2d(CHANNELS, momentum=MOMENTUM).double()
    x = images(1).double().requires_grad_()
    y = exact_output(kind, oracle, x, images(2).double())
    y.backward(draw(3, *y.shape).double())
    assert x.grad is not None
    assert oracle.weight.grad is not None
    assert oracle.bias.grad is not None
    ranks = [torch.load(folder / f"{kind}.{rank}") for rank in range(2)]
    pairs = [
        (torch.cat([rank[0] for rank in ranks]), y.detach()),
        (torch.cat([rank[1] for rank in ranks]), x.grad),
        (ranks[0][2] + ranks[1][2], oracle.weight.grad),
        (ranks[0][3] + ranks[1][3], oracle.bias.grad),
        *((rank[4], oracle.running_mean) for rank in ranks),
        *((rank[5], oracle.running_var) for rank in ranks),
    ]
    return max(relative_error(found, expected) for found, expected in pairs)


def main() -> None:
    adapt_interpreter()
    if len(sys.argv) > 1:
        run_rank(int(sys.argv[1]), Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.support.fused_norm_ranks"]
        ranks = [subprocess.Popen([*command, str(rank), folder]) for rank in range(2)]
        assert [rank.wait(100) for rank in ranks] == [0, 0]
        print(json.dumps({kind: largest_error(kind, Path(folder)) for kind in KINDS}))


if __name__ == "__main__":
    main()
