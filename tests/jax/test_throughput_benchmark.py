"""Times of `podscale bench train` on JAX: a call returns at once, its steps are done later."""

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from podscale.distributed.step_status import STATUS_LAG, StepStatus
from podscale.jax import throughput_benchmark
from podscale.jax.throughput_benchmark import time_steps

DISPATCH_SECONDS = 0.001


class Device:
    """Trainer on a device of its own clock: a call is queued in a millisecond, and its steps take `step_seconds`."""

    def __init__(self, step_seconds: list[float], steps_per_call: int) -> None:
        self.now, self.free = 100.0, 100.0
        self.step_seconds, self.steps_per_call = step_seconds, steps_per_call
        self.progress, self.state = SimpleNamespace(step=0), SimpleNamespace(device_state=np.zeros(1))
        self.step_sync, self.seen = self, list[int]()
        self._calls: deque[tuple[float, range]] = deque()

    def batches(self) -> Iterator[int]:
        while self.progress.step < len(self.step_seconds):
            yield min(self.steps_per_call, len(self.step_seconds) - self.progress.step)

    def train_step(self, count: int) -> list[StepStatus]:
        steps = range(self.progress.step, self.progress.step + count)
        self.now += DISPATCH_SECONDS
        self.free = max(self.free, self.now) + sum(self.step_seconds[step] for step in steps)
        self._calls.append((self.free, steps))
        self.progress.step = steps.stop
        return self._arrived(STATUS_LAG)

    def drain(self) -> list[StepStatus]:
        return self._arrived(0)

    def apply_status(self, statuses: list[StepStatus]) -> None:
        self.seen += [status.step for status in statuses]

    def _arrived(self, keep: int) -> list[StepStatus]:
        statuses: list[Any] = []
        while len(self._calls) > keep:
            ready, steps = self._calls.popleft()
            self.now = max(self.now, ready)
            statuses += [SimpleNamespace(step=step + 1) for step in steps]
        return statuses


def measured(monkeypatch: pytest.MonkeyPatch, device: Device) -> list[float]:
    monkeypatch.setattr(throughput_benchmark.time, "perf_counter", lambda: device.now)
    return time_steps(device, device.batches(), len(device.step_seconds))  # type: ignore[arg-type]


def test_dispatch_is_not_taken_for_a_step() -> None:
    device = Device([0.05] * 10, 1)
    with pytest.MonkeyPatch.context() as patch:
        seconds = measured(patch, device)
    assert seconds == pytest.approx([0.05] * 10, abs=2 * DISPATCH_SECONDS)
    assert sum(seconds) == pytest.approx(device.free - 100.0)  # all that the device did, no less


def test_steps_of_a_call_share_its_time() -> None:
    device = Device([0.02] * 3 + [0.04] * 3 + [0.02] * 7, 3)
    with pytest.MonkeyPatch.context() as patch:
        seconds = measured(patch, device)
    assert seconds == pytest.approx([0.02] * 3 + [0.04] * 3 + [0.02] * 7, abs=2 * DISPATCH_SECONDS)
    assert device.now == device.free


def test_a_slow_step_is_seen() -> None:
    with pytest.MonkeyPatch.context() as patch:
        seconds = measured(patch, Device([0.02] * 4 + [0.5] + [0.02] * 15, 1))
    assert [number for number, second in enumerate(seconds) if second > 0.1] == [4]


def test_the_last_steps_are_waited_for_and_counted() -> None:
    device = Device([0.3, 0.3], 1)  # fewer than the results are late
    with pytest.MonkeyPatch.context() as patch:
        assert measured(patch, device) == pytest.approx([0.3, 0.3], abs=2 * DISPATCH_SECONDS)
