"""Deterministic training: no operator of a step is one that torch refuses on a GPU, by the code of its library."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

KERNELS = {  # (pattern of the function that runs a backward pass, whether it refuses deterministic mode)
    "aten::avg_pool2d_backward": (r"structured_avg_pool2d_backward_out_cuda4impl", False),
    "aten::max_pool2d_with_indices_backward": (r"structured_max_pool2d_with_indices_backward_out_cuda4impl", False),
    "aten::_adaptive_avg_pool2d_backward": (r"33adaptive_avg_pool2d_backward_cuda", True),
}
POOLS = re.compile(r"aten::_?\w*(pool|upsample|_pad)\w*_backward")


@pytest.fixture(scope="module")
def library() -> Path:
    import torch

    path = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if not path.exists():
        pytest.skip("needs a CUDA build of torch")
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump (binutils)")
    return path


def test_pooling_is_deterministic_but_for_the_adaptive_kind(library: Path) -> None:
    """The last case shows that the call is found."""
    listed = subprocess.run(["nm", "-D", "-S", "--defined-only", library], capture_output=True, text=True, check=True)
    for operator, (pattern, refuses) in KERNELS.items():
        (symbol,) = [line.split() for line in listed.stdout.splitlines() if re.search(pattern, line)]
        start, size = int(symbol[0], 16), int(symbol[1], 16)
        bounds = [f"--start-address={start}", f"--stop-address={start + size}"]
        code = subprocess.run(["objdump", "-d", *bounds, library], capture_output=True, text=True, check=True).stdout
        assert ("alertNotDeterministic" in code) == refuses, operator


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize(("model", "size"), [("alexnet", 224), ("resnet18", 64), ("inception_resnet_v2", 139)], ids=str)
def test_the_networks_pool_in_these_ways(session: Any, model: str, size: int) -> None:
    case = {"model": {"name": model, "stem": "imagenet", "width": 64}, "image_size": size}
    report = session.run(**case, steps=1, train={"deterministic": True, "schedule": {"learning_rate": 0.01}})
    assert report["error"] == ""
    used = set(filter(POOLS.fullmatch, report["counts"]))
    assert used <= {operator for operator, (_, refuses) in KERNELS.items() if not refuses}
