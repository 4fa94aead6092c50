"""Lost ranks are detected although collectives wait on the device and raise no error."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale.errors import ExitCode, PodscaleError
from tests.support.commands import SMALL_DIGITS, Command, podscale, set_options

pytestmark = pytest.mark.gpu


def test_the_heartbeat_reports_while_the_host_waits_for_the_device() -> None:
    """One of two ranks stops its heartbeat; the other waits for a kernel, as it would for NCCL's."""
    import torch
    from torch._C._distributed_c10d import HashStore

    from podscale.distributed.failure_report import PeerWatch
    from podscale.distributed.heartbeat import RankHeartbeat
    from podscale.distributed.progress_tracker import ProgressTracker
    from podscale.distributed.rank_group import RankGroup
    from podscale.pytorch.collective_errors import collective_failures
    from podscale.pytorch.world import TorchStore

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    store, ended = TorchStore(HashStore()), list[tuple[float, PodscaleError]]()
    RankHeartbeat(RankGroup(1, 2, store, 1.0), ProgressTracker(), interval_seconds=3600.0)
    torch.cuda._sleep(1)
    with PeerWatch(
        RankGroup(0, 2, store, 1.0),
        lambda e: ended.append((time.monotonic(), e)),
        collective_failures(),
        interval_seconds=0.2,
    ) as tracker:
        tracker.step_done(1)
        torch.cuda._sleep(12_000_000_000)  # clock cycles: several seconds on any device
        torch.cuda.synchronize()
        over = time.monotonic()
    assert ended, "no failure was reported"
    assert ended[0][0] < over
    assert ended[0][1].exit_code == ExitCode.HANG
    assert "rank 1 " in str(ended[0][1])


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    (tmp_path / "run.yaml").write_text(SMALL_DIGITS)
    assert podscale(tmp_path, "shard", "run.yaml").code == 0
    options = set_options("launch.timeout_seconds=10", "train.epochs=200")
    started = Command(tmp_path, "train", "run.yaml", *options)
    yield started
    started.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGSTOP, ExitCode.HANG), (signal.SIGKILL, ExitCode.PEER_LOST)])
def test_nccl_loses_a_rank(command: Command, tmp_path: Path, number: signal.Signals, code: ExitCode) -> None:
    command.wait_for_steps(tmp_path / "runs" / "small", 5)
    os.kill(command.ranks()[1], number)
    since = time.monotonic()
    ended = command.end()
    assert ended.code == code, ended.err
    assert "rank 1" in ended.err[ended.err.rindex("podscale: ") :]
    assert time.monotonic() - since < 10 + 40
