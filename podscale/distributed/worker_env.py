"""Environment of a worker: the launchers write it with these classes, and the workers read it.

The supervisor writes a `WorkerEnv`, the same for all workers of a pod. `fork_launcher` adds the `RankEnv` of each, or
torchrun its own variables. `launch.rendezvous` reads the variables of the cluster's launchers (JAXJob, TrainJob,
JobSet, TPU slice) in each pod before: JAX's own cluster detection knows only some of them.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from podscale.config import RunConfig
from podscale.distributed.startup_clock import StartupClock
from podscale.distributed.worker_exit import WorkerReport, report_and_exit
from podscale.errors import InputError, PodscaleError
from podscale.runs import RunDirectory
from podscale.runs.lease import lease_fence
from podscale.util import env

RANK_VARIABLES = (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE)


@dataclass(frozen=True)
class RankEnv:
    """Rank numbers of a process, in the run, in its pod and by slice; by default those of a single process.

    `node` is the number of its pod. `store_address` and `store_port` locate the store of the run; "" and 0 for a single
    process and under torchrun.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    store_address: str = ""
    store_port: int = 0
    slice_id: int = 0
    slice_count: int = 1
    node: int = 0

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> "RankEnv":
        """Read what the fork launcher or torchrun set, by default a single process. Raises InputError if incomplete."""
        if env.read_number(env.WORLD_SIZE, environ) in (None, 1) and env.STORE not in environ:
            return cls()
        has_own_store = env.MASTER_ADDR in environ  # torchrun's
        required = RANK_VARIABLES if has_own_store else (*RANK_VARIABLES, env.STORE)
        missing = [name for name in required if not environ.get(name)]
        if env.SLICES in environ and env.SLICE not in environ:
            missing.append(env.SLICE)
        if missing:
            raise InputError(
                f"incomplete rank environment: {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing",
                field=missing[0],
                hint="Start the ranks by `podscale train`, which sets all of them.",
            )
        rank, world_size, local_rank, local_world_size = (env.number(name, environ[name]) for name in RANK_VARIABLES)
        address, _, port = environ.get(env.STORE, ":0").rpartition(":")
        slice_id, slice_count = 0, 1
        if env.SLICES in environ:
            slice_id, slice_count = (env.number(name, environ[name]) for name in (env.SLICE, env.SLICES))
        node = env.read_number(env.GROUP_RANK, environ)
        rank_env = cls(
            rank,
            world_size,
            local_rank,
            local_world_size,
            store_address=address,
            store_port=env.number(env.STORE, port),
            slice_id=slice_id,
            slice_count=slice_count,
            node=rank // max(1, local_world_size) if node is None else node,
        )
        in_pod = 0 <= local_rank < local_world_size <= world_size
        if not (in_pod and 0 <= rank < world_size and 0 <= slice_id < slice_count):
            raise InputError(f"the numbers of this rank contradict each other: {rank_env}", field=env.RANK, got=rank)
        return rank_env

    def variables(self) -> dict[str, str]:
        """Return the environment variables that `read` reads."""
        numbers = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        variables = dict(zip(RANK_VARIABLES, map(str, numbers), strict=True))
        variables[env.GROUP_RANK] = str(self.node)
        if self.store_address:
            variables[env.STORE] = f"{self.store_address}:{self.store_port}"
        if self.slice_count > 1:
            variables |= {env.SLICE: str(self.slice_id), env.SLICES: str(self.slice_count)}
        return variables


@dataclass(frozen=True)
class WorkerEnv:
    """Stage, paths and lease of a pod's workers, and the rank numbers of this one.

    Args:
        rank_directory: Directory local to the pod, for metrics-<rank>.prom and outcome-<rank>.json.
        rank_env: Rank numbers of this worker; no part of `variables`.
        log_directory: Directory of rank-<k>.log; None: output is not redirected.
        fence_number: Number of the supervisor's lease; None if rank 0 acquires the lease.
        lease_wait_seconds: Longest wait of rank 0 for the lease.
        startup: Clock of the start of this launch, by default from the start of the process.
    """

    config: RunConfig
    stage: str
    shard_set: str
    rank_directory: Path
    rank_env: RankEnv = RankEnv()
    log_directory: Path | None = None
    lease: Path | None = None
    fence_number: int | None = None
    lease_wait_seconds: float | None = None
    startup: StartupClock = field(default_factory=StartupClock)

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> "WorkerEnv":
        """Read what the supervisor and the launcher set. Raises InputError if something is missing or not valid."""
        return cls(
            config=RunConfig.model_validate_json(env.require_text(env.CONFIG, environ)),
            stage=env.require_text(env.STAGE, environ),
            shard_set=env.require_text(env.SHARD_SET, environ),
            rank_directory=env.require_path(env.RANK_DIR, environ),
            rank_env=RankEnv.read(environ),
            log_directory=env.read_path(env.LOG_DIR, environ),
            lease=env.read_path(env.LEASE, environ),
            fence_number=env.read_number(env.FENCE, environ),
            lease_wait_seconds=env.read_seconds(env.LEASE_PATIENCE, environ),
            startup=StartupClock.read(environ),
        )

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the workers, without the rank numbers of each."""
        values = {
            env.CONFIG: self.config.model_dump_json(),
            env.STAGE: self.stage,
            env.SHARD_SET: self.shard_set,
            env.RANK_DIR: self.rank_directory,
            env.LOG_DIR: self.log_directory,
            env.LEASE: self.lease,
            env.FENCE: self.fence_number,
            env.LEASE_PATIENCE: self.lease_wait_seconds,
        }
        texts = {name: str(value) for name, value in values.items() if value is not None}
        return {**texts, **self.startup.variables()}

    def exit(self, error: PodscaleError) -> NoReturn:
        """Report `error` and exit this process; safe to call from any thread."""
        report = WorkerReport(int(error.exit_code), str(error))
        report_and_exit(self.rank_directory, self.rank_env.rank, report, local_rank=self.rank_env.local_rank)

    def fence(self, run: RunDirectory) -> Callable[[], None] | None:
        """Return a check that raises if a newer launch writes the run directory; None without a lease."""
        return None if self.fence_number is None else lease_fence(run.lease, self.fence_number)
