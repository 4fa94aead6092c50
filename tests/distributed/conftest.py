"""Fixture that runs a function on worlds of real processes."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import worlds

RunWorld = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def run_world() -> RunWorld:
    """Return `run_world(size, body)`, which runs `body(world)` on `size` gloo processes."""
    return worlds.run_world
