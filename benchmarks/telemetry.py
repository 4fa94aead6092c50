"""What telemetry costs a training step, and what a checkpoint costs the interval between saves.

    OMP_NUM_THREADS=1 python benchmarks/telemetry.py [--step-ms 20] [--seconds 10]

Telemetry: a loop that does per step what the trainer does (five phases, one step, every tenth a gauge update and a
line in the event log under a lease), with the snapshot thread running and the endpoint scraped ten times a second,
against the same loop without; the work of a step is NumPy arithmetic, so both share the machine. Checkpoints: the
arrays of ResNet-50 with momentum, written beside the same work.
"""

import argparse
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from podscale.checkpoint import Checkpoints, Identity, Saved, Snapshot
from podscale.rundir import Lease
from podscale.telemetry.events import EventLog
from podscale.telemetry.exposition import MergedMetrics, SnapshotWriter, snapshot_path
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.server import MetricsServer

PHASES = ("data_wait", "h2d", "forward_backward", "allreduce_wait", "optimizer")
RESNET50_PARAMETERS = 25_557_032


def work(milliseconds: float) -> Callable[[], None]:
    """Arithmetic that takes about this long when nobody else runs."""
    left = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)

    def once() -> None:
        np.tanh(left @ left)

    begin = time.perf_counter()
    for _ in range(50):
        once()
    repeats = max(1, round(milliseconds / 1000 / ((time.perf_counter() - begin) / 50)))
    return lambda: [once() for _ in range(repeats)] and None


def bare(step: Callable[[], None], steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begin) / steps


def instrumented(step: Callable[[], None], steps: int, metrics: TrainMetrics, log: EventLog) -> float:
    begin = before = time.perf_counter()
    for number in range(steps):
        for phase in PHASES:
            with metrics.phase(phase):
                step() if phase == "forward_backward" else None
        now = time.perf_counter()
        metrics.step(256, now - before)
        before = now
        if number % 10 == 0:
            metrics.state(epoch=0.1, loss=1.0, learning_rate=0.1)
            lap = metrics.lap()
            log.step(
                number, epoch=0.1, loss=1.0, learning_rate=0.1,
                images_per_second=lap.images_per_second, phases=lap.phases,
            )  # fmt: skip
    return (time.perf_counter() - begin) / steps


def telemetry(directory: Path, milliseconds: float, seconds: float) -> None:
    registry = CollectorRegistry()
    metrics = TrainMetrics(registry, rank=0, run="bench", info={"model": "resnet50"})
    steps = max(10, round(seconds / (milliseconds / 1000) / 10))
    step = work(milliseconds)
    server = MetricsServer("127.0.0.1", 0, MergedMetrics(directory, CollectorRegistry())).start()
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(0.1):
            urllib.request.urlopen(server.url, timeout=5).read()

    scraper = threading.Thread(target=scrape)
    scraper.start()
    pairs = []
    with Lease.acquire(directory / ".lease") as lease, EventLog(directory / "metrics.jsonl", lease.check) as log:
        begin = time.thread_time()
        instrumented(lambda: None, 20_000, metrics, log)
        calls = (time.thread_time() - begin) / 20_000
        for _ in range(10):  # alternating, so that a busy moment of the machine meets both
            without = bare(step, steps)
            with SnapshotWriter(registry, snapshot_path(directory, 0)):
                pairs.append((without, instrumented(step, steps, metrics, log)))
    stop.set()
    scraper.join()
    server.close()
    without, with_ = np.median(np.array(pairs), axis=0)
    begin = time.thread_time()
    for _ in range(100):
        generate_latest(registry)
    exposition = (time.thread_time() - begin) / 100
    print(
        f"CPU time of the calls {calls * 1e6:.1f} us per step ({calls / without:.3%} of {without * 1e3:.1f} ms), of an "
        f"exposition {exposition * 1e6:.0f} us per second ({exposition:.3%})"
    )
    print(
        f"step of {without * 1e3:.2f} ms: {with_ * 1e3:.2f} ms with everything "
        f"({with_ / without - 1:+.2%}, median of {len(pairs)} pairs of {steps} steps)"
    )


def checkpoint(directory: Path, milliseconds: float) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"{kind}/w{i}": rng.standard_normal(RESNET50_PARAMETERS // 50).astype(np.float32)
              for kind in ("model", "optimizer") for i in range(50)}  # fmt: skip
    saved: list[Any] = []
    store = Checkpoints(
        directory, Identity({}, "", ""), keep_last=2, keep_best=0, asynchronous=True, fence=None, listener=saved.append
    )
    step = work(milliseconds)
    without = bare(step, 50)
    costs, blocked = [], []
    for number in range(5):
        begin = time.perf_counter()
        store.save(Snapshot(number, arrays, {}))
        blocked.append(time.perf_counter() - begin)
        steps = 0
        while len(saved) <= number:
            step()
            steps += 1
        costs.append(time.perf_counter() - begin - steps * without)
    store.close()
    assert all(isinstance(entry, Saved) for entry in saved)
    seconds = float(np.median([entry.seconds for entry in saved]))
    begin = time.perf_counter()
    store.restore("auto")
    restore = time.perf_counter() - begin
    print(
        f"checkpoint of {saved[0].bytes / 1e6:.0f} MB: save() returns in {np.median(blocked) * 1e3:.2f} ms, written "
        f"in {seconds:.2f} s beside training, which lost {np.median(costs):.2f} s; restore {restore:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--directory", type=Path, default=None, help="where to write (default: a temporary one)")
    options = parser.parse_args()
    where = nullcontext(options.directory) if options.directory else tempfile.TemporaryDirectory()
    with where as name:
        telemetry(Path(name), options.step_ms, options.seconds)
        checkpoint(Path(name) / "checkpoints", options.step_ms)


if __name__ == "__main__":
    main()
