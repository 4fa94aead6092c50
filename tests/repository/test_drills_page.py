"""docs/how-to/drills.md lists the drills and rules of the code, apart from measured times."""

import re

from podscale.monitoring.rule_files import ALERT_RULES
from tests.system.drills.faults import ASIDE, DRILLS, Expected
from tests.system.drills.page import MARK, PAGE, identity, shipped

TEXT = PAGE.read_text(encoding="utf-8")
BELOW = TEXT.partition(MARK)[2]
ROWS = [line.strip("| ").split(" | ") for line in BELOW.splitlines() if line.startswith("| **")]


def test_every_drill_has_its_rows_and_the_page_no_others() -> None:
    wanted = [identity(drill, expected) for drill in DRILLS for expected in drill.alerts]
    assert [[row[0], row[1], row[4], row[-1]] for row in ROWS] == wanted, "run: make drills"
    assert re.findall(r"^\| ([\w ,]+) \| (?!Podscale)", BELOW.partition("## What Podscale")[2], re.MULTILINE) == [
        drill.name for drill in DRILLS
    ]


def test_measured_times_are_no_shorter_than_the_waits_that_were_drilled() -> None:
    for row, expected, times in zip(
        ROWS,
        (expected for drill in DRILLS for expected in drill.alerts),
        (drill.shorten for drill in DRILLS for _ in drill.alerts),
        strict=True,
    ):
        assert float(row[5]) == times
        holds, fires = (float(cell.removesuffix(" s")) for cell in row[6:8])
        assert fires >= holds + expected.wait_seconds / times - 0.1, row


def test_what_is_shipped_is_read_from_the_rules() -> None:
    straggler = Expected("PodscaleStraggler", {}, "run_rank:podscale_train_busy_seconds:rate5m")
    assert (straggler.window_seconds, straggler.wait_seconds, shipped(straggler)) == (300, 600, "15 min (5 + 10)")
    assert shipped(Expected("PodscaleTrainingStalled", {}, "PodscaleTrainingStalled")) == "15 min (10 + 5)"
    assert shipped(Expected("PodscaleRestartLoop")) == "at once"


def test_what_may_fire_besides_exists() -> None:
    names = {alert.name for alert in ALERT_RULES}
    assert {*ASIDE, *(name for drill in DRILLS for name in drill.besides)} <= names
    assert all(f"`{name}`" in TEXT for name in ASIDE)
