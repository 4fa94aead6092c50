"""Real training with faults, scraped by a real Prometheus, for the dashboards' pictures.

Two ranks train on photographs of digits. One is slowed down for a while (stopped every other 40 ms). One is killed, and
the run resumes from its newest checkpoint. Then the loaders starve. A second run without faults follows.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from podscale.data.sources.digits import load as load_digits
from podscale.monitoring.local_prometheus import DEFAULT_INTERVALS, LocalPrometheus, run_prometheus
from podscale.telemetry.events import read_records
from tests.support.commands import Command
from tests.support.drawing import Span
from tests.support.faults import slowed

HERE = Path(__file__).parent
PICTURES = 16000
SIDE = 128
BROKEN = 40
LOGGED = 4
"""Lines of the step log after which a run counts as training."""
RUN, SECOND = "digits-b64", "digits-b128"
DOCUMENT: Mapping[str, Any] = {
    "run": {"workspace": ".", "seed": 1},
    "data": {"source": "photographs", "format": "imagefolder", "validation_fraction": 0.1, "shard_bytes": 2000000},
    "input": {"image_size": 16, "loader": "reference", "crop": {"scale": [0.7, 1.0], "flip": 0.0}},
    "model": {"name": "resnet18", "stem": "small", "width": 8},
    "train": {"epochs": 40, "schedule": {"name": "cosine", "learning_rate": 0.1, "warmup_epochs": 1}},
    "evaluate": {"crop_fraction": 1.0, "every_epochs": 0.5},
    "checkpoint": {"every_epochs": 0.25},
    "telemetry": {"log_every": 5, "linger_seconds": 6},
    "claim": {"images_per_second": 400, "hardware": "two cores", "source": "a number to draw"},
    "launch": {"processes": 2, "max_restarts": 2, "grace_seconds": 60},
}


@dataclass(frozen=True)
class Recorded:
    """Time spans in Prometheus: the first run, from sharding on, and both runs."""

    first: Span
    both: Span


def photographs(folder: Path) -> None:
    """Write the embedded digits as JPEGs, one folder per class, each slightly varied; some files are damaged."""
    digits = load_digits()
    random = np.random.default_rng(1)
    for number in range(PICTURES):
        which = number % len(digits["levels"])
        directory = folder / str(digits["labels"][which])
        directory.mkdir(parents=True, exist_ok=True)
        pixels = digits["levels"][which] * 15.0 + random.integers(0, 16, (8, 8))
        path = directory / f"{number:05}.jpg"
        Image.fromarray(pixels.astype(np.uint8)).resize((SIDE, SIDE)).convert("RGB").save(path, quality=85)
        if number < BROKEN:
            path.write_bytes(path.read_bytes()[:300] if number % 2 else b"no picture")


@contextmanager
def record(folder: Path) -> Iterator[Recorded]:
    """Train, and yield the Prometheus that scraped the runs, still running."""
    if not (folder / "photographs").exists():
        photographs(folder / "photographs")
    runs = folder / "runs"
    runs.mkdir()
    with run_prometheus(runs, 0) as prometheus:
        begin = time.time()
        train = _Training(folder, prometheus)
        end = train.first()
        train.second()
        yield Recorded(_span(prometheus, begin, end), _span(prometheus, begin, time.time()))


def _span(prometheus: LocalPrometheus, begin: float, end: float) -> Span:
    return Span(prometheus.url, begin, end, DEFAULT_INTERVALS.scrape_seconds)


class _Training:
    def __init__(self, folder: Path, prometheus: LocalPrometheus) -> None:
        self._folder, self._prometheus = folder, prometheus
        self._starve = folder / "starve"

    def first(self) -> float:
        """Execute the run with all faults; return a time at which it had recovered and was still running."""
        command = self._start(RUN, 64)
        try:
            self._train(RUN, 45)
            with slowed(command.ranks()[1]):
                self._wait(45)
            self._wait(20)
            os.kill(command.ranks()[1], signal.SIGKILL)
            self._train(RUN, 45)
            self._starve.touch()
            self._wait(40)
            self._starve.unlink()
            self._wait(30)
            end = time.time()
            command.process.send_signal(signal.SIGTERM)
            self._until(lambda: command.process.poll() is not None, 120)
            return end
        finally:
            command.kill()

    def second(self) -> None:
        command = self._start(SECOND, 128)
        try:
            self._train(SECOND, 45)
        finally:
            command.kill()

    def _start(self, name: str, batch: int) -> Command:
        document = {**DOCUMENT, "run": {**DOCUMENT["run"], "id": name}}
        document["train"] = {**DOCUMENT["train"], "global_batch": batch}
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        variables = {"PYTHONPATH": str(HERE / "starving"), "PODSCALE_STARVE": str(self._starve)}
        command = Command(self._folder, "run", path.name, variables=variables)
        self._until(lambda: command.process.poll() is not None or len(command.ranks()) == 2, 300)
        return command

    def _train(self, run: str, seconds: float) -> None:
        """Wait for some further steps, without a time limit, and then for `seconds`."""
        log, since = self._folder / "runs" / run / "metrics.jsonl", time.time()

        def moving() -> bool:
            lines = read_records(log) if log.exists() else []
            return sum(line["kind"] == "step" and line["time"] > since for line in lines) >= LOGGED

        self._until(moving, 300)
        self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        self._until(lambda: False, seconds)

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not condition():
            self._prometheus.update_targets()
            time.sleep(0.5)
