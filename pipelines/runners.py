"""What carries out a stage of a pipeline on this machine, for podscale.pipelines.here: processes, or containers."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from podscale.util import env


class StageRunner(Protocol):
    """One way to run the tasks of a pipeline; kfp calls it from a thread of its own."""

    def prepare(self, variables: Mapping[str, str], scratch: Path) -> contextlib.AbstractContextManager[None]:
        """Around the whole pipeline. variables: the environment of each stage; scratch: a directory that lasts as
        long, which stages can write."""

    def kfp_runner(self) -> Any:
        """kfp's own runner."""

    def place_task(self, task: Any, role: str) -> None:
        """Completes a task of the pipeline."""

    def send_signal(self, pid: int, signal_number: int) -> None:
        """Sends a signal to the running stage, by the pid that it gave itself; nothing happens where it has ended."""


class ProcessRunner:
    """Stages are processes of this machine."""

    @contextlib.contextmanager
    def prepare(self, variables: Mapping[str, str], scratch: Path) -> Iterator[None]:
        # kfp leaves one directory a task in TMPDIR
        ours = {**variables, env.LAUNCHER_PID: str(os.getpid()), "TMPDIR": str(scratch)}
        with set_environment(ours):
            yield

    def kfp_runner(self) -> Any:
        from podscale.pipelines.kfp_quickly import local

        return local.SubprocessRunner(use_venv=False)

    def place_task(self, task: Any, role: str) -> None:
        """Images mean nothing here."""

    def send_signal(self, pid: int, signal_number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


@contextlib.contextmanager
def set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables of this process, and gives them back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
