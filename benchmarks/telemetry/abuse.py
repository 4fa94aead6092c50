"""Cost of hostile clients to a real training: part `abuse` of this benchmark.

One training on two processes, served as a run is. In two of three slots of some seconds another process keeps idle
connections open, sends requests a byte at a time, sends headers without end, and scrapes fast; a scraper of ours comes
once a second all the time. The figure is the CPU time of a step, compared between neighbouring slots, because wall time
on a busy machine says more about the machine.

An attacker needs a processor, and so does the server; if they share cores and caches with the ranks, the ranks' steps
take longer whatever is attacked. So one of the two slots goes to a bystander: the same server, in a process that has
nothing to do with the training. The endpoint is to blame for what abuse of the run costs beyond that.
"""

import resource
import socket
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from multiprocessing.synchronize import Event
from pathlib import Path

from prometheus_client import CollectorRegistry

from benchmarks.measure import median_interval
from benchmarks.telemetry.training import Moment, Pace, Recorder, lengthened, run_training
from benchmarks.world import process_context, run_world
from podscale.config import RunConfig
from podscale.distributed.step_status import StopRequest
from podscale.pytorch.world import World
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.registry import MergedMetrics, SnapshotWriter, snapshot_path
from podscale.telemetry.server import MetricsServer

QUIET, BYSTANDER, RUN = range(3)
"""Target of a slot; slots come in this order."""
STEPS = 3
"""Steps of a slot that counts, at least."""


@dataclass(frozen=True)
class Force:
    """Strength of an attack: idle connections, slow ones, scrapes a second."""

    idle: int = 1000
    slow: int = 100
    scrapes: int = 200


@dataclass(frozen=True)
class Limits:
    """Length of the measurement: rounds of three slots, and seconds of a slot."""

    rounds: int
    slot: float


def target(moment: float, slot: float) -> int:
    """Target of the attack at that time."""
    return int(moment / slot) % 3


def recorded_training(world: World, document: str, place: str, directory: str, limits: Limits) -> list[Moment]:
    """Train the document with all telemetry until there are enough slots; returns a moment for each step."""
    config, stop = RunConfig.model_validate_json(document), StopRequest()
    registry = CollectorRegistry()

    def enough(moments: list[Moment]) -> bool:
        crossed = len(moments) > 1 and int(moments[-1].time / limits.slot) > int(moments[-2].time / limits.slot)
        # one more than asked for, because the other rank may lack a step of a slot
        return crossed and len(whole_rounds(per_slot(moments, limits.slot))) > limits.rounds

    recorder = Recorder(TrainMetrics(registry, rank=world.rank, run=config.run.id), stop, enough)
    with SnapshotWriter(registry, snapshot_path(Path(directory), world.rank)):
        run_training(world, config, place, recorder, stop=stop)
    return recorder.moments


def attack(ports: tuple[int, int], slot: float, force: Force, over: Event, counts: "SynchronizedArray[int]") -> None:
    """Attack bystander and run in turn until it is over.

    Args:
        ports: of bystander and run.
        slot: seconds.
        force: of the attack.
        over: set at the end.
        counts: our own scrapes of the run, asked and answered, by target.
    """
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
            _harass(ports[attacked - 1], force, clients)
    _close(clients)


