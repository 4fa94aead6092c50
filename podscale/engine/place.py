"""What the supervisor hands to each rank, of whichever engine."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from podscale.config import RunConfig
from podscale.errors import PodscaleError
from podscale.runs import RunDirectory
from podscale.runs.lease import lease_fence
from podscale.util import env
from podscale.worker_exit import WorkerReport, report_and_exit


@dataclass(frozen=True)
class WorkerEnv:
    """One rank's part of a stage.

    config: the resolved document. stage: `train` or `evaluate`. shard_set: its location. rank_directory: local to the
    pod; metrics-<rank>.prom and outcome-<rank>.json go there. fence_number: number of the supervisor's lease, if it has
    one.
    """

    config: RunConfig
    stage: str
    shard_set: str
    rank_directory: Path
    fence_number: int | None
    rank: int

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> "WorkerEnv":
        """Read what the supervisor passes to a worker (docs/environment.md), and RANK."""
        return cls(
            config=RunConfig.model_validate_json(environ[env.CONFIG]),
            stage=environ[env.STAGE],
            shard_set=environ[env.SHARD_SET],
            rank_directory=Path(environ[env.RANK_DIR]),
            fence_number=env.read_number(env.FENCE, environ),
            rank=int(environ.get("RANK", "0")),
        )

    def exit(self, error: PodscaleError) -> NoReturn:
        """Ends this process because of `error`, from whichever thread finds it."""
        report_and_exit(self.rank_directory, self.rank, WorkerReport(int(error.exit_code), str(error)))

    def fence(self, run: RunDirectory) -> Callable[[], None] | None:
        """Raises where a newer launch writes the run directory; None without a lease."""
        return None if self.fence_number is None else lease_fence(run.lease, self.fence_number)
