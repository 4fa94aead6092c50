"""Exported files in the model registry of a real MLflow server.

The package is not among the development packages. To run this test: `pip install mlflow`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from podscale.errors import PodscaleError
from podscale.runs import RunDirectory
from podscale.stages import local
from tests.support.digits_run import DIGITS, write_digits_set
from tests.support.polling import until
from tests.support.ports import free_port
from tests.support.prediction import write_model_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("mlflow") is None or find_spec("flask") is None, reason="not installed: mlflow"),
]
START_SECONDS = 300.0
DOCUMENT = """
run: {{id: small, seed: 3}}
input: {{image_size: 16}}
model: {{name: "python:tests.support.user_models:depthwise"}}
export: {{formats: [safetensors, torchscript], images: 40, mlflow_model: digits classifier}}
telemetry: {{mlflow: {{tracking_uri: "{uri}", experiment: exports}}}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with its own database and artifacts."""
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    uri = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True)
    try:
        until(lambda: answers(f"{uri}/health"), START_SECONDS)
        yield uri
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def test_a_run_registers_its_files_once(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow import MlflowClient

    shards = tmp_path / "shards"
    write_digits_set(shards)
    config = write_model_run(tmp_path, DOCUMENT.format(uri=server), DIGITS)
    local.export(config, str(shards))
    out = capsys.readouterr().out
    assert f" {server}" in out
    run, client = RunDirectory.for_config(config), MlflowClient(server)
    (version,) = client.search_model_versions("name = 'digits classifier'")
    assert f"version {version.version} " in out
    report = json.loads((run.exports / "model.torchscript.json").read_text())
    assert json.loads(version.tags["file_sha256"])["model.torchscript"] == report["sha256"]
    assert (version.tags["run"], version.tags["weights_sha256"]) == ("small", report["weights_sha256"])
    assert version.tags["formats"] == "safetensors,torchscript"
    assert version.run_id == json.loads((run.trackers / "mlflow.json").read_text())["id"]
    folder = f"podscale-export/{version.tags['metadata_sha256'][:12]}"
    assert version.source.endswith(f"/{folder}")
    fetched = Path(client.download_artifacts(version.run_id, folder, str(tmp_path)))
    for name in ("model.safetensors", "model.torchscript", "model.torchscript.json"):
        assert (fetched / name).read_bytes() == (run.exports / name).read_bytes()

    run.stage_inputs.unlink()  # the stage runs again
    local.export(config, str(shards))
    assert "version 1 " in capsys.readouterr().out
    assert len(client.search_model_versions("name = 'digits classifier'")) == 1
    weights = run.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    local.export(config, str(shards))
    assert "version 2 " in capsys.readouterr().out
    assert len(client.search_model_versions("name = 'digits classifier'")) == 2
    (tmp_path / "again").mkdir()
    again = Path(client.download_artifacts(version.run_id, folder, str(tmp_path / "again")))
    name = "model.safetensors"
    assert (again / name).read_bytes() == (fetched / name).read_bytes() != (run.exports / name).read_bytes()


def test_a_server_that_is_away_fails_the_stage_after_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    shards = tmp_path / "shards"
    write_digits_set(shards)
    config = write_model_run(tmp_path, DOCUMENT.format(uri=f"http://127.0.0.1:{free_port()}"), DIGITS)
    with pytest.raises(PodscaleError) as failure:
        local.export(config, str(shards))
    assert failure.value.field == "export.mlflow_model"
    assert (RunDirectory.for_config(config).exports / "model.torchscript").exists()
