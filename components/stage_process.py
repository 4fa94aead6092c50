"""Common wrapper of all components, which ties the stage process to its launcher and reports errors.

kfp runs a component as `sh -ec "... python3 -m kfp.dsl.executor_main"`. The parent of this process is therefore a shell
that survives `podscale run`, and a parent-death signal is not enough. The environment names the launcher's process
instead, and the stage process watches that.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from podscale.errors import ExitCode, PodscaleError
from podscale.runs.stage_outcomes import MAX_TERMINATION_BYTES
from podscale.util import env, processes
from podscale.util.files import write_json
from podscale.util.processes import preempt_on_sigterm

UMASK = 0o022
"""Umask of a stage whose parent has cleared it."""


@contextmanager
def stage_process(stage: str) -> Iterator[None]:
    """Run the body of a component: print errors without a traceback and exit with their exit code.

    The error is also the pod's termination message, which Argo and `kubectl describe` show. Files are not
    writable for everyone, although KFP's launcher clears the umask.
    """
    if (umask := os.umask(UMASK)) != 0:
        os.umask(umask)
    if (launcher := env.read_number(env.LAUNCHER_PID)) is not None:
        processes.exit_with_process(launcher)
    if (lifeline := env.read_path(env.LIFELINE)) is not None:
        processes.exit_with_lock_holder(lifeline)
    try:
        with preempt_on_sigterm():
            if (signpost := env.read_path(env.STAGE_FILE)) is not None:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the launcher decides
                write_json(signpost, {"stage": stage, "pid": os.getpid()})
            yield
    except PodscaleError as error:
        _write_failure(stage, int(error.exit_code), str(error))
        print(f"podscale {stage}: {error}", file=sys.stderr, flush=True)
        sys.exit(int(error.exit_code))
    except Exception as error:
        _write_failure(stage, int(ExitCode.FAILED), f"{type(error).__name__}: {error}")
        raise


def failed_stage_error(signpost: Path, stage: str) -> tuple[int, str] | None:
    """Return exit code and error of a failed stage from the file it left for the launcher, or None."""
    try:
        values = json.loads(_failure_path(signpost, stage).read_text(encoding="utf-8"))
        return int(values["exit_code"]), str(values["error"])
    except (OSError, ValueError, KeyError):
        return None


def _write_failure(stage: str, exit_code: int, error: str) -> None:
    if (termination := env.read_path(env.TERMINATION_LOG)) is not None:
        message = f"podscale {stage}: {error}".encode()[:MAX_TERMINATION_BYTES].decode(errors="ignore")
        with suppress(OSError):
            termination.write_text(message, encoding="utf-8")
    if (signpost := env.read_path(env.STAGE_FILE)) is not None:
        with suppress(OSError):
            write_json(_failure_path(signpost, stage), {"exit_code": exit_code, "error": error})


def _failure_path(signpost: Path, stage: str) -> Path:
    return signpost.with_name(f"ended-{stage}.json")
