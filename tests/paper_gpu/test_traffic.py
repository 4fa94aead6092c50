"""Memory traffic of a step of ResNet-50: compiled, by inductor's own count for an H100, and of the fused kernels."""

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.paper_gpu.stub import ROOT

SMALL = ("resnet18", "32", "64")
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


@pytest.fixture(scope="module")
def small_network(stub: dict[str, str]) -> dict[str, Any]:
    """Traffic of a small compiled network without a fault."""
    return count_traffic(stub, *SMALL)


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.timeout(900)
def test_a_graph_break_is_found(stub: dict[str, str], small_network: dict[str, Any]) -> None:
    broken = count_traffic(stub, *SMALL, "graph_break")
    assert small_network["graph_breaks"] == 0
    assert broken["graph_breaks"] > 0
    assert len(broken["graphs"]) > len(small_network["graphs"])


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", ["contiguous", "activations_in_fp32"])
def test_more_bytes_of_a_compiled_step_are_found(
    stub: dict[str, str], small_network: dict[str, Any], mutant: str
) -> None:
    assert count_traffic(stub, *SMALL, mutant)["bytes"] > 1.02 * small_network["bytes"]


RESNET = {"model": {"name": "resnet50", "stem": "imagenet", "width": 64}, "image_size": 224, "steps": 1}
GIGABYTES = {"off": 197.2, "norm": 141.5, "gemm": 117.6}
"""Bytes of forward and backward by `train.fused_kernels`, of all operators and kernels, for the same images."""
SAVED = {"moments": 7.35, "sums": 12.83, "activation": 3.33, "block sum": 15.88}
"""Gigabytes of these that parts of the kernels of 1x1 convolutions save, each alone."""


def gigabytes(report: dict[str, Any], phase: str = "forward_backward") -> dict[str, float]:
    """Return the traffic of a phase of the step by operator or kernel."""
    assert report["error"] == ""
    return {name: size / 1e9 for name, size in report["bytes"][phase].items()}


def check_profile(report: dict[str, Any]) -> None:
    """Check the count of `podscale bench train --profile`: all operators and kernels of the step, no collectives."""
    everything: Counter[str] = Counter()
    for sizes in report["bytes"].values():
        everything.update(sizes)
    moved = {name: size for name, size in everything.items() if size and not name.startswith("c10d::")}
    assert report["counted"] == moved, report["error"]


def count_step(session: Any, option: str, *, descriptors: bool = False, **case: Any) -> dict[str, float]:
    """Return the traffic of forward and backward of 408 images, and check how the kernels load their tiles."""
    train = {"global_batch": 408, "fused_kernels": option}
    report = session.run(**RESNET, **case, descriptors=descriptors, counts=True, train=train)
    assert report["descriptors"] is descriptors
    check_profile(report)
    return gigabytes(report)


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("option", "descriptors"), [("off", False), ("norm", False), ("gemm", False), ("gemm", True)])
def test_the_fused_kernels_stay_within_their_budget(session: Any, option: str, descriptors: bool) -> None:
    sizes = count_step(session, option, descriptors=descriptors)
    print({name: round(size, 1) for name, size in sizes.items()})
    assert ("_gemm_forward_kernel" in sizes) is (option == "gemm")
    assert 0.995 * GIGABYTES[option] < sum(sizes.values()) <= GIGABYTES[option], sizes


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("part", "saved"), SAVED.items())
def test_each_part_of_a_kernel_saves_its_bytes(session: Any, part: str, saved: float) -> None:
    """Moments in the convolution; sums in its data gradient; activation, and a block's sum, of its input."""
    without, fused = count_step(session, "gemm", without=part), count_step(session, "gemm")
    assert sum(without.values()) - sum(fused.values()) == pytest.approx(saved, abs=0.05), without


def test_a_profile_counts_the_same_bytes(session: Any) -> None:
    report = session.run(steps=1, counts=True, train={"global_batch": 2})
    check_profile(report)
    assert report["counted"]["_momentum_kernel"] > 0


@pytest.mark.usefixtures("whole_matrix")
def test_the_kernels_of_momentum_move_28_bytes_a_weight(session: Any) -> None:
    """Weights and gradients for their norms; then weights, gradients and momentum, of which two are written."""
    case = {"model": {"name": "resnet50"}, "steps": 1, "train": {"optimizer": {"name": "lars"}}}
    report = session.run(**case)
    sizes = gigabytes(report, "optimizer")
    kernels = sizes["_norms_kernel"] + sizes["_momentum_kernel"]
    assert 28.0 <= kernels * 1e9 / report["parameters"] < 28.3
    lists = sum(gigabytes(session.run(**case, without="momentum"), "optimizer").values())
    assert lists > sum(sizes.values()) + 0.5 * kernels, (sizes, lists)


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize(
    ("option", "mutant"),
    [("norm", "moments_twice"), ("norm", "gradient_sums_twice"), ("gemm", "convolutions_twice")],
)
def test_a_kernel_that_runs_twice_is_found(session: Any, option: str, mutant: str) -> None:
    case = {"model": {"name": "resnet50"}, "image_size": 64, "steps": 3, "train": {"fused_kernels": option}}
    clean, broken = gigabytes(session.run(**case)), gigabytes(session.run(**case, mutant=mutant))
    assert sum(broken.values()) > 1.02 * sum(clean.values()), (clean, broken)
