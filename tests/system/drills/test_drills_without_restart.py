"""Faults through which a real training continues: the alert fires in a real Prometheus, names the run, and resolves.

The drills are in two files because each worker of `make test` takes whole files, and all drills take minutes.
"""

import pytest

from tests.system.drills.drill import run_drill
from tests.system.drills.faults import DRILLS, Drill
from tests.system.drills.scene import Scene

pytestmark = pytest.mark.timeout(3600)
CHOSEN = [drill for drill in DRILLS if not drill.restarts]


@pytest.mark.parametrize("drill", CHOSEN, ids=lambda drill: drill.name.replace(" ", "-"))
def test_the_alert_fires_and_no_other(drill: Drill, drill_scene: Scene) -> None:
    if drill.needs_disk and not drill_scene.mounted:
        pytest.skip("cannot mount a tmpfs here")
    run_drill(drill, drill_scene)
