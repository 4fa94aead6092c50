"""Cost of telemetry in a real training: part `telemetry` of this benchmark.

One training switches its monitor on and off every few steps, in pairs of blocks in random order. On is what a run has:
phase timers, metrics, the step log under a lease, the ledger with its heartbeats, the comparison of ranks, a snapshot
of each rank every second, the endpoint scraped once a second. Off is none of it. The figure is the CPU time of the
ranks' processes, which other load on the machine disturbs less than wall time; beside it stands the CPU time of the
calls alone, measured apart.
"""

import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.measure import median_interval
from benchmarks.telemetry.training import Pace, lengthened, run_training
from benchmarks.world import run_world
from podscale.config import RunConfig
from podscale.distributed.step_status import StepStatus
from podscale.pytorch.world import World
from podscale.runs import Lease, RunDirectory
from podscale.telemetry.events import EventLog
from podscale.telemetry.goodput import GoodputWriter
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.registry import MergedMetrics, SnapshotWriter, snapshot_path
from podscale.telemetry.server import MetricsServer
from podscale.training.step_timer import StepTimer
from podscale.training.telemetry_files import open_goodput_tracker
from podscale.training.training_logger import TrainingLogger

WARM_STEPS = 44
"""First steps, not counted: they fill caches and choose kernels."""


class Switch:
    """On or off, by the number of the step: pairs of blocks, each pair in an order of its own that all ranks know."""

    def __init__(self, block: int, warm: int) -> None:
        self._block, self._order = block, random.Random(0)
        self._steps, self._first = -warm, True
        self.on = True

    def step(self) -> bool:
        """Count a step. Returns True if a block has ended with it."""
        self._steps += 1
        if self._steps < 0 or self._steps % self._block:
            return False
        if self._steps % (2 * self._block) == 0:
            self._first = self._order.random() < 0.5
            self.on = self._first
        else:
            self.on = not self._first
        return True


class SwitchedTimer(StepTimer):
    """A timer that takes part only while its switch is on."""

    def __init__(self, switch: Switch, metrics: TrainMetrics, **more: Any) -> None:
        super().__init__(metrics, log_every=10, **more)
        self.switch = switch

    def phase(self, name: str) -> AbstractContextManager[None]:
        return super().phase(name) if self.switch.on else nullcontext()


class Switched(TrainingLogger):
    """A monitor that takes part only while its timer's switch is on.

    `blocks`: for each block whether it was on, and the CPU seconds of a step.
    """

    def __init__(self, timer: SwitchedTimer, log: EventLog | None, **more: Any) -> None:
        super().__init__(timer, log, **more)
        self.blocks: list[tuple[bool, float]] = []
        self._switch, self._counted, self._begin = timer.switch, 0, 0.0

    def step_done(self, step: int, images: int, bad_records: int, *, steps: int = 1) -> None:
        if self._switch.on:
            super().step_done(step, images, bad_records, steps=steps)
        self._counted += 1
        was = self._switch.on
        if self._switch.step():
            now = time.process_time()
            if self._begin:
                self.blocks.append((was, (now - self._begin) / self._counted))
            self._begin, self._counted = now, 0

    def log_status(self, status: StepStatus, *, epoch: float, learning_rate: float) -> None:
        if self._switch.on:
            super().log_status(status, epoch=epoch, learning_rate=learning_rate)


def switched_training(
    world: World, document: str, place: str, directory: str, block: int, warm: int
) -> list[tuple[bool, float]]:
    """Train the document; returns the blocks of this rank."""
    config = RunConfig.model_validate_json(document)
    switch = Switch(block, warm)

    class Snapshots(SnapshotWriter):
        def _write(self) -> None:
            if switch.on:
                super()._write()

    class Heartbeats(GoodputWriter):
        def _write(self, exit_cause: str = "") -> None:
            if switch.on:
                super()._write(exit_cause)

    registry = CollectorRegistry()
    metrics = TrainMetrics(registry, rank=world.rank, run=config.run.id, info={"model": config.model.name})
    run = RunDirectory.for_config(config).create()
    with Lease.acquire(Path(directory) / f".lease-{world.rank}") as lease:
        log = EventLog(run.metrics, lease.check) if world.is_rank0 else None
        ledger = open_goodput_tracker(run, launch_age=0.0)
        monitor = Switched(SwitchedTimer(switch, metrics, goodput_tracker=ledger), log, hosts=world.hosts())
        for source in (ledger, monitor.stragglers):
            if source is not None:
                metrics.values.add_source(source)
        heartbeat = Heartbeats(ledger, run.goodput, lease.check) if world.is_rank0 else None
        with Snapshots(registry, snapshot_path(Path(directory), world.rank)):
            run_training(world, config, place, monitor)
        if heartbeat is not None:
            heartbeat.close()
        if log is not None:
            log.close()
    return monitor.blocks