def _harass(port: int, force: Force, clients: list[socket.socket]) -> None:
    """A tenth of a second of everything."""
    begin = time.time()
    with suppress(OSError):
        for _ in range(min(100, force.idle + force.slow - len(clients))):
            clients.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            clients[-1].setblocking(False)
        for client in clients[-force.slow :]:
            with suppress(OSError):
                client.send(b"G")
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 20_000)
    for _ in range(force.scrapes // 10):
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


def raise_file_limit(needed: int) -> None:
    """Allow this process and its children so many open files; the usual 1,024 are too few for the attack."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(f"the attack needs {needed:,} open files (got {hard:,}). Raise the hard limit: ulimit -Hn")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def bystand(directory: str, port: "Synchronized[int]", over: Event) -> None:
    """Serve snapshots of ranks that no longer change, until it is over."""
    server = MetricsServer("127.0.0.1", 0, MergedMetrics(Path(directory), CollectorRegistry())).start()
    port.value = server.port
    over.wait()
    server.close()


@contextmanager
def attacked(port: int, bystander: Path, slot: float, force: Force) -> Iterator["SynchronizedArray[int]"]:
    """Attack from another process for the time of the block; gives the counts of our scrapes, by target."""
    raise_file_limit(2 * (force.idle + force.slow) + 100)
    context = process_context()
    over, counts, other = context.Event(), context.Array("i", 6), context.Value("i", 0)
    server = context.Process(target=bystand, args=(str(bystander), other, over))
    server.start()
    while not other.value:
        if not server.is_alive():
            raise RuntimeError("the bystander did not start")
        time.sleep(0.05)
    attacker = context.Process(target=attack, args=((other.value, port), slot, force, over, counts))
    attacker.start()
    try:
        yield counts
    finally:
        over.set()
        for process in (attacker, server):
            process.join(30)
            process.kill()


def per_slot(moments: Sequence[Moment], slot: float) -> dict[int, tuple[float, float]]:
    """CPU and wall milliseconds of a step by number of the slot, for slots with enough steps."""
    found: dict[int, list[Moment]] = {}
    for moment in moments:
        found.setdefault(int(moment.time / slot), []).append(moment)
    return {
        number: _milliseconds(ends[0], ends[-1], len(ends) - 1) for number, ends in found.items() if len(ends) >= STEPS
    }


def _milliseconds(first: Moment, last: Moment, steps: int) -> tuple[float, float]:
    """CPU and wall milliseconds of a step between two moments."""
    return (last.cpu - first.cpu) / steps * 1e3, (last.time - first.time) / steps * 1e3


def whole_rounds(slots: dict[int, tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Slots in threes: quiet, bystander, run."""
    return [[slots[n + k] for k in range(3)] for n in slots if n % 3 == QUIET and {n + 1, n + 2} <= slots.keys()]


def table(config: RunConfig, place: str, scratch: Path, limits: Limits, pace: Pace, *, small: bool) -> list[str]:
    """Table of the cost of abuse.

    Args:
        config: run document; the training ends when there are enough slots.
        place: directory of the shard set.
        scratch: folder of the ranks' snapshots.
        limits: rounds and slots.
        pace: of this machine.
        small: a weak attack.
    """
    force = Force(20, 5, 20) if small else Force()
    longest = 4 * 3 * (limits.rounds + 2) * limits.slot  # seconds; a stop comes long before
    config = lengthened(config, pace.epochs(longest / pace.step))
    bystander = scratch / "bystander"
    bystander.mkdir()
    for rank in range(2):
        registry = CollectorRegistry()
        TrainMetrics(registry, rank=rank, run=config.run.id)
        SnapshotWriter(registry, snapshot_path(bystander, rank)).close()
    server = MetricsServer("127.0.0.1", 0, MergedMetrics(scratch, CollectorRegistry())).start()
    try:
        with attacked(server.port, bystander, limits.slot, force) as counts:
            before, begin = time.process_time(), time.perf_counter()
            ranks = run_world(2, recorded_training, config.model_dump_json(), place, str(scratch), limits)
            serving = (time.process_time() - before) / (time.perf_counter() - begin)
            asked, answered = counts[::2], counts[1::2]
    finally:
        server.close()
    return [
        f"The attacker keeps {force.idle:,} idle connections open and {force.slow:,} slow ones, and scrapes "
        f"{force.scrapes} times a second; slots of {limits.slot:g} s.",
        "",
        "| rank | CPU ms a step: quiet | bystander attacked | run attacked "
        "| run / bystander, median (95 % of resamples) | bystander / quiet, median | slots of each "
        "| wall ms: quiet | bystander | run |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|",
        *(row(rank, whole_rounds(per_slot(moments, limits.slot))) for rank, moments in enumerate(ranks)),
        "",
        f"Of our own scrapes of the run, one a second, {answered[QUIET]} of {asked[QUIET]} were answered in quiet, "
        f"{answered[BYSTANDER]} of {asked[BYSTANDER]} while the bystander was attacked, and {answered[RUN]} of "
        f"{asked[RUN]} while the run itself was; {server.scrapes} scrapes of the run were answered in all and "
        f"{server.shed_connections} connections hung up on. Serving took {serving:.1%} of one core on average over all "
        "slots, in the process of the supervisor.",
    ]


def row(rank: int, rounds: list[list[tuple[float, float]]]) -> str:
    """Row of a rank. Args: rounds: CPU and wall ms of a step in quiet, with the bystander and the run attacked."""
    if len(rounds) < 2:
        raise SystemExit(
            f"rank {rank}: too few slots with {STEPS} steps (got {len(rounds)} rounds). Give a longer --slot."
        )
    cpu, wall = ([statistics.median(found[k][column] for found in rounds) for k in range(3)] for column in (0, 1))
    ratios = [found[RUN][0] / found[BYSTANDER][0] for found in rounds]
    beside = statistics.median(found[BYSTANDER][0] / found[QUIET][0] for found in rounds)
    low, high = median_interval(ratios)
    return (
        f"| {rank} | {cpu[QUIET]:.1f} | {cpu[BYSTANDER]:.1f} | {cpu[RUN]:.1f} "
        f"| {statistics.median(ratios) - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%}) "
        f"| {beside - 1:+.1%} | {len(rounds)} | {wall[QUIET]:.0f} | {wall[BYSTANDER]:.0f} | {wall[RUN]:.0f} |"
    )
