"""Report of a run: report.html and the model card."""

from pathlib import Path

from podscale.data.shard_set import ShardSet
from podscale.report.page import render_page
from podscale.report.report_data import ReportData, describe_exit, read_report_data
from podscale.util.files import write_atomically

__all__ = ["ReportData", "build_report", "describe_exit", "read_report_data"]


def build_report(run_directory: Path, shard_set: ShardSet | Path | str | None) -> Path:
    """Write <run>/report.html, which lists missing parts with the reason, and return its path."""
    data = read_report_data(Path(run_directory), shard_set)
    write_atomically(data.run.report, render_page(data))
    return data.run.report
