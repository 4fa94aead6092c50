"""`podscale run --runner docker`: stages in real containers, and the messages if containers cannot run."""

import contextlib
import importlib
import json
import os
import signal
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from podscale.config import load
from podscale.errors import ExitCode
from podscale.pipelines.stage_runners import LEASE_LABEL, ContainerRunner
from podscale.runs.checkpoint.format import complete_entries
from podscale.telemetry.events import read_records
from tests.support.commands import SMALL_DIGITS, Command, different, podscale, result
from tests.support.containers import Engine, find_engine
from tests.support.outcomes import assert_error

SCHEMA = files("podscale.config") / "schema.json"
pytest.importorskip("docker", reason="the docker package is not installed: pip install 'podscale[containers]'")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return find_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def image(engine: Engine) -> str:
    """Return the base image; skip the tests if it was built from code with other options."""
    image = engine.image("base")
    if engine.inside(image, "podscale config --schema").stdout != SCHEMA.read_text():
        pytest.skip(f"image {image} has another version's options: make images IMAGES=base")
    return image


@pytest.fixture(scope="module")
def host(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with engine.service(tmp_path_factory.mktemp("socket")) as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(SMALL_DIGITS)
    return tmp_path


def start(folder: Path, host: str, image: str, *arguments: str) -> Command:
    command = ("run", "run.yaml", "--runner", "docker", "--set", f"launch.image={image}", *arguments)
    return Command(folder, *command, variables={"DOCKER_HOST": host})


def left(engine: Engine, folder: Path) -> list[str]:
    """Return the remaining containers of the run, in any state."""
    lease = folder / "runs" / "small" / ".lease"
    return engine("ps", "--all", "--quiet", f"--filter=label={LEASE_LABEL}={lease}").stdout.split()


def test_no_engine_to_be_found(folder: Path):
    ended = podscale(
        folder, "run", "run.yaml", "--runner", "docker", variables={"DOCKER_HOST": f"unix://{folder}/none"}
    )
    assert_error(ended.code, ended.err, f"unix://{folder}/none", "DOCKER_HOST", field="--runner")
    assert not (folder / "runs").exists()


def test_another_runner_is_refused(folder: Path):
    ended = podscale(folder, "run", "run.yaml", "--runner", "podman")
    assert_error(ended.code, ended.err, "podman", "docker", field="--runner")


def test_an_image_that_is_not_there(folder: Path, host: str):
    ended = start(folder, host, "localhost/no-such-image:1").end()
    assert_error(ended.code, ended.err, "localhost/no-such-image:1", "make images", field="launch.image")


def test_the_same_bits_as_without_containers(folder: Path, calm: Path, host: str, image: str, engine: Engine):
    ended = start(folder, host, image).end()
    assert ended.code == 0, ended.err
    assert "[4/4] report" in ended.err
    run = folder / "runs" / "small"
    printed = json.loads(ended.out.splitlines()[-1])
    assert printed["top1"] == json.loads((run / "evaluation.json").read_text())["figures"]["top1"]
    assert different(result(run), result(calm / "runs" / "calm")) == []
    assert json.loads((run / "environment.json").read_text())["commit"]
    assert (run / "report.html").stat().st_uid == os.getuid()
    assert left(engine, folder) == []


def test_stopping_saves_and_the_same_command_continues(folder: Path, host: str, image: str, engine: Engine):
    run = folder / "runs" / "small"
    command = start(folder, host, image)
    try:
        command.wait_for_steps(run, 8)
        command.process.send_signal(signal.SIGTERM)
        ended = command.end()
    finally:
        command.kill()
    assert ended.code == ExitCode.PREEMPTED, ended.err
    assert '"exit_code": 75' in (run / "outcome.json").read_text()
    assert complete_entries(run / "checkpoints")
    assert left(engine, folder) == []

    ended = start(folder, host, image).end()
    assert ended.code == 0, ended.err
    events = [line["event"] for line in read_records(run / "metrics.jsonl") if line["kind"] == "event"]
    assert "resumed" in events


def test_a_launch_that_is_killed_takes_its_containers_with_it(folder: Path, host: str, image: str, engine: Engine):
    command = start(folder, host, image)
    try:
        command.wait_for_steps(folder / "runs" / "small", 2)
        command.process.kill()
        containers = left(engine, folder)
        assert len(containers) == 1
        assert engine("wait", *containers).stdout.split() == ["137"]
    finally:
        command.kill()
        engine("rm", "--force", *left(engine, folder), check=False)


@pytest.mark.parametrize(("script", "failed"), [("exit 3", True), ("sleep 1; exit 3", True), ("true", False)])
def test_kfp_learns_how_a_container_ended(
    script: str, failed: bool, folder: Path, host: str, image: str, monkeypatch: pytest.MonkeyPatch
):
    """Without our change, kfp counts a container that is already removed as succeeded."""
    from podscale.pipelines.kfp_fast_import import dsl, local

    monkeypatch.setenv("DOCKER_HOST", host)
    monkeypatch.chdir(folder)

    @dsl.container_component
    def component():
        return dsl.ContainerSpec(image=image, command=["sh", "-c"], args=[script])

    scratch, root = folder / "scratch", folder / "root"
    scratch.mkdir()
    root.mkdir()
    containers = ContainerRunner(load(folder / "run.yaml", [f"launch.image={image}"]))
    with containers.prepare({}, scratch):
        local.init(containers.kfp_runner(), pipeline_root=str(root), raise_on_error=True)
        with pytest.raises(RuntimeError, match="FAILURE") if failed else contextlib.nullcontext():
            component()


def test_the_replaced_function_is_still_where_kfp_calls_it():
    """If a later kfp moves the function, false successes would return."""
    handler = importlib.import_module("kfp.local.docker_task_handler")
    assert callable(handler.run_docker_container)
    assert "run_docker_container" in handler.DockerTaskHandler.run.__code__.co_names
