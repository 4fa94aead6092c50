"""What telemetry and checkpoints cost a real training: the digits on two processes, and a ResNet-50's state.

    OMP_NUM_THREADS=1 python benchmarks/telemetry.py [--epochs 60]

Telemetry: one training whose monitor is switched on and off in turn, every `--block` steps. On is what a run has (phase
timers, metrics, the step log under a lease, a snapshot of each rank every second, the endpoint scraped once a second by
another process); off is none of it. Compared is the CPU time of the ranks' processes, which other load on the machine
disturbs less than wall time; beside it stands the CPU time of the calls alone, measured apart.

Abuse: see benchmarks/abuse.py.

Checkpoints: seconds that the training loop is held by a save (draining control words, copying the state, handing it
over, or waiting for the writer before), asynchronous and not, against the interval between saves.
"""

import argparse
import statistics
import tempfile
import threading
import time
import urllib.request
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from abuse import abuse
from conditions import RESULTS, head, publish
from prometheus_client import CollectorRegistry, generate_latest
from world import run_world

from podscale.checkpoint import Checkpoints, Identity
from podscale.config import RunConfig, result_values
from podscale.pytorch.build import build_session
from podscale.pytorch.control import Word
from podscale.pytorch.monitor import Monitor
from podscale.pytorch.stop import StopRequest
from podscale.pytorch.trainer import train
from podscale.pytorch.world import World
from podscale.rundir import Lease, RunDirectory
from podscale.shards.shardset import ShardSet
from podscale.stages import shard
from podscale.telemetry.events import EventLog
from podscale.telemetry.exposition import MergedMetrics, SnapshotWriter, snapshot_path
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.server import MetricsServer

RESNET50 = {"name": "resnet50"}
PARTS = ("telemetry", "abuse", "checkpoints")


class Switched(Monitor):
    """A monitor that takes part in every second block of steps; CPU seconds per step of each block are kept."""

    def __init__(self, metrics: TrainMetrics, log: EventLog | None, snapshots: Any, block: int) -> None:
        super().__init__(metrics, log, log_every=10)
        self.blocks: dict[bool, list[float]] = {True: [], False: []}
        self._snapshots, self._block, self._writer = snapshots, block, None
        self._on, self._steps, self._begin = False, 0, time.process_time()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return super().phase(name) if self._on else nullcontext()

    def updated(self, step: int, images: int, bad_records: int) -> None:
        if self._on:
            super().updated(step, images, bad_records)
        self._steps += 1
        if self._steps == self._block:
            self._switch()

    def word(self, word: Word, *, epoch: float, learning_rate: float) -> None:
        if self._on:
            super().word(word, epoch=epoch, learning_rate=learning_rate)

    def _switch(self) -> None:
        self.blocks[self._on].append((time.process_time() - self._begin) / self._steps)
        if self._writer is not None:
            self._writer.close()
        self._on, self._steps, self._writer = not self._on, 0, None
        self._begin = time.process_time()
        if self._on:
            self._writer = self._snapshots()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def switched_training(world: World, document: str, place: str, directory: str, block: int) -> dict[bool, list[float]]:
    """Trains the document; CPU seconds per step of this rank, by block."""
    config = RunConfig.model_validate_json(document)
    registry = CollectorRegistry()
    metrics = TrainMetrics(registry, rank=world.rank, run=config.run.id, info={"model": config.model.name})
    run = RunDirectory.of(config)
    run.path.mkdir(parents=True, exist_ok=True)
    with Lease.acquire(Path(directory) / f".lease-{world.rank}") as lease:
        log = EventLog(run.metrics, lease.check) if world.first else None
        monitor = Switched(
            metrics, log, lambda: SnapshotWriter(registry, snapshot_path(Path(directory), world.rank)), block
        )
        store, shard_set = _store(config, run.checkpoints, []), ShardSet.open(Path(place))
        session = build_session(config, world, shard_set, run.model, store, monitor, StopRequest())
        train(session)
        session.close()
        monitor.close()
        if log is not None:
            log.close()
    return monitor.blocks