def call_seconds(directory: Path, steps: int) -> tuple[float, float]:
    """CPU seconds of the calls of one step (log line every tenth included), and of one snapshot of the metrics."""
    registry = CollectorRegistry()
    metrics = TrainMetrics(registry, rank=0, run="bench", info={"model": "resnet18"})
    with Lease.acquire(directory / ".lease") as lease, EventLog(directory / "calls.jsonl", lease.check) as log:
        monitor = TrainingLogger(StepTimer(metrics, log_every=10), log)
        begin = time.thread_time()
        for step in range(1, steps + 1):
            for phase in ("data_wait", "h2d", "forward_backward", "allreduce_wait", "optimizer"):
                with monitor.timer.phase(phase):
                    pass
            monitor.step_done(step, 32, 0)
            monitor.log_status(_word(step), epoch=1.0, learning_rate=0.1)
        calls = (time.thread_time() - begin) / steps
    begin = time.thread_time()
    snapshots = max(1, steps // 100)
    for _ in range(snapshots):
        generate_latest(registry)
    return calls, (time.thread_time() - begin) / snapshots


def _word(step: int) -> StepStatus:
    busy = {"slowest_rank": 0, "slowest_milliseconds": 10, "fastest_milliseconds": 10}
    return StepStatus(step, stop_requested=False, is_finite=True, loss=1.0, **busy)


@contextmanager
def scraped(url: str) -> Iterator[list[bool]]:
    """Scrape the endpoint once a second for the time of the block; gives for each scrape whether it was answered."""
    stop, answered = threading.Event(), list[bool]()

    def scrape() -> None:
        while not stop.wait(1.0):
            answered.append(False)
            with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                answered[-1] = bool(answer.read())

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        yield answered
    finally:
        stop.set()
        scraper.join()


def pair_ratios(blocks: list[tuple[bool, float]]) -> list[float]:
    """On / off of each pair of neighbouring blocks."""
    pairs = zip(blocks[::2], blocks[1::2], strict=False)
    return [max(pair)[1] / min(pair)[1] for pair in pairs]  # (True, ...) is more than (False, ...)


def table(config: RunConfig, place: str, scratch: Path, pairs: int, block: int, pace: Pace) -> list[str]:
    """Table of the cost of telemetry.

    Args:
        config: run document; its length is set here.
        place: directory of the shard set.
        scratch: folder of the ranks' snapshots.
        pairs: of blocks.
        block: steps of a block.
        pace: of this machine.
    """
    warm = min(WARM_STEPS, pairs * block)
    config = lengthened(config, pace.epochs(warm + 2 * block * pairs))
    server = MetricsServer("127.0.0.1", 0, MergedMetrics(scratch, CollectorRegistry())).start()
    before, begin = time.process_time(), time.perf_counter()
    try:
        with scraped(server.url) as answered:
            ranks = run_world(2, switched_training, config.model_dump_json(), place, str(scratch), block, warm)
    finally:
        server.close()
    serving = (time.process_time() - before) / (time.perf_counter() - begin)
    lines = [
        f"Digits on two gloo processes, {config.train.epochs:.0f} epochs; on and off in blocks of {block} steps.",
        "",
        "| rank | CPU ms a step, off | on | on / off, median of pairs (95 % of resamples) | pairs |",
        "|---|---:|---:|---|---:|",
    ]
    for rank, blocks in enumerate(ranks):
        lines.append(row(str(rank), blocks, pair_ratios(blocks)))
    lines.append(row("both", [block for blocks in ranks for block in blocks], [*chain(*map(pair_ratios, ranks))]))
    step = statistics.median(seconds for was, seconds in ranks[0] if not was)
    return [
        *lines,
        "",
        f"{accounted(scratch, step, 100 * pairs)} Serving the endpoint takes {serving:.2%} of one core "
        f"in the supervisor's process, scraping it included ({sum(answered)} of {len(answered)} scrapes answered).",
    ]


def accounted(scratch: Path, step: float, calls: int) -> str:
    """Sentence on the calls alone. Args: step: CPU seconds of a step without telemetry; calls: steps to time."""
    per_step, snapshot = call_seconds(scratch, calls)
    return (
        f"Accounted directly: all calls of a step take {per_step * 1e6:.0f} us of CPU ({per_step / step:.2%} of the "
        f"step's {step * 1e3:.1f} ms); a snapshot, once a second, {snapshot * 1e6:.0f} us ({snapshot:.2%}); together "
        f"{per_step / step + snapshot:.2%} (goal: below 1 %)."
    )


def row(name: str, blocks: list[tuple[bool, float]], ratios: list[float]) -> str:
    """Row of the table: CPU time off and on, and their ratio over the pairs."""
    off, on = (statistics.median(seconds for was, seconds in blocks if was is wanted) * 1e3 for wanted in (False, True))
    low, high = median_interval(ratios)
    ratio = f"{statistics.median(ratios) - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%})"
    return f"| {name} | {off:.2f} | {on:.2f} | {ratio} | {len(ratios)} |"
