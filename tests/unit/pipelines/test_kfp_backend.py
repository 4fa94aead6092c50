"""Uploading, running, scheduling and following against an in-process KFP API, through kfp's own client."""

import logging
from collections.abc import Iterator

import pytest

from podscale.config import load
from podscale.errors import PodscaleError
from podscale.pipelines import kfp_backend, presets
from podscale.pipelines.kfp_backend import KfpBackend, RunRequest, connect_backend
from podscale.pipelines.kfp_endpoint import KfpEndpoint
from podscale.pipelines.kfp_runs import PipelineProgress
from podscale.pipelines.package import compile_to_yaml
from podscale.pipelines.training_pipeline import training_pipeline
from tests.support.kfp_api import KfpApi, kfp_api
from tests.support.refusals import refused

NAME = "podscale-training"


@pytest.fixture(scope="module")
def package() -> str:
    return compile_to_yaml(training_pipeline(load(presets.resolve_preset(None), ["run.workspace=/workspace"])))


@pytest.fixture
def api() -> Iterator[KfpApi]:
    with kfp_api() as running:
        yield running


@pytest.fixture
def backend(api) -> KfpBackend:
    return connect_backend(KfpEndpoint(api.url))


def test_the_first_upload_makes_the_pipeline_and_the_next_a_version(api, backend, package):
    first = backend.upload(package, NAME, "digits", "d")
    second = backend.upload(f"{package}\n# changed\n", NAME, "digits", "d")
    assert [pipeline["name"] for pipeline in api.store.pipelines.values()] == [NAME]
    assert first.new
    assert second.new
    assert first.pipeline_id == second.pipeline_id
    assert first.version_id != second.version_id
    assert [v["name"] for v in api.store.versions.values()] == [first.name, second.name]
    assert first.link == f"{api.url}/#/pipelines/details/{first.pipeline_id}/version/{first.version_id}"


def test_the_same_package_is_sent_once(api, backend, package):
    first = backend.upload(package, NAME, "digits", "d")
    again = backend.upload(package, NAME, "digits", "d")
    assert not again.new
    assert again.version_id == first.version_id
    assert len(api.store.packages) == 1


def test_a_package_that_the_server_does_not_take(backend, package):
    with refused("invalid v2 pipeline spec", "KFP 2.15", field=backend.endpoint.host):
        backend.upload(
            package.replace("schemaVersion: 2.1.0", "schemaVersion: 2.1.0\nnonsense: 1"), NAME, "digits", "d"
        )


def test_a_run_belongs_to_its_version_and_experiment(api, backend, package):
    version = backend.upload(package, NAME, "digits", "d")
    started = backend.run(RunRequest(version, "digits", "experiments", {"run_id": "other"}, "launcher"))
    (run,) = api.store.runs.values()
    assert run["display_name"] == "digits"
    assert run["pipeline_version_reference"] == {
        "pipeline_id": version.pipeline_id,
        "pipeline_version_id": version.version_id,
    }
    assert run["runtime_config"]["parameters"] == {"run_id": "other"}
    assert run["service_account"] == "launcher"
    assert [e["display_name"] for e in api.store.experiments.values()] == ["experiments"]
    assert started.link == f"{api.url}/#/runs/details/{run['run_id']}"
    backend.run(RunRequest(version, "again", "experiments", {}))
    assert len(api.store.experiments) == 1


def test_a_parameter_that_the_pipeline_does_not_have(backend, package):
    version = backend.upload(package, NAME, "digits", "d")
    with refused("parameter epoch", field=backend.endpoint.host):
        backend.run(RunRequest(version, "digits", "podscale", {"epoch": 3}))


