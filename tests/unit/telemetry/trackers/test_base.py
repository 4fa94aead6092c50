"""Points sent to trackers that cannot retract them: each once, over all launches and repeated steps."""

import json
from pathlib import Path

from podscale.config import loads
from podscale.runs import RunDirectory
from podscale.telemetry.trackers.base import SentPoints, TrackerPoint, new_run_name


def point(step: int, kind: str = "step") -> TrackerPoint:
    return TrackerPoint(kind, step, 100.0 + step, {"a": 1.0})


def test_a_point_is_taken_once(tmp_path: Path) -> None:
    sent = SentPoints(tmp_path / "t.json")
    assert [sent.take(point(step)) for step in (1, 2, 2, 1, 3)] == [True, True, False, False, True]
    assert sent.take(point(2, "evaluation")), "another kind of point"


def test_what_has_arrived_is_not_taken_by_later_launches(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    sent = SentPoints.for_run(run, "mlflow")
    sent.save_id("name")
    for step in (1, 2, 3):
        assert sent.take(point(step))
    sent.mark_sent(point(1))
    sent.mark_sent(point(2))
    sent.save()
    again = SentPoints.for_run(run, "mlflow")
    assert again.id == "name"
    assert [again.take(point(step)) for step in (1, 2, 3)] == [False, False, True]
    assert SentPoints.for_run(run, "wandb").id == ""


def test_nothing_is_written_where_nothing_is_new(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "t.json"
    sent = SentPoints(path)
    sent.save()
    assert not path.exists()
    sent.save_id("name")
    path.unlink()
    sent.save()
    assert not path.exists()
    sent.take(point(1))
    sent.mark_sent(point(1))
    sent.save()
    assert json.loads(path.read_text()) == {"id": "name", "newest": {"step": 1}}


def test_names_are_distinct_and_recognised() -> None:
    config = loads("", overrides=["run.id=digits"])
    names = {new_run_name(config) for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("digits-") for name in names)
