"""Entry point of every rank: binds it to its parent, opens its log, runs its module, and reports its exit.

Run as `python -m podscale.launch.worker_main MODULE`; MODULE runs as __main__ in the same process. It is imported
before under its own name, without the garbage collector. docs/reference/environment.md lists its environment variables.
"""

import gc
import importlib
import os
import runpy
import sys
import traceback
from pathlib import Path

from podscale.distributed.worker_env import WorkerEnv
from podscale.distributed.worker_exit import WorkerReport, register_worker, report_and_exit, report_path
from podscale.errors import ExitCode, PodscaleError
from podscale.launch.process_cleanup import exit_with_supervisor
from podscale.runs.lease import Lease
from podscale.util import env
from podscale.util.processes import SigtermReceived, raise_on_sigterm


def main() -> None:
    """Run the module, write outcome-<rank>.json, and exit with the module's code."""
    exit_with_supervisor()
    worker_env = WorkerEnv.read()
    rank, rank_dir = worker_env.rank_env.rank, worker_env.rank_directory
    if worker_env.rank_env.world_size > 1:
        worker_env.startup.end_part("rendezvous")  # the launcher has started this rank, so all pods are there
        os.environ.update(worker_env.startup.variables())  # the module reads its WorkerEnv again
    if worker_env.log_directory is not None:
        _redirect_output(worker_env.log_directory / f"rank-{rank}.log")
    report_path(rank_dir, rank).unlink(missing_ok=True)  # report of an earlier launch
    report_and_exit(rank_dir, rank, _run_module(worker_env), local_rank=worker_env.rank_env.local_rank)


def preload_module(module: str) -> None:
    """Import what a module imports, and forget the module itself: a rank runs it as its main program.

    The garbage collector is off meanwhile: it takes a tenth of the CPU time of PyTorch's import and finds nothing.
    """
    gc.disable()
    try:
        importlib.import_module(module)
    finally:
        gc.enable()
    del sys.modules[module]


def _run_module(worker_env: WorkerEnv) -> WorkerReport:
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    try:
        # Training installs its own handler; until then there is nothing to save.
        raise_on_sigterm(
            f"the {worker_env.stage} stage was stopped on request before there was anything to save; the same command "
            "starts it again"
        )
        register_worker(worker_env.rank_directory, worker_env.rank_env.rank)
        acquires = worker_env.rank_env.rank == 0 and worker_env.fence_number is None
        lease = _acquire_lease(worker_env) if acquires else None
        preload_module(module)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        del lease
    except SystemExit as exit_request:
        code = exit_request.code
        status = code if isinstance(code, int) else int(code is not None)
        return WorkerReport(status, code if isinstance(code, str) else "")
    except PodscaleError as error:
        return WorkerReport(int(error.exit_code), str(error))
    except SigtermReceived as stop:
        return WorkerReport(int(ExitCode.PREEMPTED), str(stop))
    except BaseException as error:
        traceback.print_exc()
        return WorkerReport(int(ExitCode.FAILED), f"{type(error).__name__}: {error}")
    return WorkerReport(int(ExitCode.DONE), "")


def _acquire_lease(worker_env: WorkerEnv) -> Lease:
    """Acquire the lease in rank 0, for jobs whose rendezvous decides which pod leads."""
    assert worker_env.lease is not None
    lease = Lease.acquire(worker_env.lease, worker_env.lease_wait_seconds or 0.0)
    os.environ[env.FENCE] = str(lease.number)  # the module reads its WorkerEnv again
    return lease


def _redirect_output(log: Path) -> None:
    """Redirect standard output and error of this process, also of native code, to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


if __name__ == "__main__":
    main()
