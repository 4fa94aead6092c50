"""What telemetry costs a real training: the part of benchmarks/telemetry.py about its overhead.

One training whose monitor is switched on and off, every few steps, in pairs of blocks in random order. On is what a run
has: phase timers, metrics, the step log under a lease, the ledger with its heartbeats, the comparison of ranks, a
snapshot of each rank every second, the endpoint scraped once a second by another process. Off is none of it. Compared
is the CPU time of the ranks' processes, which other load on the machine disturbs less than wall time; beside it stands
the CPU time of the calls alone, measured apart.
"""

import random
import statistics
import threading
import time
import urllib.request
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from world import run_world

from podscale.config import RunConfig
from podscale.data.shard_set import ShardSet
from podscale.distributed.step_status import StepStatus, StopRequest
from podscale.pytorch.trainer import build_trainer
from podscale.pytorch.world import World
from podscale.runs import Lease, RunDirectory
from podscale.telemetry.events import EventLog
from podscale.telemetry.goodput import GoodputWriter
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.registry import MergedMetrics, SnapshotWriter, snapshot_path
from podscale.telemetry.server import MetricsServer
from podscale.training.trainer import train
from podscale.training.training_logger import TrainingLogger, open_goodput_tracker
from podscale.training.worker_stages import open_checkpoint_store

WARM_STEPS = 44
"""The first steps fill caches and choose kernels."""


class Switch:
    """On or off, by the number of the step: pairs of blocks, each pair in an order of its own that all ranks know."""

    def __init__(self, block: int) -> None:
        self._block, self._order = block, random.Random(0)
        self._steps, self._first = -WARM_STEPS, True
        self.on = True

    def step(self) -> bool:
        """Counts a step; whether a block has ended with it."""
        self._steps += 1
        if self._steps < 0 or self._steps % self._block:
            return False
        if self._steps % (2 * self._block) == 0:
            self._first = self._order.random() < 0.5
            self.on = self._first
        else:
            self.on = not self._first
        return True


class Switched(TrainingLogger):
    """A monitor that takes part only while its switch is on; CPU seconds of a step, by block: (on, seconds)."""

    def __init__(self, switch: Switch, metrics: TrainMetrics, log: EventLog | None, **more: Any) -> None:
        super().__init__(metrics, log, log_every=10, **more)
        self.blocks: list[tuple[bool, float]] = []
        self._switch, self._counted, self._begin = switch, 0, 0.0

    def phase(self, name: str) -> AbstractContextManager[None]:
        return super().phase(name) if self._switch.on else nullcontext()

    def step_done(self, step: int, images: int, bad_records: int) -> None:
        if self._switch.on:
            super().step_done(step, images, bad_records)
        self._counted += 1
        was = self._switch.on
        if self._switch.step():
            now = time.process_time()
            if self._begin:
                self.blocks.append((was, (now - self._begin) / self._counted))
            self._begin, self._counted = now, 0

    def log_status(self, word: StepStatus, *, epoch: float, learning_rate: float) -> None:
        if self._switch.on:
            super().log_status(word, epoch=epoch, learning_rate=learning_rate)


def switched_training(world: World, document: str, place: str, directory: str, block: int) -> list[tuple[bool, float]]:
    """Trains the document; the blocks of this rank."""
    config = RunConfig.model_validate_json(document)
    switch = Switch(block)

    class Snapshots(SnapshotWriter):
        def _write(self) -> None:
            if switch.on:
                super()._write()

    class Heartbeats(GoodputWriter):
        def _write(self, ended: str = "") -> None:
            if switch.on:
                super()._write(ended)

    registry = CollectorRegistry()
    metrics = TrainMetrics(registry, rank=world.rank, run=config.run.id, info={"model": config.model.name})
    run = RunDirectory.for_config(config).create()
    shard_set = ShardSet.open(Path(place))
    store = open_checkpoint_store(config, run, shard_set)
    with Lease.acquire(Path(directory) / f".lease-{world.rank}") as lease:
        log = EventLog(run.metrics, lease.check) if world.is_rank0 else None
        ledger = open_goodput_tracker(run)
        monitor = Switched(switch, metrics, log, ledger=ledger, hosts=world.hosts())
        for source in (ledger, monitor.stragglers):
            if source is not None:
                metrics.values.add_source(source)
        session = build_trainer(config, world, shard_set, run.model, store, monitor, StopRequest())
        heartbeat = Heartbeats(ledger, run.goodput, lease.check) if world.is_rank0 else None
        with Snapshots(registry, snapshot_path(Path(directory), world.rank)):
            train(session)
        session.close()
        if heartbeat is not None:
            heartbeat.close()
        if log is not None:
            log.close()
    return monitor.blocks


