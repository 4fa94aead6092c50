"""Part `telemetry`: CPU time of telemetry in a real training.

A training switches its telemetry on and off every few steps, in pairs of blocks in random order. On: phase timers,
metrics, the step log under a lease, goodput with its heartbeats, straggler detection, a snapshot of each rank every
second, and a scrape of the endpoint once a second. The result is the CPU time of the ranks' processes, which other load
on the machine disturbs less than wall time, and the CPU time of the telemetry calls, measured separately.
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
from benchmarks.telemetry.training import StepPace, run_training, with_epochs
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
from podscale.training.training_logger import TrainingLogger, open_goodput_tracker

WARM_STEPS = 44
"""First steps, not measured: they fill caches and choose kernels."""


class Switch:
    """Switch of telemetry: blocks of steps in pairs of on and off, in a random order that all ranks share."""

    def __init__(self, block: int, warm: int) -> None:
        self._block, self._random = block, random.Random(0)
        self._steps, self._first_on = -warm, True
        self.on = True

    def step(self) -> bool:
        """Count a step. Returns True if it is the last of a block."""
        self._steps += 1
        if self._steps < 0 or self._steps % self._block:
            return False
        if self._steps % (2 * self._block) == 0:
            self.on = self._first_on = self._random.random() < 0.5
        else:
            self.on = not self._first_on
        return True


class SwitchedTimer(StepTimer):
    """Step timer that works only while its switch is on."""

    def __init__(self, switch: Switch, metrics: TrainMetrics, **more: Any) -> None:
        super().__init__(metrics, log_every=10, **more)
        self.switch = switch

    def phase(self, name: str) -> AbstractContextManager[None]:
        return super().phase(name) if self.switch.on else nullcontext()


class SwitchedLogger(TrainingLogger):
    """Training logger that works only while the switch of its timer is on.

    Attributes:
        blocks: state of the switch and CPU seconds of a step, for each block.
    """

    def __init__(self, timer: SwitchedTimer, log: EventLog | None, **more: Any) -> None:
        super().__init__(timer, log, **more)
        self.blocks: list[tuple[bool, float]] = []
        self._switch, self._block_steps, self._block_start = timer.switch, 0, 0.0

    def step_done(self, step: int, images: int, bad_records: int, *, steps: int = 1) -> None:
        on = self._switch.on
        if on:
            super().step_done(step, images, bad_records, steps=steps)
        self._block_steps += 1
        if self._switch.step():
            now = time.process_time()
            if self._block_start:
                self.blocks.append((on, (now - self._block_start) / self._block_steps))
            self._block_start, self._block_steps = now, 0

    def log_status(self, status: StepStatus, *, epoch: float, learning_rate: float) -> None:
        if self._switch.on:
            super().log_status(status, epoch=epoch, learning_rate=learning_rate)


def train_switched(
    world: World, document: str, shard_set: str, directory: str, block: int, warm: int
) -> list[tuple[bool, float]]:
    """Train; return the blocks of this rank."""
    config = RunConfig.model_validate_json(document)
    switch = Switch(block, warm)

    class SwitchedSnapshots(SnapshotWriter):
        def _write(self) -> None:
            if switch.on:
                super()._write()

    class SwitchedHeartbeats(GoodputWriter):
        def _write(self, exit_cause: str = "") -> None:
            if switch.on:
                super()._write(exit_cause)

    registry = CollectorRegistry()
    metrics = TrainMetrics(registry, rank=world.rank, run=config.run.id, info={"model": config.model.name})
    run = RunDirectory.for_config(config).create()
    with Lease.acquire(Path(directory) / f".lease-{world.rank}") as lease:
        log = EventLog(run.metrics, lease.check) if world.is_rank0 else None
        goodput = open_goodput_tracker(run, launch_age=0.0)
        timer = SwitchedTimer(switch, metrics, goodput_tracker=goodput)
        logger = SwitchedLogger(timer, log, hosts=world.hosts())
        for source in (goodput, logger.stragglers):
            if source is not None:
                metrics.values.add_source(source)
        heartbeat = SwitchedHeartbeats(goodput, run.goodput, lease.check) if world.is_rank0 else None
        with SwitchedSnapshots(registry, snapshot_path(Path(directory), world.rank)):
            run_training(world, config, shard_set, logger)
        if heartbeat is not None:
            heartbeat.close()
        if log is not None:
            log.close()
    return logger.blocks


def call_seconds(directory: Path, steps: int) -> tuple[float, float]:
    """Return the CPU seconds of the calls of one step (with a log line every tenth), and of one metrics snapshot."""
    registry = CollectorRegistry()
    metrics = TrainMetrics(registry, rank=0, run="bench", info={"model": "resnet18"})
    with Lease.acquire(directory / ".lease") as lease, EventLog(directory / "calls.jsonl", lease.check) as log:
        logger = TrainingLogger(StepTimer(metrics, log_every=10), log)
        start = time.thread_time()
        for step in range(1, steps + 1):
            for phase in ("data_wait", "h2d", "forward_backward", "allreduce_wait", "optimizer"):
                with logger.timer.phase(phase):
                    pass
            logger.step_done(step, 32, 0)
            logger.log_status(_status(step), epoch=1.0, learning_rate=0.1)
        calls = (time.thread_time() - start) / steps
    start = time.thread_time()
    snapshots = max(1, steps // 100)
    for _ in range(snapshots):
        generate_latest(registry)
    return calls, (time.thread_time() - start) / snapshots


def _status(step: int) -> StepStatus:
    times = {"slowest_rank": 0, "slowest_milliseconds": 10, "fastest_milliseconds": 10}
    return StepStatus(step, stop_requested=False, is_finite=True, loss=1.0, **times)


@contextmanager
def scraped(url: str) -> Iterator[list[bool]]:
    """Scrape the endpoint once a second during the block; yield a list with the success of each scrape."""
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
    """Return on / off of each pair of neighbouring blocks."""
    pairs = zip(blocks[::2], blocks[1::2], strict=False)
    return [max(pair)[1] / min(pair)[1] for pair in pairs]  # (True, ...) is more than (False, ...)


def table(config: RunConfig, shard_set: str, scratch: Path, pairs: int, block: int, pace: StepPace) -> list[str]:
    """Return the table of the cost of telemetry.

    Args:
        scratch: folder of the ranks' snapshots.
        pairs: pairs of blocks.
        block: steps of a block.
    """
    warm = min(WARM_STEPS, pairs * block)
    config = with_epochs(config, pace.epochs(warm + 2 * block * pairs))
    server = MetricsServer("127.0.0.1", 0, MergedMetrics(scratch, CollectorRegistry())).start()
    cpu_start, start = time.process_time(), time.perf_counter()
    try:
        with scraped(server.url) as answered:
            ranks = run_world(2, train_switched, config.model_dump_json(), shard_set, str(scratch), block, warm)
    finally:
        server.close()
    serving = (time.process_time() - cpu_start) / (time.perf_counter() - start)
    lines = [
        f"Digits on two gloo processes, {config.train.epochs:.0f} epochs. Telemetry is switched on and off every "
        f"{block} steps, in pairs of blocks in random order.",
        "",
        "| rank | CPU ms a step, off | on | on / off, median of pairs (95 % of resamples) | pairs |",
        "|---|---:|---:|---|---:|",
    ]
    for rank, blocks in enumerate(ranks):
        lines.append(row(str(rank), blocks, pair_ratios(blocks)))
    lines.append(row("both", [block for blocks in ranks for block in blocks], [*chain(*map(pair_ratios, ranks))]))
    step = statistics.median(seconds for on, seconds in ranks[0] if not on)
    return [
        *lines,
        "",
        f"{calls_sentence(scratch, step, 100 * pairs)} Serving the endpoint takes {serving:.2%} of one core "
        f"in the supervisor's process, scraping included ({sum(answered)} of {len(answered)} scrapes answered).",
    ]


def calls_sentence(scratch: Path, step: float, timed_steps: int) -> str:
    """Return a sentence on the CPU time of the calls; `step`: CPU seconds of a step without telemetry."""
    per_step, snapshot = call_seconds(scratch, timed_steps)
    return (
        f"Measured separately, the telemetry calls of a step take {per_step * 1e6:.0f} us of CPU "
        f"({per_step / step:.2%} of the step's {step * 1e3:.1f} ms), and a snapshot, once a second, takes "
        f"{snapshot * 1e6:.0f} us ({snapshot:.2%}): together {per_step / step + snapshot:.2%} (goal: below 1 %)."
    )


def row(name: str, blocks: list[tuple[bool, float]], ratios: list[float]) -> str:
    """Return a row with the CPU time off and on, and their ratio over the pairs."""
    off, on = (statistics.median(seconds for on, seconds in blocks if on is state) * 1e3 for state in (False, True))
    low, high = median_interval(ratios)
    ratio = f"{statistics.median(ratios) - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%})"
    return f"| {name} | {off:.2f} | {on:.2f} | {ratio} | {len(ratios)} |"
