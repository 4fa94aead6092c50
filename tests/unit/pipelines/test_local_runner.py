"""Local runner of the pipeline: the environment of its stages."""

from pathlib import Path

import pytest

from podscale.config import load
from podscale.pipelines.local_runner import run_locally
from podscale.pipelines.presets import resolve_preset
from podscale.pipelines.stage_runners import ProcessRunner
from podscale.runs import Lease
from podscale.util import env


class Prepared(Exception):
    """Environment of the stages, raised before any of them starts."""


class StoppedRunner(ProcessRunner):
    def prepare(self, variables, scratch):
        raise Prepared(variables)


def test_stages_in_containers_have_the_variables_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes inherit them; containers get only what the runner passes."""
    names = (env.WEB_RUNTIME, env.IGNORE_MEMORY, env.MODEL_REGISTRY_TOKEN, env.KF_PIPELINES_SA_TOKEN_PATH)
    for name in names:
        monkeypatch.setenv(name, "/here")
    config = load(resolve_preset(None), [f"run.workspace={tmp_path}"])
    with Lease.acquire(tmp_path / ".lease") as lease, pytest.raises(Prepared) as stopped:
        run_locally(config, lease, on_change=lambda launch: None, runner=StoppedRunner())
    (variables,) = stopped.value.args
    assert {name: variables.get(name) for name in names} == dict.fromkeys(names, "/here")