def test_a_schedule_is_not_made_twice_but_replaced_when_asked(api, backend, package):
    version = backend.upload(package, NAME, "digits", "d")

    def schedule(cron: str, *, replace: bool = False) -> str:
        parameters = {"run_id": "digits-{time}"}
        return backend.schedule(RunRequest(version, "nightly", "podscale", parameters), cron, replace=replace).link

    link = schedule("0 0 2 * * *")
    (made,) = api.store.recurringruns.values()
    assert made["trigger"]["cron_schedule"]["cron"] == "0 0 2 * * *"
    assert made["max_concurrency"] in (1, "1")
    assert made["no_catchup"] is True
    assert made["mode"] == "ENABLE"
    assert link.endswith(f"/#/recurringrun/details/{made['recurring_run_id']}")
    with refused("--replace", field="schedule nightly"):
        schedule("0 0 3 * * *")
    schedule("0 0 3 * * *", replace=True)
    assert [run["trigger"]["cron_schedule"]["cron"] for run in api.store.recurringruns.values()] == ["0 0 3 * * *"]


def test_a_schedule_whose_replacement_is_refused_stays(api, backend, package):
    version = backend.upload(package, NAME, "digits", "d")
    backend.schedule(RunRequest(version, "nightly", "podscale", {}), "0 0 2 * * *")
    with refused("parameter epoch", field=backend.endpoint.host):
        backend.schedule(RunRequest(version, "nightly", "podscale", {"epoch": 3}), "0 0 3 * * *", replace=True)
    assert [run["trigger"]["cron_schedule"]["cron"] for run in api.store.recurringruns.values()] == ["0 0 2 * * *"]


def test_following_shows_every_change_and_ends_with_the_run(api, backend, package):
    started = backend.run(RunRequest(backend.upload(package, NAME, "digits", "d"), "digits", "podscale", {}))
    api.store.script = [
        ("RUNNING", {"shard": "RUNNING"}),
        ("RUNNING", {"shard": "RUNNING"}),
        ("RUNNING", {"shard": "SUCCEEDED", "train": "RUNNING"}),
        ("FAILED", {"shard": "SUCCEEDED", "train": "FAILED"}),
    ]
    seen: list[PipelineProgress] = []
    assert backend.follow(started.id, seen.append, poll_seconds=0) == "FAILED"
    assert [progress.tasks for progress in seen] == [
        {"shard": "RUNNING"},
        {"shard": "SUCCEEDED", "train": "RUNNING"},
        {"shard": "SUCCEEDED", "train": "FAILED"},
    ]


def test_following_a_backend_that_lists_tasks_by_a_request_of_its_own(api, backend, package):
    """As seen on a backend without ML Metadata: run_details stays empty, and /tasks has pages."""
    started = backend.run(RunRequest(backend.upload(package, NAME, "digits", "d"), "digits", "podscale", {}))
    api.store.has_tasks_request = True
    api.store.script = [
        ("RUNNING", {"configure": "RUNNING"}),
        ("FAILED", {"configure": "SUCCEEDED", "shard": "FAILED", "summary": "SUCCEEDED"}),
    ]
    seen: list[PipelineProgress] = []
    assert backend.follow(started.id, seen.append, poll_seconds=0) == "FAILED"
    assert [progress.tasks for progress in seen] == [
        {"configure": "RUNNING"},
        {"configure": "SUCCEEDED", "shard": "FAILED", "summary": "SUCCEEDED"},
    ]


def test_a_backend_without_that_request_is_asked_once(api, backend, package):
    started = backend.run(RunRequest(backend.upload(package, NAME, "digits", "d"), "digits", "podscale", {}))
    api.store.script = [("PENDING", {}), ("PENDING", {}), ("SUCCEEDED", {"shard": "SUCCEEDED"})]
    assert backend.follow(started.id, lambda _: None, poll_seconds=0) == "SUCCEEDED"
    assert [path for _, path in api.store.requests if path.endswith("/tasks")] == [
        f"/apis/v2beta1/runs/{started.id}/tasks"
    ]


def test_the_iterations_of_a_loop_have_one_state(api, backend, package):
    started = backend.run(RunRequest(backend.upload(package, NAME, "digits", "d"), "digits", "podscale", {}))
    api.store.has_tasks_request = True
    api.store.script = [("SUCCEEDED", {"pack.0": "SUCCEEDED", "pack.1": "RUNNING", "pack.2": "SUCCEEDED"})]
    api.store.task_details = {f"pack.{index}": {"display_name": "pack"} for index in range(3)}
    seen: list[PipelineProgress] = []
    backend.follow(started.id, seen.append, poll_seconds=0)
    assert seen[-1].tasks == {"pack": "RUNNING"}


