"""The report of a run: report.html, and its first lines as Markdown."""

from pathlib import Path

from podscale.data.shard_set import ShardSet
from podscale.report.page import render_page
from podscale.report.report_data import ReportData, describe_exit, read_report_data
from podscale.util.files import write_atomically

__all__ = ["ReportData", "build_report", "describe_exit", "read_report_data"]


def build_report(run_directory: Path, shard_set: ShardSet | Path | str | None) -> Path:
    """Writes <run>/report.html from whatever the run left and returns its path.

    Parts that are missing (a run that failed early has no scores) are named in the report with the reason.
    """
    data = read_report_data(Path(run_directory), shard_set)
    write_atomically(data.run.report, render_page(data))
    return data.run.report