def saving_training(world: World, document: str, place: str, asynchronous: bool) -> tuple[list[float], float, int]:
    """Trains the document with saves; seconds each save held the loop, seconds of training, and bytes of a save."""
    config = RunConfig.model_validate_json(document)
    run = RunDirectory.of(config)
    saved: list[Any] = []
    held: list[float] = []

    class Holding(Monitor):
        def phase(self, name: str) -> AbstractContextManager[None]:
            return _timed(held) if name == "checkpoint" else nullcontext()

    monitor = Holding(TrainMetrics(CollectorRegistry(), rank=0, run="saves", info={}), None, log_every=10)
    store = _store(config, run.checkpoints, saved, asynchronous)
    session = build_session(config, world, ShardSet.open(Path(place)), run.model, store, monitor, StopRequest())
    begin = time.perf_counter()
    train(session)
    seconds = time.perf_counter() - begin
    session.close()
    return held, seconds, saved[0].bytes if saved else 0


class _timed:  # noqa: N801 - reads as a statement
    def __init__(self, into: list[float]) -> None:
        self._into = into

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._into.append(time.perf_counter() - self._begin)


def _store(config: RunConfig, directory: Path, saved: list[Any], asynchronous: bool = True) -> Checkpoints:
    identity = Identity(result_values(config), "", "")
    return Checkpoints(directory, identity, keep_last=2, keep_best=0, asynchronous=asynchronous, fence=None,
                       listener=saved.append)  # fmt: skip


def word(step: int) -> Word:
    busy = {"slowest_rank": 0, "slowest_milliseconds": 10, "fastest_milliseconds": 10}
    return Word(step, stop=False, finite=True, loss=1.0, **busy)


def call_seconds(directory: Path) -> tuple[float, float]:
    """CPU seconds of the calls of one step (log line every tenth included), and of one snapshot of the metrics."""
    registry = CollectorRegistry()
    metrics = TrainMetrics(registry, rank=0, run="bench", info={"model": "resnet18"})
    steps = 20_000
    with Lease.acquire(directory / ".lease") as lease, EventLog(directory / "calls.jsonl", lease.check) as log:
        monitor = Monitor(metrics, log, log_every=10)
        begin = time.thread_time()
        for step in range(1, steps + 1):
            for phase in ("data_wait", "h2d", "forward_backward", "allreduce_wait", "optimizer"):
                with monitor.phase(phase):
                    pass
            monitor.updated(step, 32, 0)
            monitor.word(word(step), epoch=1.0, learning_rate=0.1)
        calls = (time.thread_time() - begin) / steps
    begin = time.thread_time()
    for _ in range(200):
        generate_latest(registry)
    return calls, (time.thread_time() - begin) / 200


def scrape(url: str, stop: threading.Event) -> None:
    while not stop.wait(1.0):
        urllib.request.urlopen(url, timeout=5).read()


