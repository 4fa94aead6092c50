"""Pytest plugin: a lost worker of pytest-xdist fails the run, and a stuck worker exits.

The Makefile adds `--max-worker-restart=0`. With a replacement, pytest-xdist 3.8 would run the fatal test again, and
then hang: `--dist loadfile` hands out the completed files of the lost worker again, as empty work units, and waits for
a report that an empty unit never sends (pytest-xdist issues 1323, 1327 and 1378).
"""

import faulthandler
import os
from collections.abc import Generator
from typing import Any

import pytest

GRACE = 60.0
"""Time between a test's timeout and the exit of its worker, seconds."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker(config))
    else:
        config.pluginmanager.register(Controller())


class Controller:
    """Fail the run if a worker is lost, even between two tests, when there is no test to blame."""

    def __init__(self) -> None:
        self._lost: list[str] = []

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:
            self._lost.append(node.gateway.id)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._lost and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._lost:
            terminalreporter.write_sep(
                "=",
                f"worker lost: {', '.join(self._lost)}; the run ended early, a crash prints its stack above",
                red=True,
            )


class Worker:
    """Exit if a test is stuck, and let the controller see the exit."""

    def __init__(self, config: pytest.Config) -> None:
        self._stderr = os.dup(2)  # during a test, pytest points 2 to a file that is lost on exit
        leave_channel_at_fork(config)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, settings: Any) -> None:
        """Arm a second timer, because pytest-timeout's signal handler waits until native code returns to Python.

        The thread of faulthandler needs neither Python nor the interpreter's lock.
        """
        faulthandler.dump_traceback_later(settings.timeout + GRACE, exit=True, file=self._stderr)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


def leave_channel_at_fork(config: pytest.Config) -> None:
    """Release the pipe to the controller in forked children: its end is how the controller notices a lost worker."""
    interactor = next(plugin for plugin in config.pluginmanager.get_plugins() if hasattr(plugin, "channel"))
    pipe = interactor.channel.gateway._io.outfile.fileno()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.register_at_fork(after_in_child=lambda: os.dup2(nowhere, pipe, inheritable=False))
