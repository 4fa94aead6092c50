"""Stages as containers: what they get from the user's environment."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from podscale.config import load
from podscale.pipelines import stage_runners
from podscale.pipelines.presets import resolve_preset
from podscale.pipelines.stage_runners import ContainerRunner
from podscale.util import env


class Engine:
    """Container engine that records how each container is created, and runs none."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.containers = SimpleNamespace(create=self._create, list=lambda **_: [])

    def info(self) -> dict[str, object]:
        return {}

    def _create(self, image: str, command: list[str], **options: Any) -> SimpleNamespace:
        self.created.append(options)
        return SimpleNamespace(
            id="1",
            start=lambda: None,
            logs=lambda **_: iter([b"done"]),
            wait=lambda: {"StatusCode": 0},
            remove=lambda **_: None,
        )

    def close(self) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine, docker = Engine(), ModuleType("docker")
    docker.errors = SimpleNamespace(APIError=OSError, NotFound=OSError)  # type: ignore[attr-defined]
    docker.types = SimpleNamespace(DeviceRequest=dict)  # type: ignore[attr-defined]
    monkeypatch.setattr(stage_runners, "_import_docker", lambda: docker)
    monkeypatch.setattr(stage_runners, "_engine_address", lambda: "unix:///engine")
    monkeypatch.setattr(stage_runners, "_connect_engine", lambda *_: engine)
    monkeypatch.setattr(stage_runners, "_ensure_image", lambda *_: None)
    return engine


@pytest.fixture
def runner(tmp_path: Path, engine: Engine) -> ContainerRunner:
    return ContainerRunner(
        load(resolve_preset(None), [f"run.workspace={tmp_path}", "launch.image=localhost/podscale:1"])
    )


def run_task(runner: ContainerRunner, engine: Engine, scratch: Path) -> dict[str, Any]:
    """Run a task by the function that kfp calls, and return how its container was created."""
    handler = importlib.import_module("kfp.local.docker_task_handler")
    scratch.mkdir()
    with runner.prepare({env.MODEL_REGISTRY_TOKEN: "secret"}, scratch):
        assert handler.run_docker_container(engine, "localhost/podscale:1", ["true"], {}) == 0
    (options,) = engine.created
    return options


def test_a_container_sees_the_files_that_the_user_names(
    runner: ContainerRunner, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, authority = tmp_path / "elsewhere" / "token", tmp_path / "elsewhere" / "ca.pem"
    token.parent.mkdir()
    for path, name in ((token, env.KF_PIPELINES_SA_TOKEN_PATH), (authority, "SSL_CERT_FILE")):
        path.write_text("secret")
        monkeypatch.setenv(name, str(path))
    options = run_task(runner, engine, tmp_path / "scratch")
    assert options["environment"][env.MODEL_REGISTRY_TOKEN] == "secret"
    for path in (token, authority):
        assert options["volumes"][str(path)] == {"bind": str(path), "mode": "ro"}


def test_a_file_that_is_missing_is_not_mounted(
    runner: ContainerRunner, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker would make it a directory, and podman refuse the container; the stage has the better error."""
    monkeypatch.setenv(env.KF_PIPELINES_SA_TOKEN_PATH, str(tmp_path / "absent"))
    assert str(tmp_path / "absent") not in run_task(runner, engine, tmp_path / "scratch")["volumes"]
