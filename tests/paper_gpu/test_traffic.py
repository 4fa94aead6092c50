"""Memory traffic of a step of ResNet-50: compiled, by inductor's own count for an H100, and of the fused kernels."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.paper_gpu.stub import ROOT

BUDGET = {"gigabytes": 154.7, "kernels": 746}
"""Forward and backward of 408 images of 224 px in bf16, channels_last: PyTorch 2.15.0 counts 154.65 and 746."""


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.timeout(900)
def test_the_compiled_step_stays_within_its_budget(stub: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tests.paper_gpu.traffic", "resnet50", "408", "224"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **stub}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    forward, backward = report["graphs"]  # one graph each: no graph break
    assert report["graph_breaks"] == 0
    gigabytes = (forward["bytes"] + backward["bytes"]) / 1e9
    assert 0.95 * BUDGET["gigabytes"] < gigabytes <= BUDGET["gigabytes"], report
    assert forward["kernels"] + backward["kernels"] <= BUDGET["kernels"], report


OPTIMIZER_KERNELS = ("_norms_kernel", "_momentum_kernel")
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
GIGABYTES = {"norm": (85.9, 138.6), "gemm": (105.1, 114.8)}
"""Those of Triton's kernels, and those together with cuDNN's convolutions, for the same images."""


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("option", "descriptors"), [("norm", False), ("gemm", False), ("gemm", True)])
def test_the_fused_kernels_stay_within_their_budget(session: Any, option: str, descriptors: bool) -> None:
    report = session.run(
        model={"name": "resnet50", "stem": "imagenet", "width": 64},
        image_size=224,
        steps=3,
        descriptors=descriptors,
        train={"global_batch": 408, "fused_kernels": option},
    )
    assert report["error"] == ""
    assert report["descriptors"] is descriptors
    sizes = {name: size / 1e9 for name, size in report["kernel_bytes"].items() if name not in OPTIMIZER_KERNELS}
    print({name: round(size, 1) for name, size in sizes.items()})
    total = sum(sizes.values())
    kernels = total - sum(sizes[name] for name in CONVOLUTIONS)
    for gigabytes, budget in zip((kernels, total), GIGABYTES[option], strict=True):
        assert 0.95 * budget < gigabytes <= budget, sizes
