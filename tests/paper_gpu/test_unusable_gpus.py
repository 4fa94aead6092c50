"""GPUs that a job cannot use, with the real torch.cuda on the stub: one message or a stated behaviour for each."""

from typing import Any

import pytest

OLD_DRIVER = {"PAPER_DRIVER": "12080"}
VOLTA, TURING = {"PAPER_GPU_CAPABILITY": "70"}, {"PAPER_GPU_CAPABILITY": "75"}
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
MIXED = {"PAPER_GPUS": "3", "PAPER_GPU_NAME": f"{H100},{H200}"}
ONE_SLICE, TWO_SLICES = ({"CUDA_VISIBLE_DEVICES": names} for names in ("MIG-0-1", "MIG-0-1,MIG-0-2"))


@pytest.mark.parametrize(
    ("variables", "precision", "ranks", "expected"),
    [
        ({"PAPER_GPUS": "2"}, "bf16", 2, {"devices": ["cuda:0", "cuda:1"]}),
        (TURING, "fp16", 1, {"devices": ["cuda:0"]}),
        (TURING, "bf16", 1, {"refused": "train.precision"}),
        (VOLTA, "fp16", 1, {"refused": "CUDA_VISIBLE_DEVICES"}),
        (OLD_DRIVER, "fp32", 1, {"refused": "CUDA_VISIBLE_DEVICES"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, "fp32", 2, {"devices": ["cpu", "cpu"]}),
        ({"PAPER_GPUS": "1"}, "fp32", 2, {"devices": ["cuda:0", "cuda:0"], "refused": "launch.processes"}),
        ({"PAPER_GPUS": "4", "CUDA_VISIBLE_DEVICES": "3"}, "fp32", 1, {"devices": ["cuda:0"]}),
        ({"PAPER_GPUS": "4", "CUDA_VISIBLE_DEVICES": "GPU-3,GPU-1"}, "fp32", 2, {"devices": ["cuda:0", "cuda:1"]}),
        (ONE_SLICE, "fp32", 1, {"devices": ["cuda:0"]}),
        (TWO_SLICES, "fp32", 2, {"devices": ["cuda:0", "cuda:0"], "refused": "launch.processes"}),
        (MIXED, "bf16", 3, {"devices": ["cuda:0", "cuda:1", "cuda:2"], "kinds": {H100: [0], H200: [1, 2]}}),
    ],
    ids=[
        "two",
        "turing",
        "no bf16",
        "no kernels",
        "old driver",
        "hidden",
        "shared",
        "by rank",
        "UUIDs",
        "slice",
        "slices",
        "mixed",
    ],
)
def test_what_a_machine_can_run(
    session: Any, variables: dict[str, str], precision: str, ranks: int, expected: dict[str, Any]
) -> None:
    nodes = 0 if variables.get("CUDA_VISIBLE_DEVICES") == "" else 1
    case = {"precision": precision, "ranks": ranks, "nodes": nodes, "environment": variables}
    assert session.run(kind="machine", **case) == expected
