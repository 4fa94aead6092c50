"""Pytest plugin: the CPU time of test files, and of their processes, at the end of a run.

Load it by `-p tests.support.cpu_times`. CPU time, unlike wall time, is nearly the same on a busy machine. It includes
the processes that a test started, also those that still run, as tests/jax's worker does.
"""

import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

FILES_SHOWN = 40
PROPERTY = "cpu_times"


def descendants_cpu() -> float:
    """Return the CPU time of the running descendants of this process, and of the children they waited for, seconds."""
    ticks, pids = 0, children(os.getpid())
    while pids:
        pid = pids.pop()
        with suppress(OSError):  # it has exited
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from field 3 of proc(5) on
            ticks += sum(map(int, fields[11:15]))
            pids += children(pid)
    return ticks / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Return the processes that a process started; none of a thread that has ended."""
    found = list[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


class Times:
    """Times of this process and its descendants so far, seconds."""

    def __init__(self) -> None:
        own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        self.wall = time.monotonic()
        waited_for = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
        self.cpu = waited_for + descendants_cpu()


class Recorder:
    """Add the times since the previous report to each report of a test, in the process that ran it."""

    def __init__(self) -> None:
        self._before = Times()

    def pytest_collection_finish(self) -> None:
        self._before = Times()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = Times()
        times = now.wall - self._before.wall, now.cpu - self._before.cpu
        report.user_properties = [*report.user_properties, (PROPERTY, times)]
        self._before = now
        return report


class Summary:
    """Sum the times by file and print the files with most CPU time, in the controller of pytest-xdist."""

    def __init__(self) -> None:
        self._files: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY:
                sums, times = self._files[report.nodeid.partition("::")[0]], tuple(value)  # type: ignore[arg-type]
                sums[:] = [total + seconds for total, seconds in zip(sums, times, strict=True)]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("CPU and wall time of the files, seconds")
        rows = sorted(self._files.items(), key=lambda item: -item[1][1])
        total = [sum(times[i] for _, times in rows) for i in range(2)]
        for name, (wall, cpu) in [("all files", total), *rows[:FILES_SHOWN]]:
            terminalreporter.write_line(f"{cpu:8.1f} {wall:8.1f}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary())
