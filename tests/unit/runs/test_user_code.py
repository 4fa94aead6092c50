"""Code of the user: stored by its hash, imported by every stage, and part of the run's identity."""

import importlib
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import podscale
from podscale.config import RunConfig, dumps, loads
from podscale.evaluation.adhoc_ensemble import adhoc_ensemble_document
from podscale.kubernetes.job_spec import build_job_spec
from podscale.pipelines.package import package_pipeline
from podscale.runs import stage_outcomes
from podscale.runs.model_files import check_same_code
from podscale.runs.user_code import (
    MODEL_CODE,
    archive_path,
    bundle_code,
    code_of_model,
    copy_code_to_model,
    find_archive,
    user_code,
)
from podscale.util.code_archive import pack_code
from tests.support.prediction import write_model_run
from tests.support.refusals import refused

MODULE = "model_of_a_test"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / f"{MODULE}.py").write_text("WIDTH = 4\n")
    return folder


def document(tmp_path: Path, code: Path) -> RunConfig:
    return podscale.load({}, run={"workspace": tmp_path / "work"}, launch={"code": code})


def test_the_hash_is_recorded_when_the_document_is_loaded(tmp_path: Path, code: Path) -> None:
    first = document(tmp_path, code)
    (code / f"{MODULE}.py").write_text("WIDTH = 8\n")
    second = document(tmp_path, code)
    assert first.run.code != second.run.code
    assert podscale.load(first, train={"epochs": 3}).run.code == first.run.code, "a resolved document keeps its code"


def test_a_folder_that_an_override_names_is_packed_anew(tmp_path: Path, code: Path) -> None:
    first = document(tmp_path, code)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"{MODULE}.py").write_text("WIDTH = 8\n")
    second = podscale.load(bundle_code(first), **{"launch.code": tmp_path / "other"})
    with user_code(second):
        assert importlib.import_module(MODULE).WIDTH == 8
    again = podscale.load(second, launch={"code": code}, run={"code": second.run.code})
    assert again.run.code == second.run.code, "a hash that is named stays"


def test_a_module_that_was_imported_before_is_hidden(
    tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook that tries a newer model than the run's."""
    config = document(tmp_path, code)
    find_archive(config)
    (code / f"{MODULE}.py").write_text("WIDTH = 8\n")
    monkeypatch.syspath_prepend(str(code))
    newer = importlib.import_module(MODULE)
    with user_code(config):
        assert importlib.import_module(MODULE).WIDTH == 4
    assert sys.modules.pop(MODULE) is newer


def test_blocks_of_two_threads_may_overlap(tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    first, second = ExitStack(), ExitStack()
    first.enter_context(user_code(document(tmp_path, code)))
    second.enter_context(user_code(document(tmp_path, code)))
    first.close()
    assert len(os.environ["PYTHONPATH"].split(os.pathsep)) == 2
    assert "PYTHONSAFEPATH" in os.environ
    second.close()
    assert os.environ["PYTHONPATH"] == "before"
    assert "PYTHONSAFEPATH" not in os.environ


def test_code_is_on_the_import_path_inside_the_block_alone(tmp_path: Path, code: Path) -> None:
    config = document(tmp_path, code)
    path = list(sys.path)
    with user_code(config):
        module = importlib.import_module(MODULE)
        assert module.WIDTH == 4
        folder = Path(str(module.__file__)).parent
        assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(folder) != str(code)
    assert MODULE not in sys.modules
    assert sys.path == path
    assert not folder.exists()


def test_the_workspace_keeps_the_code_that_a_resumed_run_needs(tmp_path: Path, code: Path) -> None:
    config = document(tmp_path, code)
    stage_outcomes.prepare_run_directory(config)
    (code / f"{MODULE}.py").write_text("WIDTH = 8\n")
    with user_code(config):
        assert importlib.import_module(MODULE).WIDTH == 4, "as the run began"
    (code / "more.py").write_text("")
    with refused("run.code", f"{MODULE}.py: ", "more.py: "):
        stage_outcomes.check_run_document(document(tmp_path, code))


def test_code_that_is_nowhere_or_damaged_is_refused(tmp_path: Path, code: Path) -> None:
    config = document(tmp_path, code)
    (code / f"{MODULE}.py").write_text("WIDTH = 8\n")
    with refused(str(config.run.code)[:16], field="launch.code"), user_code(config):
        pass
    elsewhere = podscale.load(config, **{"launch.code": "/nowhere"})
    stored = archive_path(config.run.workspace, str(config.run.code))
    with refused("launch.code", field=str(stored)), user_code(elsewhere):
        pass
    stored.parent.mkdir(parents=True)
    stored.write_bytes(b"damaged")
    with refused(str(config.run.code)[:16], field=str(stored)), user_code(config):
        pass


def test_pods_and_pipelines_have_small_code_in_their_document(tmp_path: Path, code: Path) -> None:
    cluster = {"launch.cluster.workspace_claim": "w", "run.workspace": "/workspace", "telemetry.port": 9400}
    config = podscale.load(document(tmp_path, code), **cluster)
    pods = loads(build_job_spec(config, "train").document)
    assert pods.run.code == config.run.code
    compiled = package_pipeline(config, kfp="2.16")
    assert str(bundle_code(config).launch.code_bundle)[:40] in compiled.replace("\\", "")
    there = podscale.load(pods, run={"workspace": tmp_path / "pod"}, launch={"code": "/not/in/pods"})
    with user_code(there):
        assert importlib.import_module(MODULE).WIDTH == 4
    assert archive_path(there.run.workspace, str(there.run.code)).exists()


def test_large_code_is_not_in_the_document(tmp_path: Path, code: Path) -> None:
    (code / "random.bin").write_bytes(os.urandom(100_000))
    config = document(tmp_path, code)
    assert bundle_code(config) == config


def test_a_model_directory_with_other_code_is_refused(tmp_path: Path, code: Path) -> None:
    config = document(tmp_path, code)
    copy_code_to_model(config, tmp_path)
    found = code_of_model(tmp_path, config)
    assert found is not None
    assert found.sha256 == config.run.code
    (tmp_path / MODEL_CODE).write_bytes(b"damaged")
    with refused(str(config.run.code)[:16], field=str(tmp_path / MODEL_CODE)):
        code_of_model(tmp_path, config)


MODEL = """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
"""


def test_models_that_are_evaluated_together_have_one_code(tmp_path: Path, code: Path) -> None:
    (code / f"{MODULE}.py").write_text(MODEL)
    config = podscale.load(document(tmp_path, code), **{"model.name": f"python:{MODULE}:build", "run.id": "r"})
    with user_code(config):
        write_model_run(tmp_path, dumps(config))
    model = tmp_path / "runs" / "r" / "model"
    copy_code_to_model(config, model)
    elsewhere = [tmp_path / "one", tmp_path / "two"]
    for directory in elsewhere:
        shutil.copytree(model, directory)
    names, workspace = list(map(str, elsewhere)), tmp_path / "new"
    together = adhoc_ensemble_document(names, {"run": {"workspace": workspace}}, "shards")
    with user_code(together):
        assert importlib.import_module(MODULE).build
    check_same_code(elsewhere[1], together)
    (elsewhere[1] / MODEL_CODE).write_bytes(pack_code(tmp_path / "runs").data)
    with refused("other code", field=str(elsewhere[1] / MODEL_CODE)):
        check_same_code(elsewhere[1], together)