ARGO_MESSAGE = "main: Error (exit code 2): podscale train: launch.backend: this cluster has no PyTorchJob"


@pytest.mark.parametrize(
    ("details", "workflow", "errors"),
    [
        (
            {"summary": {"outputs": {"parameters": [{"name": "errors", "value": "train: no device"}]}}},
            {},
            ["train: no device"],
        ),
        (
            {"train": {"status_metadata": {"message": "failed to execute component: exit status 2"}}},
            {"n1": {"phase": "Failed", "message": ARGO_MESSAGE}, "n2": {"phase": "Failed", "message": "child failed"}},
            ["train: launch.backend: this cluster has no PyTorchJob"],
        ),
        ({"train": {"status_metadata": {"message": "failed to execute component: exit status 2"}}}, {}, []),
    ],
)
def test_the_errors_of_the_stages_are_read_from_where_the_backend_has_them(
    api, backend, package, details, workflow, errors
):
    started = backend.run(RunRequest(backend.upload(package, NAME, "digits", "d"), "digits", "podscale", {}))
    api.store.has_tasks_request = "summary" in details or not workflow
    api.store.script = [("FAILED", {"train": "FAILED", "summary": "SUCCEEDED"})]
    api.store.task_details = details
    api.store.workflow = {"status": {"nodes": workflow}} if workflow else {}
    backend.follow(started.id, lambda _: None, poll_seconds=0)
    assert backend.stage_errors(started.id) == errors


def test_following_outlasts_an_outage_but_not_for_ever(api, backend, package, monkeypatch):
    started = backend.run(RunRequest(backend.upload(package, NAME, "digits", "d"), "digits", "podscale", {}))
    api.store.script = [("SUCCEEDED", {})]
    api.store.failures = 4
    assert backend.follow(started.id, lambda _: None, poll_seconds=0) == "SUCCEEDED"
    monkeypatch.setattr(kfp_backend, "OUTAGE_SECONDS", 0.0)
    api.close()
    with refused(field=backend.endpoint.host, kind=PodscaleError):
        backend.follow(started.id, lambda _: None, poll_seconds=0)


@pytest.mark.parametrize("status", [401, 403])
def test_credentials_that_are_refused_later(api, backend, package, status):
    api.store.refuse = status
    with refused("--token-file", field=backend.endpoint.host, got=status):
        backend.upload(package, NAME, "digits", "d")


def test_a_token_that_is_renewed_reaches_every_request(api, package, tmp_path):
    token = tmp_path / "token"
    token.write_text("one")
    api.store.token = "one"
    backend = connect_backend(KfpEndpoint(api.url, token_file=token))
    backend.upload(package, NAME, "digits", "d")
    token.write_text("two")
    api.store.token = "two"
    assert not backend.upload(package, NAME, "digits", "d").new


def test_a_shared_backend_wants_a_namespace_and_is_asked_in_it(api, package):
    api.store.multi_user = True
    with refused("--namespace", field=api.url):
        connect_backend(KfpEndpoint(api.url))
    backend = connect_backend(KfpEndpoint(api.url, namespace="ada"))
    version = backend.upload(package, NAME, "digits", "d")
    backend.run(RunRequest(version, "digits", "podscale", {}))
    assert [pipeline["namespace"] for pipeline in api.store.pipelines.values()] == ["ada"]
    assert [experiment["namespace"] for experiment in api.store.experiments.values()] == ["ada"]


def test_the_client_neither_prints_nor_silences_others(api, package, capfd, caplog):
    backend = connect_backend(KfpEndpoint(api.url))
    backend.run(RunRequest(backend.upload(package, NAME, "digits", "d"), "digits", "podscale", {}))
    assert capfd.readouterr().out == ""
    with caplog.at_level(logging.INFO):
        logging.getLogger("other").info("heard")
    assert "heard" in caplog.text
