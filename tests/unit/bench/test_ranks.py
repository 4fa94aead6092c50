"""Ranks of a measurement exit together: when done, after one fails, or at the time limit."""

import time
from pathlib import Path

import pytest

from podscale.bench import ranks
from podscale.bench.ranks import run_workers, worker_environment
from podscale.util import host_info

PROGRAM = """import os, sys, time
rank = os.environ["RANK"]
os.write(1, f"{rank} {os.environ['WORLD_SIZE']}\\n".encode())  # at once: the log is shared
time.sleep(float(sys.argv[1 + int(rank)]))
sys.exit(5 if sys.argv[3:] == [rank] else 0)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "measured_rank.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ranks, "EXIT_GRACE_SECONDS", 0.1)
    return "measured_rank"


def test_all_end_by_themselves(program: str, tmp_path: Path) -> None:
    assert run_workers(program, ["0", "0"], 2, 30.0, log=tmp_path / "log") == [0, 0]
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["0 2", "1 2"]


def test_one_that_fails_ends_the_others(program: str, tmp_path: Path) -> None:
    began = time.monotonic()
    assert run_workers(program, ["60", "0", "1"], 2, 50.0, log=tmp_path / "log") == [None, 5]
    assert time.monotonic() - began < 40


def test_time_is_limited(program: str, tmp_path: Path) -> None:
    assert run_workers(program, ["60", "60"], 2, 0.5, log=tmp_path / "log") == [None, None]


def test_ranks_that_share_a_gpu_pass_for_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 2)
    environments = [worker_environment(rank, 4, 1234) for rank in range(4)]
    assert [one["LOCAL_RANK"] for one in environments] == ["0", "1", "0", "1"]
    assert len({one["NCCL_HOSTID"] for one in environments}) == 4
    assert "NCCL_HOSTID" not in worker_environment(0, 2, 1234)
