"""All-reduce algorithms on NCCL, with several ranks on one GPU.

NCCL refuses two ranks on one device of one host, but identifies hosts by NCCL_HOSTID. With a different one for each
rank, the ranks communicate over sockets, as nodes without faster links would.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


def start(rank: int, size: int, port: int, result: Path) -> "subprocess.Popen[str]":
    """Start rank `rank` of nodes of two ranks, all on the first GPU."""
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(rank // 2),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"podscale-{port}-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "WARN",
        "NCCL_MAX_NCHANNELS": "2",  # limits the buffers of about 50 communicators per rank on one machine
        "NCCL_BUFFSIZE": str(2**20),
    }
    command = [sys.executable, "-m", "tests.support.nccl_rank", str(result)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def world_on_one_gpu(size: int, directory: Path) -> list[dict[str, Any]]:
    """Return the results of each rank. Skips with NCCL's output if it does not form the world."""
    import torch

    from tests.support.nccl_rank import REFUSED

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [start(rank, size, port, directory / f"{rank}.pt") for rank in range(size)]
    try:
        outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode == REFUSED for rank in ranks):
        pytest.skip(
            f"{size} ranks on one GPU with NCCL_HOSTID of their own; NCCL answered: {max(outputs, key=len)[-800:]}"
        )
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(outputs)[-4000:]
    return [torch.load(directory / f"{rank}.pt") for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_all_reduce_algorithms_on_nccl(size: int, tmp_path: Path) -> None:
    import torch

    from tests.support.nccl_rank import LENGTHS, contribution

    results = world_on_one_gpu(size, tmp_path)
    exact = {n: torch.stack([contribution(rank, n).double() for rank in range(size)]).mean(0) for n in LENGTHS}
    for name, (mean, again) in results[0].items():
        assert torch.equal(mean, again), f"{name}: a rerun, overlap or a graph changed the bits"
        assert all(torch.equal(mean, other[name][0]) for other in results[1:]), f"{name}: ranks differ"
        if name.startswith("{"):
            tolerance = 3e-2 if "bf16" in name else 8e-2 if "int8" in name else 1e-6
            assert (mean - exact[len(mean)]).abs().max() < tolerance, name
    gradients = {name: mean for name, (mean, _) in results[0].items() if name.startswith(("reducer", "hook"))}
    assert len(gradients) == 9
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, gradients["reducer flat"], rtol=1e-4, atol=1e-7, msg=name)
