"""W&B and MLflow with their real packages, each in its tracker process, over two launches; the first is killed.

The packages are not among the development packages (100 MB). To run these tests:
`pip install wandb mlflow-skinny sqlalchemy alembic sqlparse`.
"""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from podscale.config import RunConfig, loads
from podscale.runs import RunDirectory
from podscale.telemetry.events import EventLog, EventRecord, read_records
from podscale.telemetry.trackers.base import FAILURE_PREFIX, LaunchExit
from tests.support import wandb_file
from tests.support.polling import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SECONDS = 500.0
"""An import of these packages takes a minute on a loaded machine."""


class Launch:
    """Process of one tracker; the test acts as the supervisor and rank 0."""

    def __init__(self, name: str, config: RunConfig) -> None:
        run = RunDirectory.for_config(config).create()
        self.log = run.path / "tracker.log"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "podscale.telemetry.trackers", name],
            env={**os.environ, "PODSCALE_CONFIG": config.model_dump_json()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("ab"),
            start_new_session=True,
            cwd=run.path,
        )

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def end(self, ended: LaunchExit) -> str:
        """Report the exit of the launch to the tracker, and return the tracker's output."""
        out, _ = self._process.communicate(ended.to_line(), timeout=SECONDS)
        assert self._process.returncode == 0, (out, self.log.read_text())
        return out.decode()


Track = Callable[[str, RunConfig], Launch]


@pytest.fixture
def track() -> Iterator[Track]:
    started: list[Launch] = []

    def start(name: str, config: RunConfig) -> Launch:
        started.append(Launch(name, config))
        return started[-1]

    yield start
    for launch in started:
        if launch._process.poll() is None:
            launch.kill()


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def document(workspace: Path, *changes: str) -> RunConfig:
    return loads("", overrides=[f"run.workspace={workspace}", "run.id=t", *changes])


def write(run: RunDirectory, begins_after: int, last: int) -> None:
    """Write the log of rank 0 in a launch; every second step is evaluated, step 2 is not finite."""
    with EventLog(run.metrics) as log:
        log.event("resumed" if begins_after else "start", step=begins_after, total_steps=10)
        for step in range(begins_after + 1, last + 1):
            loss = math.nan if step == 2 else 1 / step
            log.step(step, epoch=step / 4, loss=loss, learning_rate=0.1, images_per_second=9.0, phases={"other": 1.0})
            if step % 2 == 0:
                log.evaluation(step, epoch=step / 4, top1=step / 10, top5=0.9, loss=0.5)


def over_two_launches(name: str, config: RunConfig, track: Track, arrived: Callable[[int], bool]) -> str:
    """Run two launches: the first is killed after step 6, the second resumes after step 4 and ends after step 10."""
    run = RunDirectory.for_config(config).create()
    first = track(name, config)
    write(run, 0, 6)
    until(lambda: arrived(6), SECONDS)
    first.kill()
    write(run, 4, 10)
    message = track(name, config).end(LaunchExit(0))
    assert message.startswith(f"{name}: ")
    return message


def sent(config: RunConfig, name: str) -> dict[str, Any]:
    path = RunDirectory.for_config(config).trackers / f"{name}.json"
    state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"id": "", "newest": {}}
    return state


def losses(config: RunConfig) -> list[EventRecord]:
    """Return the losses of the first line of each step."""
    lines = [line for line in read_records(RunDirectory.for_config(config).metrics) if line["kind"] == "step"]
    return [next(line for line in lines if line["step"] == step) for step in range(1, 11)]


