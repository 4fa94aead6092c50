"""The lives of a training as the pod that leads sees them: when each began, and how it ended."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from podscale.errors import ExitCode
from podscale.launch.podtask import WorkerSpec
from podscale.runs import Lease, LeaseLost, RunDirectory
from podscale.telemetry.goodput import GoodputState, after_launch, read_goodput_state, write_goodput_state
from podscale.util import env, processes

logger = logging.getLogger(__name__)

EXIT_CAUSES: Mapping[int, str] = {
    ExitCode.DONE: "done",
    ExitCode.PREEMPTED: "preempted",
    ExitCode.HANG: "hang",
    ExitCode.PEER_LOST: "lost_rank",
}


class LaunchHistory:
    """Writes both into the run's heartbeat, which the training keeps in between.

    Does nothing for other stages, and in a pod that does not hold the lease: where the pods learn only in meeting which
    of them leads, rank 0 counts its life by itself.
    """

    def __init__(self, spec: WorkerSpec, run: RunDirectory, lease: Lease | None) -> None:
        self._path, self._lease = run.goodput, lease if spec.stage == "train" else None
        self._started_at = (
            time.monotonic() - processes.process_age()
        )  # the first life begins with this process: imports count
        self.launches: int | None = None
        """Of the training, over all lives, with the one that has begun; None where nothing is written."""

    def started(self) -> dict[str, str]:
        """A life begins; what its ranks are to find in their environment."""
        if self._lease is not None:
            book = after_launch(read_goodput_state(self._path), time.time(), time.monotonic() - self._started_at)
            self.launches = book.life
            self._write_state(book)
        return {env.LIFE_BEGAN: repr(self._started_at)}

    def ended(self, exit_code: int) -> None:
        """The life has ended with the stage's exit code. The time of the last heartbeat stays as it is."""
        book = read_goodput_state(self._path)
        if book is not None and self._lease is not None:
            self._write_state(replace(book, ended=EXIT_CAUSES.get(exit_code, "failed")))
        self._started_at = time.monotonic()

    def _write_state(self, state: GoodputState) -> None:
        """A full disk costs the ledger accuracy, never the training."""
        assert self._lease is not None
        try:
            write_goodput_state(self._path, state, self._lease.check)
        except LeaseLost:
            return  # its life is of no interest any more
        except OSError as error:
            logger.warning("%s: when launches begin and how they end is not kept: %s", self._path, error.strerror)
