"""tests/support/cpu_times.py: times of tests are summed by file, those of processes included."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from tests.support.cpu_times import PROPERTY, Recorder, Summary

BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def report_of(recorder: Recorder, nodeid: str) -> Any:
    """Return the report of a test, as pytest's hook makes it."""
    wrapper = recorder.pytest_runtest_makereport()
    next(wrapper)
    try:
        wrapper.send(SimpleNamespace(nodeid=nodeid, user_properties=[("other", "kept")]))
    except StopIteration as end:
        return end.value
    raise AssertionError("the wrapper did not return")


def test_files_are_ordered_by_cpu_time_with_that_of_their_processes() -> None:
    recorder, summary, lines = Recorder(), Summary(), list[str]()
    recorder.pytest_collection_finish()
    reports = [report_of(recorder, "test_idle.py::test_one")]
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    reports += [report_of(recorder, "test_busy.py::test_one"), report_of(recorder, "test_idle.py::test_two")]
    for report in reports:
        assert [name for name, _ in report.user_properties] == ["other", PROPERTY]
        summary.pytest_runtest_logreport(report)
    summary.pytest_terminal_summary(SimpleNamespace(section=lines.append, write_line=lines.append))
    rows = [line.split(maxsplit=2) for line in lines[1:]]
    assert [name for *_, name in rows] == ["all files", "test_busy.py", "test_idle.py"]
    assert float(rows[1][0]) >= 0.3
    assert float(rows[2][0]) < 0.3
