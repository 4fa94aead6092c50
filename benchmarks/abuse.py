"""What clients that mean harm cost a real training: the part of benchmarks/telemetry.py about abuse.

One training on two processes, served as a run is. In two of three slots of some seconds another process keeps 1,000
idle connections open, 100 that send their request a byte at a time, sends headers without end, and scrapes 200 times a
second; a scraper of ours comes once a second all the time. Compared is the CPU time of a step between neighbouring
slots, because wall time on a busy machine tells more of the machine.

Whoever attacks needs a processor, and so does whoever answers; where they share cores and caches with the ranks, the
ranks' steps take longer whatever is attacked. So one of the two slots goes to a bystander: the same server, in a
process that has nothing to do with the training. What abuse of the run costs beyond that, the endpoint is to blame for.
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

from overhead import WARM_STEPS, median_interval
from prometheus_client import CollectorRegistry
from world import run_world

from podscale.config import RunConfig
from podscale.data.shard_set import ShardSet
from podscale.distributed.step_status import StopRequest
from podscale.pytorch.trainer import build_trainer
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.registry import MergedMetrics, SnapshotWriter, snapshot_path
from podscale.telemetry.server import MetricsServer
from podscale.training.trainer import train
from podscale.training.training_logger import TrainingLogger
from podscale.training.worker_stages import open_checkpoint_store

IDLE, SLOW, SCRAPES = 1000, 100, 200
QUIET, BYSTANDER, RUN = range(3)
"""What is attacked in a slot; slots come in this order."""
Moment = tuple[float, float]
"""When a step ended, and the CPU seconds of its process until then."""


def target(moment: float, slot: float) -> int:
    """What is attacked at that time."""
    return int(moment / slot) % 3


def recorded_training(world: World, document: str, place: str, directory: str) -> list[Moment]:
    """Trains the document with all telemetry; a moment for each step."""
    config = RunConfig.model_validate_json(document)
    moments: list[Moment] = []

    class Recording(TrainingLogger):
        def step_done(self, step: int, images: int, bad_records: int) -> None:
            super().step_done(step, images, bad_records)
            moments.append((time.time(), time.process_time()))

    registry = CollectorRegistry()
    monitor = Recording(TrainMetrics(registry, rank=world.rank, run=config.run.id), None, log_every=10)
    run = RunDirectory.for_config(config)
    shard_set = ShardSet.open(Path(place))
    store = open_checkpoint_store(config, run, shard_set)
    session = build_trainer(config, world, shard_set, run.model, store, monitor, StopRequest())
    with SnapshotWriter(registry, snapshot_path(Path(directory), world.rank)):
        train(session)
    session.close()
    return moments


def attack(ports: tuple[int, int], slot: float, over: Any, counts: Any) -> None:
    """Attacks bystander and run, whose ports these are, in turn until told that it is over; counts our own scrapes of
    the run, asked and answered, by what is attacked meanwhile."""
    clients: list[socket.socket] = []
    due, before = time.time(), QUIET
    while not over.is_set():
        now = time.time()
        attacked = target(now, slot)
        if now >= due:
            due = now + 1
            counts[2 * attacked] += 1
            counts[2 * attacked + 1] += _scrape(ports[-1])
        if attacked != before:
            _close(clients)
            before = attacked
        if attacked == QUIET:
            time.sleep(0.05)
        else:
            _harass(ports[attacked - 1], clients)
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


def bystand(directory: str, port: Any, over: Any) -> None:
    """Serves snapshots of ranks that no longer change, until told that it is over."""
    server = MetricsServer("127.0.0.1", 0, MergedMetrics(Path(directory), CollectorRegistry())).start()
    port.value = server.port
    over.wait()
    server.close()


@contextmanager
def attacked(port: int, bystander: Path, slot: float) -> Iterator[Any]:
    """Attacks from another process; gives the counts of our scrapes, by what is attacked."""
    context = multiprocessing.get_context("spawn")
    over, counts, other = context.Event(), context.Array("i", 6), context.Value("i", 0)
    server = context.Process(target=bystand, args=(str(bystander), other, over))
    server.start()
    while not other.value and server.is_alive():
        time.sleep(0.05)
    attacker = context.Process(target=attack, args=((other.value, port), slot, over, counts))
    attacker.start()
    try:
        yield counts
    finally:
        over.set()
        for process in (attacker, server):
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
    bystander = scratch / "bystander"
    bystander.mkdir()
    for rank in range(2):
        registry = CollectorRegistry()
        TrainMetrics(registry, rank=rank, run=config.run.id)
        SnapshotWriter(registry, snapshot_path(bystander, rank)).close()
    server = MetricsServer("127.0.0.1", 0, MergedMetrics(scratch, CollectorRegistry())).start()
    with attacked(server.port, bystander, slot) as counts:
        before, begin = time.process_time(), time.perf_counter()
        ranks = run_world(2, recorded_training, config.model_dump_json(), place, str(scratch))
        serving = (time.process_time() - before) / (time.perf_counter() - begin)
        asked, answered = counts[::2], counts[1::2]
    server.close()
    lines = [
        "| rank | CPU ms a step: quiet | bystander attacked | run attacked "
        "| run / bystander, median (95 % of resamples) | bystander / quiet, median | slots of each "
        "| wall ms: quiet | bystander | run |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for rank, moments in enumerate(ranks):
        slots = per_slot(moments[WARM_STEPS:], slot)
        rounds = [[slots[n + k] for k in range(3)] for n in slots if n % 3 == QUIET and {n + 1, n + 2} <= slots.keys()]
        if len(rounds) < 2:
            raise SystemExit(f"too short for slots of {slot:g} s: give more --epochs or a shorter --slot")
        cpu, wall = ([statistics.median(found[k][column] for found in rounds) for k in range(3)] for column in (0, 1))
        ratios = [found[RUN][0] / found[BYSTANDER][0] for found in rounds]
        beside = statistics.median(found[BYSTANDER][0] / found[QUIET][0] for found in rounds)
        low, high = median_interval(ratios)
        lines.append(
            f"| {rank} | {cpu[QUIET]:.1f} | {cpu[BYSTANDER]:.1f} | {cpu[RUN]:.1f} "
            f"| {statistics.median(ratios) - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%}) "
            f"| {beside - 1:+.1%} | {len(rounds)} | {wall[QUIET]:.0f} | {wall[BYSTANDER]:.0f} | {wall[RUN]:.0f} |"
        )
    return [
        *lines,
        "",
        f"Of our own scrapes of the run, one a second, {answered[QUIET]} of {asked[QUIET]} were answered in quiet, "
        f"{answered[BYSTANDER]} of {asked[BYSTANDER]} while the bystander was attacked, and {answered[RUN]} of "
        f"{asked[RUN]} while the run itself was; {server.scrapes} scrapes of the run were answered in all and "
        f"{server.shed_connections} connections hung up on. Serving took {serving:.1%} of one core on average over all slots, "
        "in the process of the supervisor.",
    ]
