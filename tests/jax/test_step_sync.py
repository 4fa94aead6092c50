"""Between two steps the host only dispatches work: it transfers batches and statuses, and never waits."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from podscale.distributed.step_status import STATUS_LAG, StepStatus
from podscale.jax.device_prefetcher import DeviceBatches
from podscale.jax.trainer import JaxTrainer
from tests.support.engines import document, lines_of, train_in_jax
from tests.support.shard_set import make_shard_set

pytestmark = [pytest.mark.timeout(900), pytest.mark.shallow]  # compiles whole steps, possibly on a busy machine
LARS = {"name": "lars", "trust_coefficient": 0.02, "weight_decay": 1e-3}
SHARDED = {"algorithm": "torus2d", "row": 4, "bucket_mb": 0.1}
AT_THE_END = {"evaluate__every_epochs": 5, "checkpoint": {"every_steps": 0, "every_epochs": 0}}
TIMEOUT_SECONDS = 30.0
"""Time in which a host that does not wait dispatches the next call, seconds."""


class SlowDevices:
    """Devices that finish a call only after the host has dispatched `STATUS_LAG` more or drains the statuses."""

    def __init__(self) -> None:
        self.late: list[int] = []
        """Calls for which the host waited instead."""
        self.calls = 0
        self._drained = False
        self._changed = threading.Condition()

    def slow_down(self, session: JaxTrainer) -> None:
        run_steps, drain = session.step.run_steps, session.step_sync.drain

        @jax.jit
        def held(state: Any, results: Any) -> Any:
            io_callback(self._hold, None, state.number)
            return jax.tree.map(jnp.copy, (state, results))

        def called(*arguments: Any) -> Any:
            found = held(*run_steps(*arguments))
            with self._changed:
                self.calls += 1
                self._changed.notify_all()
            return found

        def drained() -> list[StepStatus]:
            with self._changed:
                self._drained = True
                self._changed.notify_all()
            return drain()

        object.__setattr__(session.step, "run_steps", called)
        session.step_sync.drain = drained  # type: ignore[method-assign]

    def _hold(self, number: Any) -> None:
        call = int(number)
        with self._changed:
            if not self._changed.wait_for(lambda: self._drained or self.calls >= call + STATUS_LAG, TIMEOUT_SECONDS):
                self.late.append(call)


def test_the_host_does_not_wait_for_the_devices(tmp_path: Path) -> None:
    """Every step may be logged, because its values and the statuses have arrived by then."""
    shards, devices = make_shard_set(tmp_path / "shards"), SlowDevices()
    config = document(tmp_path, train__epochs=5, telemetry__log_every=1, **AT_THE_END)
    result = train_in_jax(config, shards, 2, devices.slow_down)  # a single device computes in the host's thread
    assert devices.late == []
    assert devices.calls == result.steps == len(lines_of(config, "step")) == 15


def test_steps_transfer_only_batches_and_statuses(tmp_path: Path) -> None:
    """Up to four steps a call, with sharded weights; a call ends at a log line.

    On CPUs JAX guards transfers to devices and between them, but not those to the host.
    """
    shards = make_shard_set(tmp_path / "shards")
    config = document(
        tmp_path,
        train__engine="jax",
        train__steps_per_call=4,
        train__optimizer=LARS,
        train__weight_update="sharded",
        train__all_reduce=SHARDED,
        telemetry__log_every=5,
        **AT_THE_END,
    )
    done: list[int] = []

    def guard(session: JaxTrainer) -> None:
        batches, train_step = session.batches, session.train_step

        def guarded_batches() -> Iterator[DeviceBatches]:
            going = batches()
            while True:
                with jax.transfer_guard("disallow"):
                    batch = next(going, None)
                if batch is None:
                    return
                yield batch

        def guarded_step(batch: DeviceBatches) -> list[StepStatus]:
            compiles = session.progress.step == 0
            with jax.transfer_guard("allow" if compiles else "disallow"):
                statuses = train_step(batch)
            done.append(session.progress.step)
            return statuses

        session.batches = guarded_batches  # type: ignore[method-assign]
        session.train_step = guarded_step  # type: ignore[method-assign]

    train_in_jax(config, shards, 8, guard)
    assert done == [4, 5, 9, 10, 12]
    with pytest.raises(Exception, match="Disallowed host-to-device"), jax.transfer_guard("disallow"):
        jax.jit(lambda count: count)(np.int32(1))
