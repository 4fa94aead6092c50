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


def count_traffic(stub: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Return the report of `tests.paper_gpu.traffic`, and the sums of bytes and kernels over its graphs."""
    command = [sys.executable, "-m", "tests.paper_gpu.traffic", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **stub}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report | {name: sum(graph[name] for graph in report["graphs"]) for name in ("bytes", "kernels")}


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.timeout(900)
def test_the_compiled_step_stays_within_its_budget(stub: dict[str, str]) -> None:
    report = count_traffic(stub, "resnet50", "408", "224")
    assert (len(report["graphs"]), report["graph_breaks"]) == (2, 0)  # one forward, one backward
    assert 0.95 * BUDGET["gigabytes"] < report["bytes"] / 1e9 <= BUDGET["gigabytes"], report
    assert report["kernels"] <= BUDGET["kernels"], report


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.timeout(900)
def test_planted_faults_of_a_compiled_step_are_found(stub: dict[str, str]) -> None:
    network = ("resnet18", "32", "64")
    clean, broken = count_traffic(stub, *network), count_traffic(stub, *network, "graph_break")
    assert clean["graph_breaks"] == 0
    assert broken["graph_breaks"] > 0
    assert len(broken["graphs"]) > len(clean["graphs"])
    for mutant in ("contiguous", "activations_in_fp32"):
        assert count_traffic(stub, *network, mutant)["bytes"] > 1.02 * clean["bytes"], mutant


OPTIMIZER_KERNELS = ("_norms_kernel", "_momentum_kernel")
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
GIGABYTES = {"norm": (85.9, 138.6), "gemm": (105.1, 114.8)}
"""Those of Triton's kernels, and those together with cuDNN's convolutions, for the same images."""


def kernel_gigabytes(report: dict[str, Any]) -> dict[str, float]:
    """Return the traffic of a step by kernel."""
    assert report["error"] == ""
    return {name: size / 1e9 for name, size in report["kernel_bytes"].items() if name not in OPTIMIZER_KERNELS}


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
    assert report["descriptors"] is descriptors
    sizes = kernel_gigabytes(report)
    print({name: round(size, 1) for name, size in sizes.items()})
    total = sum(sizes.values())
    kernels = total - sum(sizes[name] for name in CONVOLUTIONS)
    for gigabytes, budget in zip((kernels, total), GIGABYTES[option], strict=True):
        assert 0.95 * budget < gigabytes <= budget, sizes


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize(
    ("option", "mutant"),
    [("norm", "moments_twice"), ("norm", "gradient_sums_twice"), ("gemm", "convolutions_twice")],
)
def test_a_kernel_that_runs_twice_is_found(session: Any, option: str, mutant: str) -> None:
    case = {"model": {"name": "resnet50"}, "image_size": 64, "steps": 3, "train": {"fused_kernels": option}}
    clean, broken = kernel_gigabytes(session.run(**case)), kernel_gigabytes(session.run(**case, mutant=mutant))
    assert sum(broken.values()) > 1.02 * sum(clean.values()), (clean, broken)