@needs("mlflow", "sqlalchemy")
def test_mlflow_has_every_point_once(tmp_path: Path, track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    config = document(tmp_path, "telemetry.trackers=[mlflow]", "telemetry.mlflow.experiment=digits")
    message = over_two_launches(
        "mlflow", config, track, lambda step: sent(config, "mlflow")["newest"].get("step") == step
    )
    assert uri in message
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (sent(config, "mlflow")["id"], "t", "FINISHED")
    assert run.data.params["train.optimizer.name"] == config.train.optimizer.name
    points = client.get_metric_history(run.info.run_id, "train/loss")
    lines = losses(config)
    assert [point.step for point in points] == list(range(1, 11))
    assert [point.timestamp for point in points] == [round(line["time"] * 1000) for line in lines]
    assert math.isnan(points[1].value)
    assert points[9].value == pytest.approx(0.1)
    top1 = client.get_metric_history(run.info.run_id, "evaluation/top1")
    assert [(point.step, point.value) for point in top1] == [(2, 0.2), (4, 0.4), (6, 0.6), (8, 0.8), (10, 1.0)]


@needs("mlflow", "sqlalchemy")
@pytest.mark.parametrize(("code", "status"), [(75, "KILLED"), (1, "FAILED")])
def test_mlflow_has_the_exit_of_a_launch(tmp_path: Path, track: Track, code: int, status: str) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = document(tmp_path, "telemetry.trackers=[mlflow]", f"telemetry.mlflow.tracking_uri={uri}")
    run = RunDirectory.for_config(config).create()
    launch = track("mlflow", config)
    write(run, 0, 1)
    launch.end(LaunchExit(code, "why"))
    mlflow_run = MlflowClient(uri).get_run(sent(config, "mlflow")["id"])
    assert (mlflow_run.info.status, mlflow_run.data.tags["error"]) == (status, "why")


@needs("mlflow", "sqlalchemy")
def test_mlflow_waits_out_an_outage(tmp_path: Path) -> None:
    """The real client with a database that is absent for a while."""
    from podscale.telemetry.trackers.mlflow import Mlflow

    warnings: list[str] = []
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = document(tmp_path, "telemetry.trackers=[mlflow]", f"telemetry.mlflow.tracking_uri={uri}")
    run = RunDirectory.for_config(config).create()
    tracker = Mlflow(config, run, warnings.append)
    write(run, 0, 3)
    client, tracker._client = tracker._client, None  # the client cannot query it
    for record in read_records(run.metrics):
        tracker.add(record)
    tracker.flush()
    tracker.flush()
    assert len(warnings) == 1
    assert sent(config, "mlflow")["newest"] == {}
    tracker._client = client
    tracker.close(LaunchExit(0))
    assert sent(config, "mlflow")["newest"] == {"step": 3, "evaluation": 2}


@needs("wandb")
def test_wandb_has_every_point_once(tmp_path: Path, track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = document(tmp_path, "telemetry.trackers=[wandb]", "telemetry.wandb.project=digits")
    message = over_two_launches("wandb", config, track, lambda step: step in [row["step"] for row in history(config)])
    assert "(offline)" in message
    rows = history(config)
    step_rows = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in step_rows] == list(range(1, 11))
    assert [row["_timestamp"] for row in step_rows] == [line["time"] for line in losses(config)]
    assert step_rows[9]["train/loss"] == pytest.approx(0.1)
    assert [(row["step"], row["evaluation/top1"]) for row in rows if "evaluation/top1" in row] == [
        (2, 0.2),
        (4, 0.4),
        (6, 0.6),
        (8, 0.8),
        (10, 1.0),
    ]
    directories = wandb_directories(config)
    assert len(directories) == 2
    assert {path.stem for path in directories} == {f"run-{sent(config, 'wandb')['id']}"}
    assert wandb_file.exit_code(directories[-1]) == 0


@needs("wandb")
def test_wandb_without_a_key_fails_with_its_own_error(
    tmp_path: Path, track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    config = document(tmp_path, "telemetry.trackers=[wandb]")
    launch = track("wandb", config)
    out, _ = launch._process.communicate(LaunchExit(0).to_line(), timeout=SECONDS)
    assert launch._process.returncode == 1
    (line,) = [line for line in out.decode().splitlines() if line.startswith(FAILURE_PREFIX)]
    assert "key" in line


def wandb_directories(config: RunConfig) -> list[Path]:
    """Return the directories of W&B's files, in the order of the launches."""
    directories = (RunDirectory.for_config(config).path / "wandb").glob("offline-run-*/*.wandb")
    return sorted(directories, key=lambda path: path.parent.stat().st_ctime_ns)


def history(config: RunConfig) -> list[dict[str, Any]]:
    """Return all points in the order in which they were logged."""
    files = sorted(
        (RunDirectory.for_config(config).path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.parent
    )
    return [row for path in files for row in wandb_file.history(path)]