def call_seconds(directory: Path) -> tuple[float, float]:
    """CPU seconds of the calls of one step (log line every tenth included), and of one snapshot of the metrics."""
    registry = CollectorRegistry()
    metrics = TrainMetrics(registry, rank=0, run="bench", info={"model": "resnet18"})
    steps = 20_000
    with Lease.acquire(directory / ".lease") as lease, EventLog(directory / "calls.jsonl", lease.check) as log:
        monitor = TrainingLogger(metrics, log, log_every=10)
        begin = time.thread_time()
        for step in range(1, steps + 1):
            for phase in ("data_wait", "h2d", "forward_backward", "allreduce_wait", "optimizer"):
                with monitor.phase(phase):
                    pass
            monitor.step_done(step, 32, 0)
            monitor.log_status(_word(step), epoch=1.0, learning_rate=0.1)
        calls = (time.thread_time() - begin) / steps
    begin = time.thread_time()
    for _ in range(200):
        generate_latest(registry)
    return calls, (time.thread_time() - begin) / 200


def _word(step: int) -> StepStatus:
    busy = {"slowest_rank": 0, "slowest_milliseconds": 10, "fastest_milliseconds": 10}
    return StepStatus(step, stop_requested=False, is_finite=True, loss=1.0, **busy)


def scrape(url: str, stop: threading.Event) -> None:
    while not stop.wait(1.0):
        urllib.request.urlopen(url, timeout=5).read()


def pair_ratios(blocks: list[tuple[bool, float]]) -> list[float]:
    """On / off of each pair of neighbouring blocks."""
    pairs = zip(blocks[::2], blocks[1::2], strict=False)
    return [max(pair)[1] / min(pair)[1] for pair in pairs]  # (True, ...) is more than (False, ...)


def overhead(config: RunConfig, place: str, scratch: Path, block: int) -> list[str]:
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
        "| rank | CPU ms a step, off | on | on / off, median of pairs (95 % of resamples) | pairs |",
        "|---|---:|---:|---|---:|",
    ]
    for rank, blocks in enumerate(ranks):
        lines.append(row(str(rank), blocks, pair_ratios(blocks)))
    lines.append(row("both", [block for blocks in ranks for block in blocks], [*chain(*map(pair_ratios, ranks))]))
    calls, snapshot = call_seconds(scratch)
    step = statistics.median(seconds for was, seconds in ranks[0] if not was)
    lines += [
        "",
        f"Accounted directly: all calls of a step take {calls * 1e6:.0f} us of CPU ({calls / step:.2%} of the step's "
        f"{step * 1e3:.1f} ms); a snapshot, once a second, {snapshot * 1e6:.0f} us ({snapshot:.2%}); together "
        f"{calls / step + snapshot:.2%} (goal: below 1 %). Serving the endpoint takes {serving:.2%} of one core in the "
        "supervisor's process, scraping it included.",
    ]
    return lines


def row(name: str, blocks: list[tuple[bool, float]], ratios: list[float]) -> str:
    """Seconds off and on, and what the pairs say."""
    off, on = (statistics.median(seconds for was, seconds in blocks if was is wanted) * 1e3 for wanted in (False, True))
    low, high = median_interval(ratios)
    ratio = f"{statistics.median(ratios) - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%})"
    return f"| {name} | {off:.2f} | {on:.2f} | {ratio} | {len(ratios)} |"


def median_interval(values: list[float], resamples: int = 4000) -> tuple[float, float]:
    """Between which the median lies in 95 % of resamples with replacement."""
    choose = random.Random(1)
    medians = sorted(statistics.median(choose.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
