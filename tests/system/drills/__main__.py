"""Run the drills and write their results into docs/how-to/drills.md: `python -m tests.system.drills`.

`make drills` does the same. Needs Prometheus, root (to mount a small disk) and some minutes. `--only NAME` (part of a
name, repeatable) runs some drills and writes nothing.
"""

import argparse
import shutil
import sys
import time

from tests.system.drills.drill import Found, run_drill
from tests.system.drills.faults import DRILLS, Drill
from tests.system.drills.page import PAGE, Machine, filled_in
from tests.system.drills.scene import Scene, scene


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    only = parser.parse_args().only
    if shutil.which("prometheus") is None:
        sys.exit("prometheus: not on the PATH. Install the package prometheus.")
    chosen = [drill for drill in DRILLS if not only or any(part in drill.name for part in only)]
    begun, machine = time.time(), Machine.here()
    with scene() as drill_scene:
        if not drill_scene.mounted and any(drill.needs_disk for drill in chosen):
            sys.exit("cannot mount a tmpfs. Run this as root.")
        results = [run_and_report(drill, drill_scene) for drill in chosen]
    if not only:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(filled_in(text, results, machine, time.time() - begun), encoding="utf-8")


def run_and_report(drill: Drill, drill_scene: Scene) -> Found:
    begun = time.time()
    result = run_drill(drill, drill_scene)
    alerts = ", ".join(f"{fired.expected.alert} after {fired.firing:.1f} s" for fired in result.fired)
    print(
        f"{drill.name}: {result.before:.3g} -> {result.during:.3g}, {alerts} ({time.time() - begun:.0f} s)", flush=True
    )
    return result


if __name__ == "__main__":
    main()
