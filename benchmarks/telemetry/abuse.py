"""Part `abuse`: CPU time that hostile clients of the metrics endpoint cost a real training.

A training on two processes serves its metrics as every run does. Time is divided into slots of some seconds. In two of
three slots an attacker keeps idle connections open, sends requests byte by byte, sends headers without end, and scrapes
fast. A regular scraper runs once a second. The result is the CPU time of a step, compared between neighbouring slots,
because wall time depends on other load of the machine.

The attacker and the server share cores and caches with the ranks, which slows their steps whatever is attacked. So one
of the two slots attacks a bystander: the same server, in a process apart from the training. The cost of the endpoint is
the difference between the two.
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
from benchmarks.telemetry.training import StepEnd, StepPace, StepRecorder, run_training, with_epochs
from benchmarks.world import process_context, run_world
from podscale.config import RunConfig
from podscale.distributed.step_status import StopRequest
from podscale.pytorch.world import World
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.registry import MergedMetrics, SnapshotWriter, snapshot_path
from podscale.telemetry.server import MetricsServer

QUIET, BYSTANDER, RUN = range(3)
"""Targets of the slots, in their order."""
STEPS = 3
"""Fewest steps of a slot that counts."""


@dataclass(frozen=True)
class Attack:
    """Strength of an attack: idle connections, slow connections, scrapes per second."""

    idle: int = 1000
    slow: int = 100
    scrapes: int = 200


@dataclass(frozen=True)
class Schedule:
    """Number of rounds of three slots, and seconds of a slot."""

    rounds: int
    slot: float


def target(now: float, slot: float) -> int:
    """Return the target of the attack at a time."""
    return int(now / slot) % 3


def train_recorded(world: World, document: str, shard_set: str, directory: str, schedule: Schedule) -> list[StepEnd]:
    """Train with all telemetry until there are enough rounds; return the end of each step."""
    config, stop = RunConfig.model_validate_json(document), StopRequest()
    registry = CollectorRegistry()

    def enough(ends: list[StepEnd]) -> bool:
        crossed = len(ends) > 1 and int(ends[-1].time / schedule.slot) > int(ends[-2].time / schedule.slot)
        # one more round than requested, because the other rank may have fewer steps in a slot
        return crossed and len(complete_rounds(per_slot(ends, schedule.slot))) > schedule.rounds

    recorder = StepRecorder(TrainMetrics(registry, rank=world.rank, run=config.run.id), stop, enough)
    with SnapshotWriter(registry, snapshot_path(Path(directory), world.rank)):
        run_training(world, config, shard_set, recorder, stop=stop)
    return recorder.step_ends


def run_attacker(
    ports: tuple[int, int], slot: float, attack: Attack, stop: Event, counts: "SynchronizedArray[int]"
) -> None:
    """Attack bystander and run in turn.

    Args:
        ports: ports of bystander and run.
        slot: seconds of a slot.
        counts: regular scrapes of the run, requested and answered, by target.
    """
    clients: list[socket.socket] = []
    due, previous = time.time(), QUIET
    while not stop.is_set():
        now = time.time()
        current = target(now, slot)
        if now >= due:
            due = now + 1
            counts[2 * current] += 1
            counts[2 * current + 1] += _scrape(ports[-1])
        if current != previous:
            _close(clients)
            previous = current
        if current == QUIET:
            time.sleep(0.05)
        else:
            _attack(ports[current - 1], attack, clients)
    _close(clients)


def _attack(port: int, attack: Attack, clients: list[socket.socket]) -> None:
    """Attack in all ways for a tenth of a second."""
    start = time.time()
    with suppress(OSError):
        for _ in range(min(100, attack.idle + attack.slow - len(clients))):
            clients.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            clients[-1].setblocking(False)
        for client in clients[-attack.slow :]:
            with suppress(OSError):
                client.send(b"G")
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 20_000)
    for _ in range(attack.scrapes // 10):
        _scrape(port)
    for client in clients[: len(clients) // 10]:  # reconnect after the server closed them
        client.close()
    del clients[: len(clients) // 10]
    time.sleep(max(0.0, start + 0.1 - time.time()))


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
    """Raise the limit of open files of this process and its children; the usual 1,024 are too few for the attack."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(f"the attack needs {needed:,} open files (got {hard:,}). Raise the hard limit: ulimit -Hn")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def run_bystander(directory: str, port: "Synchronized[int]", stop: Event) -> None:
    """Serve snapshots that no longer change."""
    server = MetricsServer("127.0.0.1", 0, MergedMetrics(Path(directory), CollectorRegistry())).start()
    port.value = server.port
    stop.wait()
    server.close()


@contextmanager
def attacked(port: int, bystander: Path, slot: float, attack: Attack) -> Iterator["SynchronizedArray[int]"]:
    """Attack from another process during the block; yield the counts of regular scrapes, by target."""
    raise_file_limit(2 * (attack.idle + attack.slow) + 100)
    context = process_context()
    stop, counts, bystander_port = context.Event(), context.Array("i", 6), context.Value("i", 0)
    server = context.Process(target=run_bystander, args=(str(bystander), bystander_port, stop))
    server.start()
    while not bystander_port.value:
        if not server.is_alive():
            raise RuntimeError("the bystander did not start")
        time.sleep(0.05)
    ports = bystander_port.value, port
    attacker = context.Process(target=run_attacker, args=(ports, slot, attack, stop, counts))
    attacker.start()
    try:
        yield counts
    finally:
        stop.set()
        for process in (attacker, server):
            process.join(30)
            process.kill()


