"""Process of one tracker: `python -m podscale.telemetry.trackers NAME`, started by the supervisor.

`env.CONFIG` has the run document as JSON. The supervisor writes one line to standard input, with the exit of the launch
(see base.LaunchExit); end of file without it counts as a failure. Standard output is for the user. The output of the
trackers' packages goes to standard error, which is a log file.
"""

import os
import select
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from podscale.config import RunConfig
from podscale.runs import RunDirectory
from podscale.telemetry.events import FileTail, parse_record
from podscale.telemetry.trackers.base import FAILURE_PREFIX, LaunchExit, Tracker
from podscale.util import env
from podscale.util.formatting import one_line

POLL_SECONDS = 1.0
"""Polling interval of the log, seconds."""
NICENESS = 10
"""Nice value, so that data loaders have priority."""

PrintLine = Callable[[str], None]


def main(name: str) -> int:
    """Run the tracker; return 0, or 1 after a line that begins with FAILURE_PREFIX."""
    print_line = _claim_stdout()
    os.nice(NICENESS)
    try:
        config = RunConfig.model_validate_json(env.require_text(env.CONFIG))
        run = RunDirectory.for_config(config)
        tracker = open_tracker(name, config, run, lambda text: print_line(f"warning: {text}"))
        print_line(f"{name}: {tracker.location}")
        follow_log(tracker, run.metrics, sys.stdin.fileno())
    except Exception as error:
        traceback.print_exc()
        print_line(f"{FAILURE_PREFIX}{type(error).__name__}: {error}")
        return 1
    return 0


def open_tracker(name: str, config: RunConfig, run: RunDirectory, warn: PrintLine) -> Tracker:
    """Create the tracker of that name; import only its own packages."""
    match name:
        case "tensorboard":
            from podscale.telemetry.trackers.tensorboard import TensorBoard

            return TensorBoard(run.tensorboard)
        case "wandb":
            from podscale.telemetry.trackers.wandb import Wandb

            return Wandb(config, run)
        case "mlflow":
            from podscale.telemetry.trackers.mlflow import Mlflow

            return Mlflow(config, run, warn)
        case "trainjob":
            from podscale.telemetry.trackers.trainjob import TrainJobStatus

            return TrainJobStatus(os.environ, warn)
    raise ValueError(f"unknown tracker {name}")


def follow_log(tracker: Tracker, metrics: Path, exit_descriptor: int) -> None:
    """Add every record to the tracker until the pipe `exit_descriptor` has the exit of the launch."""
    lines = FileTail(metrics, from_start=True)
    exit_line, closed = b"", False
    while not closed:
        if select.select([exit_descriptor], [], [], POLL_SECONDS)[0]:
            chunk = os.read(exit_descriptor, 2**16)
            exit_line, closed = exit_line + chunk, not chunk
        for line in lines.read_lines():
            if (record := parse_record(line)) is not None:
                tracker.add(record)
        tracker.flush()
    tracker.close(LaunchExit.parse(exit_line))


def _claim_stdout() -> PrintLine:
    """Redirect the standard output of all other code in this process to standard error."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda text: print(one_line(text), file=output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
