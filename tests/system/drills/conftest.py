"""Fixture: one training under one Prometheus for the drills of a file; `make test-drills` asks for them."""

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.system.drills.scene import Scene, scene


@pytest.fixture(scope="module")
def drill_scene() -> Iterator[Scene]:
    if "PODSCALE_TEST_DRILLS" not in os.environ:
        pytest.skip("takes minutes: make test-drills runs it")
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    with scene() as created:
        yield created
