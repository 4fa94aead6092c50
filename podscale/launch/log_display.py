"""Display of a running stage: prints new lines of the files that its ranks write."""

from contextlib import suppress
from pathlib import Path
from typing import TextIO

from podscale.telemetry.events import FileTail, parse_record
from podscale.telemetry.step_log import StepLog
from podscale.util import progress_reports
from podscale.util.formatting import printable
from podscale.util.terminal import ProgressLine


class LogDisplay:
    """Step log of a run, output of the first local rank, and the progress bar of an evaluation.

    Args:
        metrics: metrics.jsonl, shown as the step log; None in pods other than the leading one.
        progress_file: Progress of an evaluation, shown on `err` if that is a terminal.
    """

    def __init__(
        self, metrics: Path | None, rank_log: Path | None, progress_file: Path, steplog: StepLog, err: TextIO
    ) -> None:
        self._metrics = FileTail(metrics) if metrics is not None else None
        self._rank_log = FileTail(rank_log) if rank_log is not None else None
        self._progress_file = progress_file
        self._steplog = steplog
        self._err = err
        self._bar = ProgressLine(err)

    def update(self) -> None:
        """Print new lines; a closed pipe stops the display, not the run."""
        with suppress(BrokenPipeError):
            self._print_new_lines()

    def _print_new_lines(self) -> None:
        for line in self._rank_log.read_lines() if self._rank_log is not None else ():
            self._bar.clear()
            self._err.write(printable(line.rstrip(b"\r")) + "\n")
            self._err.flush()
        for line in self._metrics.read_lines() if self._metrics is not None else ():
            record = parse_record(line)
            if record is not None:
                self._bar.clear()
                self._steplog.write(record)
        if (update := progress_reports.read_progress(self._progress_file)) is not None:
            self._bar(update)

    def print_line(self, line: str) -> None:
        with suppress(BrokenPipeError):
            self._bar.clear()
            print(line, file=self._err, flush=True)

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._bar.clear()
