"""The termination message of a stage: a file whose content Kubernetes puts into the pod's status."""

import json
import re
from pathlib import Path

import pytest

from podscale.config import RunConfig, dumps, load
from podscale.errors import InputError, Preempted
from podscale.kubernetes import termination_message
from podscale.util import env


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setenv(env.TERMINATION_LOG, str(path))
    return path


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InputError("no such thing"), 2, "no such thing"),
        (Preempted("saved"), 75, "saved"),
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_the_end_of_a_stage(log: Path, error: BaseException, code: int, text: str) -> None:
    with pytest.raises(type(error)), termination_message.write_termination_on_exit("train"):
        raise error
    assert termination_message.parse_termination_message(log.read_text()) == {
        "stage": "train",
        "exit_code": code,
        "error": text,
    }


def test_a_stage_that_is_done(log: Path) -> None:
    with termination_message.write_termination_on_exit("shard"):
        pass
    assert json.loads(log.read_text()) == {"stage": "shard", "exit_code": 0, "error": ""}


def test_nothing_is_written_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.TERMINATION_LOG, raising=False)
    monkeypatch.chdir(tmp_path)
    with termination_message.write_termination_on_exit("train"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TERMINATION_LOG, "/proc/no/such/file")
    error = InputError("the reason")
    with pytest.raises(InputError) as caught, termination_message.write_termination_on_exit("train"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", ["x" * 10_000, "\u00e9" * 4096, '"\\\n' * 3000, "\U0001f600" * 2000, "x" * 4040])
def test_the_message_fits_the_limit_of_kubernetes(error: str) -> None:
    message = termination_message.termination_message("train", 1, error)
    assert len(message) <= 4096
    parsed = termination_message.parse_termination_message(message.decode())
    assert parsed is not None
    assert parsed["error"].rstrip(".") == error[: len(parsed["error"].rstrip("."))], "the beginning is kept"
    assert len(message) > 4096 - 16 or parsed["error"] == error


@pytest.mark.parametrize(
    "text", ["", "{}", "not json", '{"stage": "x"}', "[1]", '{"stage":"t","exit_code":"a","error":""}']
)
def test_messages_of_other_programs_are_ignored(text: str) -> None:
    assert termination_message.parse_termination_message(text) is None


def test_the_termination_message_has_an_error_of_the_document_too(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from podscale.cli import main

    monkeypatch.setenv(env.RUN_DOCUMENT, "launch: {nodez: 2}")
    assert main(["train"]) == 2
    parsed = termination_message.parse_termination_message(log.read_text())
    assert parsed is not None
    assert parsed["exit_code"] == 2
    assert parsed["error"].startswith("PODSCALE_RUN_DOCUMENT:1: ")
    assert {"launch.nodez", "launch.nodes"} <= set(re.findall(r"[\w.]+", parsed["error"]))


def test_a_stage_reads_its_document_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from podscale.cli import documents

    given: RunConfig = load(None, ["run.id=from-the-environment"])
    monkeypatch.setenv(env.RUN_DOCUMENT, dumps(given))
    assert documents.load_run_document(None, []) == given
    assert documents.load_run_document(None, ["run.seed=5"]).run.seed == 5
    assert documents.load_run_document("digits", []).run.id == "digits", "a document that is named comes first"
