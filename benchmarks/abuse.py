"""What clients that mean harm cost a real training: the part of benchmarks/telemetry.py about abuse.

One training on two processes, served as a run is. In every second slot of some seconds another process keeps 1,000
idle connections open, 100 that send their request a byte at a time, sends headers without end, and scrapes 200 times a
second; a scraper of ours comes once a second all the time. Compared is the CPU time of a step between neighbouring
slots, because wall time on a busy machine tells more of the machine.
"""

import multiprocessing
import socket
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from world import run_world

from podscale.checkpoint import Checkpoints, Identity
from podscale.config import RunConfig, result_values
from podscale.pytorch.build import build_session
from podscale.pytorch.monitor import Monitor
from podscale.pytorch.stop import StopRequest
from podscale.pytorch.trainer import train
from podscale.pytorch.world import World
from podscale.rundir import RunDirectory
from podscale.shards.shardset import ShardSet
from podscale.telemetry.exposition import MergedMetrics, SnapshotWriter, snapshot_path
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.server import MetricsServer

IDLE, SLOW, SCRAPES = 1000, 100, 200
Moment = tuple[float, float]
"""When a step ended, and the CPU seconds of its process until then."""


def in_abuse(moment: float, slot: float) -> bool:
    return int(moment / slot) % 2 == 1


def recorded_training(world: World, document: str, place: str, directory: str) -> list[Moment]:
    """Trains the document with all telemetry; a moment for each step."""
    config = RunConfig.model_validate_json(document)
    moments: list[Moment] = []

    class Recording(Monitor):
        def updated(self, step: int, images: int, bad_records: int) -> None:
            super().updated(step, images, bad_records)
            moments.append((time.time(), time.process_time()))

    registry = CollectorRegistry()
    monitor = Recording(TrainMetrics(registry, rank=world.rank, run=config.run.id), None, log_every=10)
    run = RunDirectory.of(config)
    store = Checkpoints(run.checkpoints, Identity(result_values(config), "", ""), keep_last=2, keep_best=0,
                        asynchronous=True, fence=None)  # fmt: skip
    session = build_session(config, world, ShardSet.open(Path(place)), run.model, store, monitor, StopRequest())
    with SnapshotWriter(registry, snapshot_path(Path(directory), world.rank)):
        train(session)
    session.close()
    return moments


def attack(port: int, slot: float, over: Any, counts: Any) -> None:
    """Attacks in every second slot until told that it is over; counts our own scrapes, asked and answered."""
    clients: list[socket.socket] = []
    due = time.time()
    while not over.is_set():
        now = time.time()
        if now >= due:
            due = now + 1
            counts[2 * in_abuse(now, slot)] += 1
            counts[2 * in_abuse(now, slot) + 1] += _scrape(port)
        if not in_abuse(now, slot):
            _close(clients)
            time.sleep(0.05)
            continue
        _harass(port, clients)
    _close(clients)


def _harass(port: int, clients: list[socket.socket]) -> None:
    """A tenth of a second of everything."""
    begin = time.time()
    with suppress(OSError):
        for _ in range(min(100, IDLE + SLOW - len(clients))):
            clients.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            clients[-1].setblocking(False)
        for client in clients[-SLOW:]:
            with suppress(OSError):
                client.send(b"G")
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 20_000)
    for _ in range(SCRAPES // 10):
        _scrape(port)
    for client in clients[: len(clients) // 10]:  # those that were hung up on come again
        client.close()
    del clients[: len(clients) // 10]
    time.sleep(max(0.0, begin + 0.1 - time.time()))


def _scrape(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return b"podscale_train_images_total" in answer.read()
    except (urllib.error.URLError, OSError):
        return False


def _close(clients: list[socket.socket]) -> None:
    for client in clients:
        client.close()
    clients.clear()


@contextmanager
def attacked(port: int, slot: float) -> Iterator[Any]:
    """Attacks from another process; gives the counts of our scrapes, in quiet and in abuse."""
    context = multiprocessing.get_context("spawn")
    over, counts = context.Event(), context.Array("i", 4)
    process = context.Process(target=attack, args=(port, slot, over, counts))
    process.start()
    try:
        yield counts
    finally:
        over.set()
        process.join(30)
        process.kill()


def per_slot(moments: list[Moment], slot: float) -> dict[int, tuple[float, float]]:
    """CPU and wall milliseconds of a step by number of the slot, of slots with three steps or more."""
    found: dict[int, list[Moment]] = {}
    for moment in moments:
        found.setdefault(int(moment[0] / slot), []).append(moment)
    return {
        number: ((ends[-1][1] - ends[0][1]) / (len(ends) - 1) * 1e3, (ends[-1][0] - ends[0][0]) / (len(ends) - 1) * 1e3)
        for number, ends in found.items()
        if len(ends) >= 3
    }


def abuse(config: RunConfig, place: str, scratch: Path, slot: float) -> list[str]:
    """The table of what abuse costs."""
    server = MetricsServer("127.0.0.1", 0, MergedMetrics(scratch, CollectorRegistry())).start()
    with attacked(server.port, slot) as counts:
        before, begin = time.process_time(), time.perf_counter()
        ranks = run_world(2, recorded_training, config.model_dump_json(), place, str(scratch))
        serving = (time.process_time() - before) / (time.perf_counter() - begin)
        asked, answered, harassed_asked, harassed_answered = list(counts)
    server.close()
    lines = [
        "| rank | CPU ms a step, quiet | abused | abused / quiet, median of pairs (quartiles) | pairs | wall ms, quiet "
        "| abused |",
        "|---|---:|---:|---|---:|---:|---:|",
    ]
    for rank, moments in enumerate(ranks):
        slots = per_slot(moments[10:], slot)  # the first steps warm caches
        pairs = [(slots[n - 1], slots[n]) for n in slots if n % 2 == 1 and n - 1 in slots]
        ratios = [abused[0] / quiet[0] for quiet, abused in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cpu, harassed, wall, harassed_wall = (
            statistics.median(pair[side][column] for pair in pairs) for column in (0, 1) for side in (0, 1)
        )
        lines.append(
            f"| {rank} | {cpu:.1f} | {harassed:.1f} | {middle - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%}) | "
            f"{len(pairs)} | {wall:.0f} | {harassed_wall:.0f} |"
        )
    return [
        *lines,
        "",
        f"Of our own scrapes, one a second, {answered} of {asked} were answered in quiet and {harassed_answered} of "
        f"{harassed_asked} under abuse; {server.scrapes} scrapes were answered in all and {server.shed} connections "
        f"hung up on. Serving took {serving:.1%} of one core over both, in the process of the supervisor.",
    ]
