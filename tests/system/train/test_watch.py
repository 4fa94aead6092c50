"""`podscale watch` of a real training on two ranks, also in a terminal."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale.cli import main
from tests.support.commands import SMALL_DIGITS, TIMEOUT_SECONDS, Command
from tests.support.polling import until


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """A training that is under way."""
    (tmp_path / "run.yaml").write_text(SMALL_DIGITS)
    started = Command(tmp_path, "run", "run.yaml", "--set", "train.epochs=200")
    try:
        started.wait_for_steps(tmp_path / "runs" / "small", 5)
        yield started
    finally:
        started.kill()


def test_a_training_is_seen_as_it_goes_on(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "runs" / "small"

    def look() -> bool:
        capsys.readouterr()
        assert main(["watch", str(run), "--once", "--json"]) == 0
        view = json.loads(capsys.readouterr().out)
        ranks = view["rank_figures"]
        return bool(
            view["state"] == "training"
            and view["images_per_second"] > 0
            and view["total_steps"] > view["step"] > 0
            and [rank["rank"] for rank in ranks] == [0, 1]
            and all(rank["images_per_second"] for rank in ranks)
        )

    until(look, TIMEOUT_SECONDS)
    screen = terminal(["watch", str(run)], command)
    assert "training  step" in screen
    assert "images/s" in screen


def terminal(arguments: list[str], command: Command) -> str:
    """Return the output of a command on a terminal until the run that it watches is killed and the command exits."""
    primary, tty = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "podscale", *arguments], stdin=tty, stdout=tty, stderr=tty, close_fds=True
    )
    os.close(tty)
    seen = b""
    try:
        while part := _read(primary):
            seen += part
            if b"training" in seen and command.process.poll() is None:
                command.kill()
        assert child.wait(TIMEOUT_SECONDS) == 0
    finally:
        child.kill()
        os.close(primary)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode("utf-8", "replace"))


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is closed
        return b""
