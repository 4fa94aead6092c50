"""GPU checks of `podscale doctor`, with a program in place of nvidia-smi that prints what the driver's prints."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from podscale.cli import gpu_doctor
from podscale.pytorch.nccl_paths import parse_paths
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

    def install(rows: str, topology: str = LINKED, *, code: int = 0, usable: int = 0) -> dict[str, CheckResult]:
        (tmp_path / "rows").write_text(rows, encoding="utf-8")
        (tmp_path / "topology").write_text(topology, encoding="utf-8")
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\n[ "$1" = topo ] && exec /bin/cat {tmp_path}/topology\n/bin/cat {tmp_path}/rows\nexit {code}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return {result.subject: result for result in gpu_doctor.check_gpus(usable=usable)}

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


NVLINK = """
H20-GPU-05:1789225:1789736 [1] NCCL INFO Pattern 4, crossNic 1, nChannels 4, bw 24.0/24.0, type NVL/PIX, sameChannels 0
H20-GPU-05:1789225:1789736 [1] NCCL INFO  0 : NET/3 GPU/0 GPU/1 NET/2
H20-GPU-05:1789225:1789736 [1] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/CUMEM
H20-GPU-05:1789225:1789736 [1] NCCL INFO Channel 03/0 : 1[1] -> 0[0] via P2P/CUMEM/read
"""
PCIE = """
LIUCC13-AC-01:84:98 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 1, bw 10.0/10.0, type SYS/PIX, sameChannels 1
hw14:798:813 [3] NCCL INFO Channel 02/0 : 3[3] -> 4[4] via P2P/direct pointer
"""
SHARED_MEMORY = """
sh9-machine:3884652:3884747 [0] NCCL INFO Channel 00 : 0[0] -> 4[4] via SHM/direct/direct
"""
OLD = " [0] NCCL INFO Ring 00 : 0[1b000] -> 1[1c000] via P2P/IPC"
GPUDIRECT = """
H20-GPU-06:4015539:4015652 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
H20-GPU-06:4015540:4015653 [1] NCCL INFO Channel 01/0 : 3[1] -> 1[1] [send] via NET/IB/2/GDRDMA
"""
PLUGIN = "bigo:1884:2298 [0] NCCL INFO Channel 00/0 : 1[0] -> 2[0] [receive] via NET/IBext_v8/1"
HALF = GPUDIRECT + PLUGIN
SOCKETS = "n:926:1151 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3"
"""Lines of logs in NVIDIA's issues 1189, 1358, 1817, 392 and 952 of nccl, 213 and 373 of nccl-tests."""


@pytest.mark.parametrize(
    ("log", "transports", "link"),
    [
        (NVLINK, ("P2P/CUMEM", "P2P/CUMEM/read"), "NVL"),
        (PCIE, ("P2P/direct",), "SYS"),
        (SHARED_MEMORY, ("SHM/direct/direct",), ""),
        (GPUDIRECT, ("NET/IB/2/GDRDMA", "NET/IB/3/GDRDMA"), ""),
        (OLD, (), ""),
        ("", (), ""),
    ],
)
def test_paths_are_read_from_nccls_log(log: str, transports: tuple[str, ...], link: str) -> None:
    assert parse_paths(log) == (transports, link)


@pytest.mark.parametrize(
    ("path", "network", "verdicts", "texts"),
    [
        (NVLINK, GPUDIRECT, ("ok", "ok"), ("P2P/CUMEM, P2P/CUMEM/read, over NVLink", "reach the memory of GPUs")),
        (PCIE, PLUGIN, ("ok", "note"), ("over PCIe (SYS)", "NET/IBext_v8/1: data pass through the host's memory")),
        (SHARED_MEMORY, HALF, ("note", "note"), ("through the host's memory", "through the host's memory")),
        (SOCKETS, SOCKETS, ("note", "note"), ("NET/Socket/3", "does not use the cards")),
        ("", "", ("note", "note"), ("an unknown path", "an unknown path")),
        (1, 1, ("missing", "note"), ("cannot exchange data: RuntimeError: unhandled", "cannot send over the cards")),
        (None, None, ("missing", "note"), ("no result within 120 s", "no result within 120 s")),
    ],
)
def test_the_paths_that_nccl_takes(
    smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: object, network: object, verdicts: object, texts: object
) -> None:
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(gpu_doctor, "INFINIBAND", tmp_path / "infiniband")
    monkeypatch.setattr(gpu_doctor, "_check_jpeg_decoder", lambda: CheckResult("nvJPEG", "ok", ""))

    def run(module: str, arguments: Sequence[str], ranks: int, limit: float, *, log: Path) -> list[object]:
        assert (module, ranks) == ("podscale.pytorch.nccl_paths", 2)
        outcome = network if list(arguments) == ["network"] else path
        failed = f"{NVLINK}\nTraceback\nRuntimeError: unhandled cuda error\n"
        log.write_text(outcome if isinstance(outcome, str) else failed, encoding="utf-8")
        return [0, 0] if isinstance(outcome, str) else [outcome, None]

    monkeypatch.setattr(gpu_doctor, "run_workers", run)
    found = smi("".join(f"{n}, Enabled, Enabled, 0, Disabled\n" for n in range(3)), usable=3)
    results = (found["NCCL path"], found["NCCL network"])
    assert tuple(result.verdict for result in results) == verdicts
    assert all(text in result.found for result, text in zip(results, texts, strict=True))
    assert all(bool(result.advice) == (result.verdict != "ok") for result in results)


@pytest.mark.parametrize(("rows", "usable"), [("0, Enabled, Enabled, 0, Disabled\n", 1), ("", 2)])
def test_one_gpu_has_no_path(smi, monkeypatch: pytest.MonkeyPatch, rows: str, usable: int) -> None:
    monkeypatch.setattr(gpu_doctor, "_check_jpeg_decoder", lambda: CheckResult("nvJPEG", "ok", ""))
    monkeypatch.setattr(gpu_doctor, "run_workers", None)
    assert not {"NCCL path", "NCCL network"} & smi(rows, usable=usable).keys()
