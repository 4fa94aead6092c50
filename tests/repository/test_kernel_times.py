"""Kernel times of a GPU session (tools/fused_kernel_times.py, tools/gemm_kernel_times.py), in Triton's interpreter."""

import pytest

from tests.support.triton_kernels import interpret


def test_calls_of_fused_kernels_run() -> None:
    """The calls of tools/fused_kernel_times.py, by two choices of tiles, on a stem of few pixels."""
    assert interpret("-c", FUSED_TIMED) == "22 kernels"


FUSED_TIMED = """
from tests.support.triton_interpreter import adapt_interpreter
from tools import fused_kernel_times as times
adapt_interpreter()
times.LAYERS = ((64, 4),)
count = 0
for settings in (times.COMMITTED, times.Settings(2048, 64, 8, 8)):
    settings.apply()
    for name, passes, call in times.layer_kernels(1, 64, 4, device="cpu"):
        call()
        count += 1
print(count, "kernels")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_calls_of_gemm_kernels_run() -> None:
    """The calls of tools/gemm_kernel_times.py, by two choices of tiles, on a block of few pixels."""
    assert interpret("-c", GEMM_TIMED) == "24 calls"


GEMM_TIMED = """
from tests.support.triton_interpreter import adapt_interpreter
from tools import gemm_kernel_times as times
adapt_interpreter()
count = 0
for tiles in (times.COMMITTED, times.Tiles(64, 64, 4, True)):
    tiles.apply()
    for pair in times.block_calls(2, 16, 6, device="cpu"):
        pair.separate()
        pair.kernels()
        count += 2
print(count, "calls")
"""
