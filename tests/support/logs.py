"""Messages of a log as data: their level, module and arguments, without their words."""

import logging
from typing import Any

import pytest


def logged(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING, *, module: str = "") -> list[Any]:
    """Return the arguments of each message of exactly this level, in order.

    Args:
        caplog: captured messages.
        level: level of the messages.
        module: name of the file that logs them, without its suffix; default: any of Podscale.
    """
    return [
        record.args
        for record in caplog.records
        if record.name.startswith("podscale") and record.levelno == level and module in ("", record.module)
    ]
