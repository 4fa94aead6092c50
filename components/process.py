"""What every stage process does first: it is stopped, and dies, with the launch that started it.

kfp runs a component as `sh -ec "... python3 -m kfp.dsl.executor_main"`, so the parent of this process is a shell that
survives the death of `podscale run`; being told of the death of one's parent is not enough. The launcher's own
process is therefore named in the environment and watched.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podscale import processes
from podscale.errors import PodscaleError
from podscale.files import write_json
from podscale.launch.orphans import LAUNCHER
from podscale.rundir.outcome import Stage
from podscale.stopping import stoppable

SIGNPOST = "PODSCALE_STAGE_FILE"
"""Environment: file in which the running stage names itself, so that the launcher can forward signals to it."""


@contextmanager
def stage_process(stage: Stage | str) -> Iterator[None]:
    """Runs the body of a component: people read an error without a traceback, launchers read the exit code."""
    if LAUNCHER in os.environ:
        processes.die_with(int(os.environ[LAUNCHER]))
    try:
        with stoppable():
            if SIGNPOST in os.environ:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the launcher decides
                write_json(Path(os.environ[SIGNPOST]), {"stage": stage, "pid": os.getpid()})
            yield
    except PodscaleError as error:
        print(f"podscale {stage}: {error}", file=sys.stderr, flush=True)
        sys.exit(int(error.exit_code))
