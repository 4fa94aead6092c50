"""Termination message of a stage: exit code and error in the pod's status, readable without the run's volume."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from podscale.errors import ExitCode
from podscale.runs.stage_outcomes import MAX_TERMINATION_BYTES, exit_code_and_message
from podscale.util import env

TERMINATION_PATH = "/dev/termination-log"


@contextmanager
def write_termination_on_exit(stage: str) -> Iterator[None]:
    """Run a stage and write its result to the file that the environment names."""
    try:
        yield
    except BaseException as error:
        _write(stage, *exit_code_and_message(error))
        raise
    _write(stage, int(ExitCode.DONE), "")


def termination_message(stage: str, exit_code: int, error: str) -> bytes:
    """Return the JSON of a result, at most MAX_TERMINATION_BYTES of UTF-8; a longer error is truncated."""
    message = _encode(stage, exit_code, error)
    if len(message) <= MAX_TERMINATION_BYTES:
        return message
    low, high = 0, len(error)  # bisection, because a character takes 1 to 6 bytes after escaping
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(_encode(stage, exit_code, f"{error[:middle]}...")) <= MAX_TERMINATION_BYTES
        low, high = (middle, high) if fits else (low, middle - 1)
    return _encode(stage, exit_code, f"{error[:low]}...")


def parse_termination_message(text: str) -> dict[str, Any] | None:
    """Return stage, exit_code and error of a termination message; None for another program's."""
    try:
        content = json.loads(text)
        return {key: kind(content[key]) for key, kind in (("stage", str), ("exit_code", int), ("error", str))}
    except (ValueError, KeyError, TypeError):
        return None


def _encode(stage: str, exit_code: int, error: str) -> bytes:
    content = {"stage": stage, "exit_code": exit_code, "error": error}
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


def _write(stage: str, exit_code: int, error: str) -> None:
    path = env.read_path(env.TERMINATION_LOG)
    if path:
        with suppress(OSError):  # the exit code is reported in any case
            path.write_bytes(termination_message(stage, exit_code, error))
