"""`podscale serve` before it serves: options, the port, the extra and the model."""

import errno
import json
import logging
import os
import shutil
import signal
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from podscale.cli import main
from podscale.cli import serve as command
from podscale.serving.options import ServeOptions
from tests.support.outcomes import assert_error
from tests.support.ports import free_port
from tests.support.prediction import CLASSES, write_model_run
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = write_model_run(tmp_path_factory.mktemp("model"))
    return Path(config.run.workspace) / "runs" / config.run.id / "model"


@pytest.mark.parametrize(
    "options",
    [
        ["--queue", "0"],
        ["--max-batch", "0"],
        ["--port", "70000"],
        ["--max-wait-ms", "-1"],
        ["--request-seconds", "0"],
        ["--max-request-mib", "0"],
        ["--host", "no such host"],
    ],
)
def test_options_out_of_range_are_refused(options: list[str], model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(model), *options]) == 2
    assert f"podscale: {options[0]}: " in capsys.readouterr().err


def test_a_missing_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_port_in_use_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        code = main(["serve", str(model), "--port", str(port)])
    assert_error(code, capsys.readouterr().err, f"(got {port})", os.strerror(errno.EADDRINUSE), field="--port")


def test_the_extra_is_named_if_it_is_missing(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(name: str) -> object:
        return None if name == "uvicorn" else PathFinder.find_spec(name)

    monkeypatch.setattr(command, "find_spec", find)
    code = main(["serve", str(model)])
    assert_error(code, capsys.readouterr().err, "uvicorn", "`pip install 'podscale[serve]'`", field="serve")


class ClosableHandler(logging.NullHandler):
    """Handler of another library."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_model_that_cannot_be_loaded_ends_the_server(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The port is open by then; the error still ends the command as any other bad input.

    Handlers of other libraries stay open: absl's would close the standard error at which it was imported.
    """
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    description = json.loads((broken / "model.json").read_text())
    (broken / "model.json").write_text(json.dumps({**description, "classes": CLASSES[:-1]}))
    before, handler = signal.getsignal(signal.SIGTERM), ClosableHandler()
    assert main(["serve", str(broken), "--port", "0"]) == 2
    printed = capsys.readouterr().err
    assert "serving " in printed
    assert "podscale: " in printed
    assert "Traceback" not in printed
    assert signal.getsignal(signal.SIGTERM) is before
    assert not handler.is_closed


def test_limits_follow_from_the_options() -> None:
    options = ServeOptions(max_batch=7, max_request_mib=2)
    assert (options.batch, options.max_request_bytes, options.max_buffered_bytes) == (7, 2**21, 2**23)
    with refused(field="--grace-seconds", got=-1):
        ServeOptions(grace_seconds=-1)
