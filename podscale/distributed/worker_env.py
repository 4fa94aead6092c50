"""Environment of a rank: its rank numbers and store address, and the stage that the supervisor gave it.

`launch.fork_launcher` or torchrun sets the rank numbers. `launch.rendezvous` reads the variables of the cluster's
launchers (JAXJob, TrainJob, JobSet, TPU slice) in each pod before. JAX's own cluster detection is not used: it knows
some of these launchers only.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from podscale.config import RunConfig
from podscale.distributed.worker_exit import WorkerReport, report_and_exit
from podscale.errors import InputError, PodscaleError
from podscale.runs import RunDirectory
from podscale.runs.lease import lease_fence
from podscale.util import env, processes

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class RankEnv:
    """Rank numbers of a process, in the run, in its pod and by slice.

    `store_address` and `store_port` locate the store of the run; "" and 0 for a single process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    store_address: str = ""
    store_port: int = 0
    slice_id: int = 0
    slice_count: int = 1


def read_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """Return the rank numbers that the launcher set; those of a single process if it set none.

    Raises:
        InputError: Some variables are missing or contradict each other.
    """
    if environ.get("WORLD_SIZE", "1") == "1" and env.STORE not in environ:
        return RankEnv()
    missing = [name for name in (*RANK_VARIABLES, env.STORE) if not environ.get(name)]
    if (env.SLICE in environ) != (env.SLICES in environ) and env.SLICES in environ:
        missing.append(env.SLICE)
    if missing:
        raise InputError(
            f"incomplete rank environment: {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing",
            field=missing[0],
            hint="`podscale train` starts ranks with all of it.",
        )
    rank, world_size, local_rank, local_world_size = (env.number(name, environ[name]) for name in RANK_VARIABLES)
    address, _, port = environ[env.STORE].rpartition(":")
    slice_id, slice_count = 0, 1
    if env.SLICES in environ:
        slice_id, slice_count = env.number(env.SLICE, environ[env.SLICE]), env.number(env.SLICES, environ[env.SLICES])
    rank_env = RankEnv(
        rank, world_size, local_rank, local_world_size, address, env.number(env.STORE, port), slice_id, slice_count
    )
    if not (
        0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size and 0 <= slice_id < slice_count
    ):
        raise InputError(f"the numbers of this rank contradict each other: {rank_env}", field="RANK", got=rank)
    return rank_env


def launch_age(environment: Mapping[str, str] = os.environ) -> float:
    """Return the seconds since this launch began: since the pod's start, or the process's if torchrun restarted it."""
    began_at = env.read_seconds(env.LIFE_BEGAN, environment)
    restarted = environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return processes.process_age() if began_at is None or restarted else max(0.0, time.monotonic() - began_at)


@dataclass(frozen=True)
class WorkerEnv:
    """Stage and paths of one rank.

    Args:
        config: Resolved run document.
        stage: `train` or `evaluate`.
        shard_set: Location of the shards.
        rank_directory: Directory local to the pod, for metrics-<rank>.prom and outcome-<rank>.json.
        fence_number: Number of the supervisor's lease, None without a lease.
        rank: Rank of this process in the run.
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
        """Report `error` and exit this process; safe to call from any thread."""
        report_and_exit(self.rank_directory, self.rank, WorkerReport(int(error.exit_code), str(error)))

    def fence(self, run: RunDirectory) -> Callable[[], None] | None:
        """Return a check that raises if a newer launch writes the run directory; None without a lease."""
        return None if self.fence_number is None else lease_fence(run.lease, self.fence_number)
