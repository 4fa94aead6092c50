"""Display of a running stage: prints new lines of the files that its ranks write."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from podscale.config.telemetry import TelemetrySection
from podscale.telemetry.events import EventRecord, FileTail, parse_record
from podscale.telemetry.step_log import StepLog
from podscale.util import progress_reports
from podscale.util.formatting import printable
from podscale.util.terminal import LineStream, ProgressLine


@dataclass(frozen=True)
class StageOutput:
    """Output of a stage while it runs.

    Args:
        on_record: gets each new record of metrics.jsonl; None: it is ignored.
        messages: stream of the first rank's output, notices and progress.
    """

    on_record: Callable[[EventRecord], None] | None
    messages: TextIO

    @classmethod
    def printed(cls, section: TelemetrySection) -> "StageOutput":
        """Print the step log on standard output and the rest on standard error, as the commands do."""
        return cls(StepLog(sys.stdout, section.log).write, sys.stderr)

    @classmethod
    def silent(cls, on_record: Callable[[EventRecord], None] | None = None) -> "StageOutput":
        """Print nothing."""
        return cls(on_record, LineStream())


class LogDisplay:
    """Records of a run, output of the first local rank, and the progress bar of an evaluation.

    Args:
        metrics: metrics.jsonl; None in pods other than the leading one.
        progress_file: Progress of an evaluation, shown with the messages if they go to a terminal.
    """

    def __init__(self, metrics: Path | None, rank_log: Path | None, progress_file: Path, output: StageOutput) -> None:
        self._metrics = FileTail(metrics) if metrics is not None else None
        self._rank_log = FileTail(rank_log) if rank_log is not None else None
        self._progress_file = progress_file
        self._on_record = output.on_record
        self._err = output.messages
        self._bar = ProgressLine(self._err)

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
            if record is not None and self._on_record is not None:
                self._bar.clear()
                self._on_record(record)
        if (update := progress_reports.read_progress(self._progress_file)) is not None:
            self._bar(update)

    def print_line(self, line: str) -> None:
        with suppress(BrokenPipeError):
            self._bar.clear()
            print(line, file=self._err, flush=True)

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._bar.clear()
