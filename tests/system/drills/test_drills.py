"""Faults injected into a real training: the alert for each fires in a real Prometheus, names the run, and resolves."""

import shutil
from collections.abc import Iterator

import pytest

from tests.system.drills.drill import run_drill
from tests.system.drills.faults import DRILLS, Drill
from tests.system.drills.scene import Scene, scene

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
    ),
]


@pytest.fixture(scope="module")
def drill_scene() -> Iterator[Scene]:
    with scene() as created:
        yield created


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name.replace(" ", "-"))
def test_the_alert_fires_and_no_other(drill: Drill, drill_scene: Scene) -> None:
    if drill.needs_disk and not drill_scene.mounted:
        pytest.skip("cannot mount a tmpfs here")
    run_drill(drill, drill_scene)
