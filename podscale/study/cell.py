"""The process of one cell: `python -m podscale.study.cell DOCUMENT SHARD_SET PARENT`.

Trains as `podscale train` does; ends with the study that started it, and with the exit codes of every stage.
"""

import sys
from pathlib import Path

from podscale.config import RunConfig
from podscale.errors import ExitCode, PodscaleError
from podscale.stages import local
from podscale.util import processes
from podscale.util.processes import preempt_on_sigterm


def run_trial(arguments: list[str]) -> int:
    """Trains; what it says of a failure is the last line that it prints."""
    document, shard_set, parent = arguments
    processes.exit_with_process(int(parent))
    try:
        with preempt_on_sigterm():
            config = RunConfig.model_validate_json(Path(document).read_text(encoding="utf-8"))
            local.train(config, shard_set)
    except PodscaleError as error:
        print(error, file=sys.stderr, flush=True)
        return int(error.exit_code)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(run_trial(sys.argv[1:]))