def telemetry(config: RunConfig, place: str, scratch: Path, block: int) -> list[str]:
    """The table of what telemetry costs."""
    server = MetricsServer("127.0.0.1", 0, MergedMetrics(scratch, CollectorRegistry())).start()
    stop = threading.Event()
    scraper = threading.Thread(target=scrape, args=(server.url, stop))
    scraper.start()
    before, begin = time.process_time(), time.perf_counter()
    ranks = run_world(2, switched_training, config.model_dump_json(), place, str(scratch), block)
    serving = (time.process_time() - before) / (time.perf_counter() - begin)
    stop.set()
    scraper.join()
    server.close()
    lines = [
        "| rank | CPU ms a step, off | on | on / off, median of pairs (quartiles) | pairs |",
        "|---|---:|---:|---|---:|",
    ]
    for rank, blocks in enumerate(ranks):
        off, on = blocks[False][1:], blocks[True][1:]  # the first ones warm caches
        ratios = [b / a for a, b in zip(off, on, strict=False)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        lines.append(
            f"| {rank} | {statistics.median(off) * 1e3:.2f} | {statistics.median(on) * 1e3:.2f} | {middle - 1:+.2%} "
            f"({low - 1:+.2%} to {high - 1:+.2%}) | {len(ratios)} |"
        )
    calls, snapshot = call_seconds(scratch)
    step = statistics.median(ranks[0][False])
    lines += [
        "",
        f"Accounted directly: all calls of a step take {calls * 1e6:.0f} us of CPU ({calls / step:.2%} of the step's "
        f"{step * 1e3:.1f} ms); a snapshot, once a second, {snapshot * 1e6:.0f} us ({snapshot:.2%}); together "
        f"{calls / step + snapshot:.2%} (goal: below 1 %). Serving the endpoint takes {serving:.2%} of one core in the "
        "supervisor's process, scraping it included.",
    ]
    return lines


def checkpoints(document: dict[str, Any], place: str) -> list[str]:
    """The table of what saves cost a training."""
    lines = [
        "| state | writer | MB | saves | loop held by a save, ms (median, most) | one save an epoch of ImageNet, 3 min "
        "| share here (interval) |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    small = {"checkpoint": {"every_epochs": 1, "keep_last": 2}}
    large = {
        "model": {**RESNET50, "stem": "small"},
        "train": {**document["train"], "epochs": 1, "global_batch": 64},
        "checkpoint": {"every_steps": 4, "every_epochs": 100, "keep_last": 2},
    }
    for name, changes in (("digits, ResNet-18 of width 16", small), ("ResNet-50 with momentum", large)):
        for asynchronous in (True, False):
            run = {**document["run"], "id": f"{'beside' if asynchronous else 'inline'}-{len(lines)}"}
            config = RunConfig.model_validate({**document, **changes, "run": run})
            held, seconds, size = run_world(2, saving_training, config.model_dump_json(), place, asynchronous)[0]
            interval = seconds / max(1, len(held))
            middle = statistics.median(held)
            lines.append(
                f"| {name} | {'asynchronous' if asynchronous else 'synchronous'} | {size / 1e6:.0f} | {len(held)} "
                f"| {middle * 1e3:.1f}, {max(held) * 1e3:.1f} | {middle / 180:.3%} | {middle / interval:.2%} "
                f"({interval:.1f} s) |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=60, help="of digits, 22 steps each")
    parser.add_argument("--block", type=int, default=22, help="steps between switches")
    parser.add_argument("--slot", type=float, default=5, help="seconds between quiet and abuse")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    options = parser.parse_args()
    packages = ["torch", "numpy", "prometheus-client"]
    lines = head("Telemetry", packages)
    saves = head("Checkpoints", packages)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        document: dict[str, Any] = {
            "run": {"id": "telemetry", "workspace": name},
            "data": {"source": "digits"},
            "input": {"image_size": 16},
            "model": {"name": "resnet18", "stem": "small", "width": 16},
            "train": {"epochs": options.epochs, "global_batch": 64},
            "evaluate": {"every_epochs": 10_000},
            "checkpoint": {"every_epochs": 10_000},
            "launch": {"processes": 2},
        }
        config = RunConfig.model_validate(document)
        found = shard(config.data, name)
        assert found is not None
        lines.append(
            f"Digits on two gloo processes, {options.epochs:g} epochs; on and off in turn every {options.block} steps."
        )
        if "telemetry" in options.parts:
            lines += ["", *telemetry(config, found.location, scratch, options.block)]
            publish(RESULTS / "telemetry.md", lines)
        if "abuse" in options.parts:
            lines = head("Abuse of the metrics endpoint", packages)
            publish(RESULTS / "telemetry-abuse.md", [*lines, *abuse(config, found.location, scratch, options.slot)])
        if "checkpoints" in options.parts:
            document["train"]["epochs"] = 6
            publish(RESULTS / "checkpoint.md", [*saves, *checkpoints(document, found.location)])


if __name__ == "__main__":
    main()
