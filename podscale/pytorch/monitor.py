"""What a training tells the outside: phases, metrics and lines of metrics.jsonl. It never waits for the device."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from podscale.checkpoint import Passed, Saved
from podscale.pytorch.control import Word
from podscale.pytorch.evaluate import Evaluation

BUSY = ("data_wait", "h2d", "forward_backward")
"""Phases before a rank begins to wait for others: what finds a slow one."""

BETWEEN = ("checkpoint", "evaluation")
"""Phases between updates, which are no part of a step's duration."""


class Observer(Protocol):
    """One place that is told what happens: the metrics of a rank, the log of rank 0."""

    def phase(self, name: str, seconds: float) -> None: ...
    def updated(self, images: int, seconds: float, bad_records: int) -> None: ...
    def line(self, kind: str, values: dict[str, Any]) -> None:
        """kind is `step`, `evaluation` or `event`; the values are JSON, as design.md names them."""
        ...


class Monitor:
    """Times the phases of every step and passes on what is worth a line; the rest is summed up until the next line.

    Phases are host times: on a GPU, work that was only queued shows where the host first waits for it.
    """

    def __init__(
        self,
        observers: list[Observer],
        *,
        log_every: int,
        steps: int,
        global_batch: int,
        steps_per_epoch: float,
        learning_rate: Callable[[int], float],
    ) -> None:
        self._observers = observers
        self._log_every, self._steps, self._global_batch = log_every, steps, global_batch
        self._steps_per_epoch, self._learning_rate = steps_per_epoch, learning_rate
        self._step: dict[str, float] = defaultdict(float)
        self._since_line: dict[str, float] = defaultdict(float)
        self._step_started = self._line_time = time.perf_counter()
        self._line_step = 0
        self._bad_records = 0
        self._lock = threading.Lock()  # the writer of checkpoints reports from its own thread

    def start(self, step: int) -> None:
        """The clock of the first step starts now; `step` updates were done before."""
        self._step_started = self._line_time = time.perf_counter()
        self._line_step = step
        self._step.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the seconds inside towards the phase `name` of the current step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._step[name] += time.perf_counter() - started

    def busy(self) -> float:
        """Seconds of the current step that this rank did not wait for others."""
        return sum(self._step[name] for name in BUSY)

    def updated(self, images: int, bad_records: int) -> None:
        """Ends a step in which this rank processed `images`; `bad_records` were substituted so far."""
        now = time.perf_counter()
        seconds, self._step_started = now - self._step_started, now
        self._step["other"] += max(0.0, seconds - sum(self._step.values()))
        if bad_records > self._bad_records:
            self.event("bad_record", substituted=bad_records)
        seconds -= sum(self._step[name] for name in BETWEEN)
        for observer in self._observers:
            observer.updated(images, seconds, bad_records - self._bad_records)
            for name, spent in self._step.items():
                observer.phase(name, spent)
        for name, spent in self._step.items():
            self._since_line[name] += spent
        self._bad_records = bad_records
        self._step.clear()

    def word(self, word: Word) -> None:
        """Logs an update once its loss is known, every `log_every` updates and at the end."""
        if not word.finite:
            self.event("skipped_update", step=word.step, loss=str(word.loss))
        if word.step % self._log_every and word.step != self._steps:
            return
        now = time.perf_counter()
        images = (word.step - self._line_step) * self._global_batch
        self._line(
            "step",
            step=word.step,
            epoch=word.step / self._steps_per_epoch,
            loss=word.loss if word.finite else None,
            learning_rate=self._learning_rate(word.step - 1),
            images_per_second=images / max(now - self._line_time, 1e-9),
            slowest={"rank": word.slowest_rank, "milliseconds": word.slowest_milliseconds},
            phases=dict(self._since_line),
        )
        self._line_time, self._line_step = now, word.step
        self._since_line.clear()

    def evaluated(self, step: int, found: Evaluation) -> None:
        self._line(
            "evaluation",
            step=step,
            epoch=step / self._steps_per_epoch,
            top1=found.top1,
            top5=found.top5,
            loss=found.loss,
            images_per_second=found.images / max(found.seconds, 1e-9),
        )

    def saved(self, report: Saved | Passed) -> None:
        """Reports a checkpoint that is complete on disk, or one that could not be used."""
        if isinstance(report, Saved):
            self.event("checkpoint", step=report.step, bytes=report.bytes, seconds=report.seconds, top1=report.top1)
        else:
            self.event("checkpoint_passed", step=report.step, reason=report.reason)

    def event(self, event: str, **values: Any) -> None:
        """Something that happens rarely: start, resumed, checkpoint, skipped_update, bad_record, done."""
        self._line("event", event=event, **values)

    def _line(self, kind: str, **values: Any) -> None:
        with self._lock:
            for observer in self._observers:
                observer.line(kind, values)
