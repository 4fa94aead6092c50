"""Rank without a framework: it follows the environment contract and misbehaves as PLAIN_RANK says.

PLAIN_RANK is JSON: {"<rank or *>": "<behaviour>"}; behaviours are the functions below.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from podscale.errors import InputError, PeerLost, Preempted
from podscale.telemetry.events import EventLog
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.registry import SnapshotWriter, snapshot_path

RANK = int(os.environ["RANK"])
RANK_DIR = Path(os.environ["PODSCALE_RANK_DIR"])
DIRECTORY = Path(os.environ["PLAIN_DIRECTORY"])


def train(steps: int = 5, seconds: float = 0.02) -> None:
    config = json.loads(os.environ["PODSCALE_CONFIG"])
    registry = CollectorRegistry()
    metrics = TrainMetrics(registry, rank=RANK, run=config["run"]["id"], info={"model": "none"})
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    log = EventLog(DIRECTORY / "metrics.jsonl") if RANK == 0 else None
    if log:
        log.event("start", step=0, total_steps=steps)
    with SnapshotWriter(registry, snapshot_path(RANK_DIR, RANK)):
        for step in range(1, steps + 1):
            with metrics.phase("forward_backward"):
                time.sleep(seconds)
            metrics.count_step(32, seconds)
            if RANK == 0 and log:
                metrics.set_state(epoch=step / 10, loss=1 / step, learning_rate=0.1)
                rate = metrics.take_interval().images_per_second
                log.step(step, epoch=0.1, loss=1 / step, learning_rate=0.1, images_per_second=rate, phases={})
            if stopped:
                raise Preempted(f"saved step {step} and stopped on request")


def long() -> None:
    train(steps=100_000)


def hundred() -> None:
    train(steps=100, seconds=0.05)


def bad_input() -> None:
    raise InputError("the class map is wrong: run podscale shard again")


def bug() -> None:
    raise RuntimeError("index 3 is out of bounds")


def exits() -> None:
    sys.exit(3)


def peer_lost() -> None:
    time.sleep(0.3)
    raise PeerLost("rank 1 does not answer")


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    time.sleep(600)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def aborted_by_watchdog() -> None:
    """Log and abort as torch does if NCCL's watchdog sees the error of a failed GPU first."""
    print("[rank0] watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGABRT)


def aborted() -> None:
    os.kill(os.getpid(), signal.SIGABRT)


def killed_once() -> None:
    marker = DIRECTORY / "once"
    if not marker.exists():
        marker.touch()
        killed()
    train()


def with_grandchild() -> None:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    ready()
    time.sleep(600)


def ready() -> None:
    print("ready", file=sys.stderr, flush=True)
    (DIRECTORY / f"ready-{RANK}").touch()


if __name__ == "__main__":
    print(f"rank {RANK} of {os.environ['WORLD_SIZE']} threads {os.environ['OMP_NUM_THREADS']}", flush=True)
    print("start-up", *json.loads(os.environ["PODSCALE_STARTUP"]), flush=True)
    behaviours = json.loads(os.environ["PLAIN_RANK"])
    globals()[behaviours.get(str(RANK), behaviours.get("*", "train"))]()
