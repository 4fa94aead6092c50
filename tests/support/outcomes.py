"""Checks of a command's machine-readable outcome: its exit code and the field of its error."""

import re

from podscale.errors import ExitCode


def assert_error(
    code: int, err: str, *contains: object, field: object = "", exit_code: int = ExitCode.BAD_INPUT
) -> None:
    """Check exit code and error of a command.

    Args:
        code: exit code of the command.
        err: its standard error.
        contains: numbers, keys, paths and commands that it must contain; no sentences.
        field: field of the error; "" if it has none.
        exit_code: expected exit code.
    """
    assert code == exit_code, err
    assert "Traceback" not in err, err
    start = f"podscale: {field}: " if field else "podscale: "
    assert any(line.startswith(start) for line in err.splitlines()), f"no error about {field!s} in: {err}"
    for text in contains:
        assert str(text) in err, f"{text} is not in: {err}"


def reused_stages(err: str) -> list[str]:
    """Return the stages that a command did not repeat, by its standard error."""
    return re.findall(r"^(?:.* )?(\w+): finished before", err, re.MULTILINE)
