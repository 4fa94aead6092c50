"""Bytes of a step: operators and kernels by hand, and inductor's own count."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from podscale.pytorch import memory_traffic
from podscale.pytorch.memory_traffic import count_traffic, kernel_bytes

IMAGES, WEIGHTS = 4 * 2 * 3 * 10 * 10, 4 * 8 * 3 * 3 * 3
"""Bytes of 2 images of 3 channels, and of the weights of a convolution to 8."""
OUT = 4 * 2 * 8 * 8 * 8
"""Bytes of its output."""


def counted(function: Any, *tensors: Tensor, device: str = "cpu") -> dict[str, int]:
    with count_traffic(device) as sizes:
        function(*tensors)
    return dict(sizes)


def test_a_convolution_reads_its_arguments_and_the_gradient_of_its_output_for_each_gradient() -> None:
    x, w = torch.ones(2, 3, 10, 10, requires_grad=True), torch.ones(8, 3, 3, 3, requires_grad=True)
    g = torch.ones(2, 8, 8, 8)
    sizes = counted(lambda: torch.autograd.backward(F.conv2d(x, w), g))
    assert sizes["aten::convolution"] == IMAGES + WEIGHTS + OUT
    assert sizes["aten::convolution_backward"] == 2 * OUT + 2 * (IMAGES + WEIGHTS)
    fixed = counted(lambda: torch.autograd.backward(F.conv2d(x.detach(), w), g))
    assert fixed["aten::convolution_backward"] == OUT + IMAGES + 2 * WEIGHTS


@pytest.mark.parametrize(
    ("name", "function", "floats"),
    [
        ("native_batch_norm", lambda x: F.batch_norm(x, None, None, training=True), 3 * 24 + 2 * 3),
        ("add", lambda x: x + x, 3 * 24),
        ("add_", lambda x: x.add_(1), 2 * 24),
        ("copy_", lambda x: torch.empty(2, 3, 4).copy_(x.view(2, 3, 4)), 2 * 24),
        ("zero_", lambda x: x.zero_(), 24),
        ("sum", lambda x: x[:1].sum(), 12 + 1),
        ("mul", lambda x: x * torch.ones(()).expand(2, 3, 4, 1), 2 * 24 + 1),
        ("_foreach_mul_", lambda x: torch._foreach_mul_([x, x.clone()], 2.0), 4 * 24),
    ],
)
def test_bytes_of_an_operator(name: str, function: Any, floats: int) -> None:
    """Twice what batch norm reads; no read of what is only written; an expanded tensor has its own elements."""
    sizes = counted(function, torch.ones(2, 3, 4, 1))
    assert sizes[f"aten::{name}"] == 4 * floats


def test_views_and_other_devices_have_no_bytes() -> None:
    x = torch.ones(4, 4)
    assert counted(lambda: x.view(16).t().expand(2, 16)) == {}
    assert counted(lambda: torch.empty(3, 3)) == {}
    assert counted(lambda: x + x, device="cuda") == {}


def test_bytes_of_a_kernel() -> None:
    """Each tensor once, also behind a descriptor; twice if it is updated; the same tensor again does not count."""
    x, y = torch.ones(10), torch.ones(5)
    assert kernel_bytes((x, SimpleNamespace(base=y), 3, x, None), ()) == 60
    assert kernel_bytes((x, SimpleNamespace(base=y), 3), (1,)) == 80


def test_kernels_are_counted_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    kernel = {(7,): lambda *arguments, **options: launches.append((arguments, options))}
    module = SimpleNamespace(_moments_kernel=kernel)
    monkeypatch.setattr(memory_traffic, "KERNELS", {"a.module": {"_moments_kernel": (0,)}})
    monkeypatch.setattr(memory_traffic, "import_module", {"a.module": module}.__getitem__)
    x = torch.ones(10)
    sizes = counted(lambda: module._moments_kernel[(7,)](x, 2, num_warps=4))
    assert sizes == {"_moments_kernel": 80}
    assert launches == [((x, 2), {"num_warps": 4})]
    assert module._moments_kernel is kernel


def test_every_kernel_of_the_table_exists() -> None:
    with count_traffic("cpu"):
        pass


COMPILED = """
import sys, torch
from podscale.pytorch.memory_traffic import compiled_bytes, count_compiled_graphs
count_compiled_graphs()
function = torch.compile(lambda x: (x * 2 + 1).relu())
x = torch.ones(1000, requires_grad=True)
function(x).sum().backward()
print(compiled_bytes())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_inductor_counts_what_it_compiles_and_what_its_cache_has(tmp_path: Path) -> None:
    """Forward reads x, writes the output and its mask of one byte; backward reads a number and the mask."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Graph Metrics" not in done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert 4 * 2 * 1000 <= found[0] <= 4 * 5 * 1000
