"""torchrun that also writes the exit status of each failed rank to the rank directory.

Run as `python -m podscale.pytorch.torchrun OPTIONS`, with torchrun's own options.

torchelastic's error files (`@record`, TORCHELASTIC_ERROR_FILE) are not enough: they hold a Python exception, which a
rank's own report has already. A rank that a signal killed leaves none (torch 2.15 reports `error_file: <N/A>` after
SIGSEGV and after SIGKILL), and that is the rank with no other report. ChildFailedError has the exit status.
"""

import gc
import os
import sys
from collections.abc import Sequence

from podscale.distributed.startup_clock import StartupClock
from podscale.distributed.worker_exit import write_exit_status
from podscale.util import env


def main(arguments: Sequence[str]) -> None:
    """Run torchrun to its end. Raises ChildFailedError, as torchrun does, if a rank failed."""
    gc.disable()  # as in worker_main.preload_module
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    gc.enable()
    startup = StartupClock.read()
    startup.end_part("imports")
    os.environ.update(startup.variables())  # for the ranks
    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        for failure in error.failures.values():
            write_exit_status(env.require_path(env.RANK_DIR), failure.pid, failure.exitcode)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
