"""`podscale pipeline upload | run | schedule` through the command line, against an in-process KFP API."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale import cli
from podscale.pipelines.kfp_backend import KfpBackend
from tests.support.kfp_api import KfpApi, kfp_api
from tests.support.outcomes import assert_error

ON_CLUSTER = ("digits", "--set", "run.workspace=/workspace")


@pytest.fixture
def api(monkeypatch) -> Iterator[KfpApi]:
    with kfp_api() as running:
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", running.url)
        monkeypatch.setattr(KfpBackend.follow, "__kwdefaults__", {"poll_seconds": 0.0})
        yield running


def podscale(*arguments: str) -> int:
    """Exit code of a command; what it prints is captured by pytest."""
    try:
        return cli.main(["pipeline", *arguments])
    except SystemExit as end:
        return int(end.code or 0)


def test_a_run_is_uploaded_started_and_followed(api, capsys):
    api.store.script = [
        ("RUNNING", {"root": "RUNNING", "shard": "RUNNING", "shard-driver": "SUCCEEDED"}),
        ("RUNNING", {"shard": "SUCCEEDED", "train": "RUNNING"}),
        ("SUCCEEDED", {"shard": "SUCCEEDED", "train": "SUCCEEDED", "summary": "SUCCEEDED"}),
    ]
    assert podscale("run", *ON_CLUSTER, "--wait", "--service-account", "launcher") == 0
    out, err = capsys.readouterr()
    (run,) = api.store.runs.values()
    assert out == f"run digits: {api.url}/#/runs/details/{run['run_id']}\n"
    shown = [line.split()[1:] for line in err.splitlines() if line.strip()[0].isdigit()]
    assert shown == [
        ["shard", "running"],
        ["run", "running"],
        ["shard", "succeeded"],
        ["train", "running"],
        ["train", "succeeded"],
        ["summary", "succeeded"],
        ["run", "succeeded"],
    ]
    assert "uploaded" in err
    assert run["service_account"] == "launcher"
    assert run["runtime_config"]["parameters"] == {"run_id": "digits"}
    document = json.dumps(api.store.packages[0][0]).replace('\\"', '"')
    assert '"workspace":"/workspace"' in document


def test_a_run_that_fails_fails_the_command(api, capsys):
    api.store.script = [("FAILED", {"train": "FAILED"})]
    assert podscale("run", *ON_CLUSTER, "--wait") == 1
    err = capsys.readouterr().err
    assert "digits" in err
    assert "FAILED" in err


def test_the_error_of_a_failed_stage_is_printed(api, capsys):
    api.store.has_tasks_request = True
    api.store.script = [("FAILED", {"train": "FAILED", "summary": "SUCCEEDED"})]
    error = "train: rank 3 was lost in step 7"
    outputs = {"parameters": [{"name": "errors", "value": error}]}
    api.store.task_details = {"summary": {"outputs": outputs}}
    assert podscale("run", *ON_CLUSTER, "--wait") == 1
    assert f"podscale: {error}\n" in capsys.readouterr().err


def test_uploading_prints_the_version_for_machines(api, capsys):
    assert podscale("upload", *ON_CLUSTER, "--pipeline", "mine", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["new"] is True
    assert printed["link"].startswith(f"{api.url}/#/pipelines/details/")
    assert [pipeline["name"] for pipeline in api.store.pipelines.values()] == ["mine"]


def test_a_schedule_names_each_run_by_its_time(api, capsys):
    assert podscale("schedule", *ON_CLUSTER, "--cron", "0 2 * * *", "--name", "nightly") == 0
    (made,) = api.store.recurringruns.values()
    assert made["display_name"] == "nightly"
    assert made["trigger"]["cron_schedule"]["cron"] == "0 0 2 * * *"
    assert made["runtime_config"]["parameters"] == {"run_id": "digits-{time}"}
    assert "nightly (0 0 2 * * *)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "field", "says"),
    [
        (["run", "digits"], "run.workspace", ["/workspace"]),
        (["run", *ON_CLUSTER, "--kfp", "1.8"], "--kfp", ["1.8", "2.15, 2.16"]),
        (["schedule", *ON_CLUSTER, "--cron", "daily"], "--cron", ["daily"]),
        (["schedule", *ON_CLUSTER, "--cron", "61 2 * * *"], "--cron", ["minute", "61"]),
        (["schedule", *ON_CLUSTER, "--cron", "0 2 * * *", "--set", f"run.id={'a' * 23}"], "run.id", ["22 characters"]),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(api, capsys, arguments, field, says):
    assert_error(podscale(*arguments), capsys.readouterr().err, *says, field=field)
    assert not api.store.packages
    assert not api.store.pipelines


def test_the_document_overrides_the_defaults_of_a_file(api, tmp_path: Path):
    path = tmp_path / "defaults.yaml"
    path.write_text("run: {workspace: /shared}\nlaunch: {image: 'registry/ours:1', retries: 7}\n")
    assert podscale("upload", "digits", "--defaults", str(path), "--set", "run.workspace=/shared") == 0
    text = json.dumps(api.store.packages[0])
    assert "registry/ours:1" in text
    assert '"maxRetryCount": 7' in text