def per_slot(step_ends: Sequence[StepEnd], slot: float) -> dict[int, tuple[float, float]]:
    """Return CPU and wall milliseconds of a step by number of the slot, for slots with enough steps."""
    slots: dict[int, list[StepEnd]] = {}
    for end in step_ends:
        slots.setdefault(int(end.time / slot), []).append(end)
    return {number: _milliseconds(ends) for number, ends in slots.items() if len(ends) >= STEPS}


def _milliseconds(ends: Sequence[StepEnd]) -> tuple[float, float]:
    first, last, steps = ends[0], ends[-1], len(ends) - 1
    return (last.cpu - first.cpu) / steps * 1e3, (last.time - first.time) / steps * 1e3


def complete_rounds(slots: dict[int, tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Return the slots in threes: quiet, bystander, run."""
    return [[slots[n + k] for k in range(3)] for n in slots if n % 3 == QUIET and {n + 1, n + 2} <= slots.keys()]


def table(
    config: RunConfig, shard_set: str, scratch: Path, schedule: Schedule, pace: StepPace, *, small: bool
) -> list[str]:
    """Return the table of the cost of abuse; the small form is a weak attack. `scratch`: folder of the snapshots."""
    attack = Attack(20, 5, 20) if small else Attack()
    longest = 4 * 3 * (schedule.rounds + 2) * schedule.slot  # seconds; training is stopped long before
    config = with_epochs(config, pace.epochs(longest / pace.step_seconds))
    bystander = scratch / "bystander"
    bystander.mkdir()
    for rank in range(2):
        registry = CollectorRegistry()
        TrainMetrics(registry, rank=rank, run=config.run.id)
        SnapshotWriter(registry, snapshot_path(bystander, rank)).close()
    server = MetricsServer("127.0.0.1", 0, MergedMetrics(scratch, CollectorRegistry())).start()
    try:
        with attacked(server.port, bystander, schedule.slot, attack) as counts:
            cpu_start, start = time.process_time(), time.perf_counter()
            ranks = run_world(2, train_recorded, config.model_dump_json(), shard_set, str(scratch), schedule)
            serving = (time.process_time() - cpu_start) / (time.perf_counter() - start)
            requested, answered = counts[::2], counts[1::2]
    finally:
        server.close()
    return [
        f"The attacker keeps {attack.idle:,} idle connections open and {attack.slow:,} slow ones, and scrapes "
        f"{attack.scrapes} times a second. Each slot of {schedule.slot:g} s has one target: none (quiet), the run's "
        "endpoint, or a bystander, which is the same server in a process apart from the training. An attack takes "
        "cores and caches from the ranks in both cases; run / bystander is the cost of the endpoint itself.",
        "",
        "| rank | CPU ms a step: quiet | bystander attacked | run attacked "
        "| run / bystander, median (95 % of resamples) | bystander / quiet, median | slots of each "
        "| wall ms: quiet | bystander | run |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|",
        *(row(rank, complete_rounds(per_slot(ends, schedule.slot))) for rank, ends in enumerate(ranks)),
        "",
        f"Of the regular scrapes, one a second, {answered[QUIET]} of {requested[QUIET]} were answered in quiet slots, "
        f"{answered[BYSTANDER]} of {requested[BYSTANDER]} while the bystander was attacked, and {answered[RUN]} of "
        f"{requested[RUN]} while the run was. In all, the run answered {server.scrapes} scrapes and closed "
        f"{server.shed_connections} connections. Serving took {serving:.1%} of one core on average over all slots, in "
        "the process of the supervisor.",
    ]


def row(rank: int, rounds: list[list[tuple[float, float]]]) -> str:
    """Return the row of a rank; `rounds`: CPU and wall ms of a step for each target."""
    if len(rounds) < 2:
        raise SystemExit(
            f"rank {rank}: too few slots with {STEPS} steps (got {len(rounds)} rounds). Give a longer --slot."
        )
    cpu, wall = ([statistics.median(slots[k][column] for slots in rounds) for k in range(3)] for column in (0, 1))
    ratios = [slots[RUN][0] / slots[BYSTANDER][0] for slots in rounds]
    bystander = statistics.median(slots[BYSTANDER][0] / slots[QUIET][0] for slots in rounds)
    low, high = median_interval(ratios)
    return (
        f"| {rank} | {cpu[QUIET]:.1f} | {cpu[BYSTANDER]:.1f} | {cpu[RUN]:.1f} "
        f"| {statistics.median(ratios) - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%}) "
        f"| {bystander - 1:+.1%} | {len(rounds)} | {wall[QUIET]:.0f} | {wall[BYSTANDER]:.0f} | {wall[RUN]:.0f} |"
    )
