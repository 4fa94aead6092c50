"""The process of one tracker: `python -m podscale.telemetry.trackers NAME`, started by the supervisor.

`env.CONFIG` holds the run document as JSON. Standard input is silent until the launch has ended, when one line says
how (see tracker.Ended); its end without that line counts as a failure of the launch. Standard output is for lines that
people are shown; whatever else the packages of trackers print goes to standard error, which is a log.
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
"""Between two looks at the log."""
NICENESS = 10
"""Loaders that need the core come first."""

PrintLine = Callable[[str], None]


def main(name: str) -> int:
    """Exit code 0, or 1 where the tracker failed, which a line beginning with FAILED explains."""
    tell = _claim_stdout()
    os.nice(NICENESS)
    try:
        config = RunConfig.model_validate_json(os.environ[env.CONFIG])
        run = RunDirectory.for_config(config)
        tracker = open_tracker(name, config, run, lambda text: tell(f"warning: {text}"))
        tell(f"{name}: {tracker.location}")
        follow_log(tracker, run.metrics, sys.stdin.fileno())
    except Exception as error:
        traceback.print_exc()
        tell(f"{FAILURE_PREFIX}{type(error).__name__}: {error}")
        return 1
    return 0


def open_tracker(name: str, config: RunConfig, run: RunDirectory, warn: PrintLine) -> Tracker:
    """The tracker of that name; the packages of others are not imported."""
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
    raise ValueError(f"there is no tracker {name}")


def follow_log(tracker: Tracker, metrics: Path, exit_descriptor: int, seconds: float = POLL_SECONDS) -> None:
    """Gives the tracker every record, until the other side of the pipe `ended` says how the launch ended."""
    lines = FileTail(metrics, from_start=True)
    said, over = b"", False
    while not over:
        if select.select([exit_descriptor], [], [], seconds)[0]:
            part = os.read(exit_descriptor, 2**16)
            said, over = said + part, not part
        for line in lines.read_lines():
            if (record := parse_record(line)) is not None:
                tracker.add(record)
        tracker.flush()
    tracker.close(LaunchExit.parse(said))


def _claim_stdout() -> PrintLine:
    """Takes standard output from everybody else in this process."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def print_line(text: str) -> None:
        output.write(f"{one_line(text)}\n")

    return print_line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
