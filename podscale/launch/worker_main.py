"""Entry point of every rank: binds it to its parent, opens its log, runs its module, and reports its exit.

Run as `python -m podscale.launch.worker_main MODULE`, by torchrun or by the supervisor; MODULE runs as __main__ in
the same process. docs/environment.md lists its environment variables.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

from podscale.distributed.worker_exit import WorkerReport, register_worker, report_and_exit, report_path
from podscale.errors import ExitCode, PodscaleError
from podscale.launch.process_cleanup import exit_with_supervisor
from podscale.runs.lease import Lease
from podscale.util import env
from podscale.util.processes import SigtermReceived, raise_on_sigterm


def main() -> None:
    """Run the module, write outcome-<rank>.json, and exit with the module's code."""
    exit_with_supervisor()
    rank = int(os.environ["RANK"])
    rank_dir = Path(os.environ[env.RANK_DIR])
    _redirect_output(rank)
    report_path(rank_dir, rank).unlink(missing_ok=True)  # report of an earlier launch
    report_and_exit(rank_dir, rank, _run_module(rank, rank_dir))


def _run_module(rank: int, rank_dir: Path) -> WorkerReport:
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    try:
        # Training installs its own handler; until then there is nothing to save.
        raise_on_sigterm(
            f"the {os.environ[env.STAGE]} stage was stopped on request before there was anything to save; the "
            "same command starts it again"
        )
        register_worker(rank_dir, rank)
        lease = _acquire_lease() if rank == 0 and env.FENCE not in os.environ else None
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        del lease
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return WorkerReport(code, end.code if isinstance(end.code, str) else "")
    except PodscaleError as error:
        return WorkerReport(int(error.exit_code), str(error))
    except SigtermReceived as stop:
        return WorkerReport(int(ExitCode.PREEMPTED), str(stop))
    except BaseException as error:
        traceback.print_exc()
        return WorkerReport(int(ExitCode.FAILED), f"{type(error).__name__}: {error}")
    return WorkerReport(int(ExitCode.DONE), "")


def _acquire_lease() -> Lease:
    """Acquire the lease in rank 0, for jobs whose rendezvous decides which pod leads."""
    lease = Lease.acquire(Path(os.environ[env.LEASE]), env.read_seconds(env.LEASE_PATIENCE) or 0.0)
    os.environ[env.FENCE] = str(lease.number)
    return lease


def _redirect_output(rank: int) -> None:
    """Redirect standard output and error of this process, also of native code, to rank-<k>.log."""
    directory = env.read_path(env.LOG_DIR)
    if directory is not None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(directory / f"rank-{rank}.log", flags, 0o644)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)


if __name__ == "__main__":
    main()
