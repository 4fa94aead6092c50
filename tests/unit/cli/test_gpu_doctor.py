"""GPU checks of `podscale doctor`, with a program in place of nvidia-smi that prints what the driver's prints."""

import re
from pathlib import Path

import pytest

from podscale.cli import gpu_doctor
from podscale.util.terminal import CheckResult

LINKED = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPXB\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tPXB\t0-47\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PARTLY = LINKED.replace("GPU0\t X \tNV18\tNV18", "GPU0\t X \tNV18\tSYS").replace(
    "GPU1\tNV18\t X \tNV18", "GPU1\tNV18\t X \tPHB"
)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return `smi(rows, topology)`, which installs the program and returns the results by subject."""

    def install(rows: str, topology: str = LINKED, *, code: int = 0) -> dict[str, CheckResult]:
        (tmp_path / "rows").write_text(rows, encoding="utf-8")
        (tmp_path / "topology").write_text(topology, encoding="utf-8")
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\n[ "$1" = topo ] && exec /bin/cat {tmp_path}/topology\n/bin/cat {tmp_path}/rows\nexit {code}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return {result.subject: result for result in gpu_doctor.check_gpus(has_torch=False)}

    return install


def test_healthy_gpus(smi) -> None:
    found = smi("".join(f"{n}, Enabled, Enabled, 0, Disabled\n" for n in range(3)))
    assert {name: result.verdict for name, result in found.items()} == dict.fromkeys(
        ("persistence", "GPU memory", "MIG", "NVLink"), "ok"
    )
    assert "3 GPUs" in found["NVLink"].found


@pytest.mark.parametrize(
    ("row", "subject", "verdict", "text"),
    [
        ("0, Disabled, Enabled, 0, Disabled", "persistence", "note", "off for GPU 0"),
        ("0, Enabled, Disabled, 0, Disabled", "GPU memory", "note", "ECC is off for GPU 0"),
        ("0, Enabled, Enabled, 3, Disabled", "GPU memory", "missing", "3 errors on GPU 0"),
        ("0, Enabled, [N/A], [N/A], [N/A]", "GPU memory", "ok", "no ECC"),
        ("0, Enabled, Enabled, 0, Enabled", "MIG", "note", "on for GPU 0"),
        ("0, [N/A], Enabled, 0, [N/A]", "persistence", "ok", "stays loaded"),
    ],
)
def test_what_is_wrong_has_its_remedy(smi, row: str, subject: str, verdict: str, text: str) -> None:
    result = smi(row + "\n")[subject]
    assert result.verdict == verdict
    assert text in result.found
    assert bool(result.advice) == (verdict != "ok")


def test_gpus_without_nvlink_are_named(smi) -> None:
    assert gpu_doctor.parse_topology(LINKED) == []
    assert gpu_doctor.parse_topology(PARTLY) == [(0, 2), (1, 2)]
    result = smi("".join(f"{n}, Enabled, Enabled, 0, Disabled\n" for n in range(3)), PARTLY)["NVLink"]
    assert result.verdict == "note"
    assert re.findall(r"\d", result.found.partition("pairs")[0]) == ["0", "2", "1"]


@pytest.mark.parametrize(("peer_memory", "driver", "verdict"), [(True, "", "ok"), (False, "", "note")])
def test_network_cards_reach_the_memory_of_gpus(
    smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer_memory: bool, driver: str, verdict: str
) -> None:
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    for name, exists in (("PEER_MEMORY", peer_memory), ("DRIVER", False)):
        monkeypatch.setattr(gpu_doctor, name, tmp_path if exists else tmp_path / "nothing")
    monkeypatch.setattr(gpu_doctor, "INFINIBAND", tmp_path / "infiniband")
    assert smi("0, Enabled, Enabled, 0, Disabled\n")["GPUDirect RDMA"].verdict == verdict


def test_the_open_driver_needs_no_module(smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06\n")
    monkeypatch.setattr(gpu_doctor, "INFINIBAND", tmp_path / "infiniband")
    monkeypatch.setattr(gpu_doctor, "PEER_MEMORY", tmp_path / "nothing")
    monkeypatch.setattr(gpu_doctor, "DRIVER", tmp_path / "version")
    assert smi("0, Enabled, Enabled, 0, Disabled\n")["GPUDirect RDMA"].found.startswith("by DMA-BUF")


def test_a_failing_or_missing_program_finds_nothing(smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert smi("NVIDIA-SMI has failed\n", code=9) == {}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(gpu_doctor, "NVIDIA_SMI_SECONDS", 0.2)
    assert gpu_doctor.gpu_states() == []
    monkeypatch.setenv("PATH", "")
    assert gpu_doctor.gpu_states() == []
