"""The API client: outages, a busy server, credentials, and the message for every refusal."""

import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.errors import ExitCode, InputError
from podscale.kubernetes import informer, retry, transport
from podscale.kubernetes.client import ClusterClient, connect_cluster
from podscale.kubernetes.errors import (
    ApiAlreadyExists,
    ApiConflict,
    ApiError,
    ApiNotFound,
    ApiUnreachable,
    KindNotServed,
    WatchExpired,
)
from podscale.kubernetes.informer import Informer
from podscale.kubernetes.resources import JOB_KINDS, PODS
from podscale.kubernetes.retry import RetryPolicy
from podscale.kubernetes.transport import NamedCluster, StreamInterrupted
from tests.support.certificates import Authority
from tests.support.cluster_objects import job, pod
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_state import Answer, Seen
from tests.support.polling import until
from tests.support.refusals import refused

PYTORCHJOBS = JOB_KINDS["pytorchjob"]


def once(status: int, message: str = "", **headers: str) -> Callable[[Seen], Answer | None]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda seen: Answer(status, "", message, headers=named)


def later(seconds: float, action: Callable[[], None]) -> None:
    threading.Timer(seconds, action).start()


def test_an_object_is_created_read_changed_and_deleted(api: ClusterClient, cluster: FakeCluster) -> None:
    made = api.create(PYTORCHJOBS, job())
    assert api.get(PYTORCHJOBS, "r1")["metadata"]["uid"] == made["metadata"]["uid"]
    api.patch(PYTORCHJOBS, "r1", {"spec": {"runPolicy": {"suspend": True}}})
    assert api.get(PYTORCHJOBS, "r1")["spec"]["runPolicy"] == {"suspend": True}
    api.delete(PYTORCHJOBS, "r1")
    assert api.get_or_none(PYTORCHJOBS, "r1") is None


def test_a_dry_run_creates_nothing_and_requests_strict_field_validation(
    api: ClusterClient, cluster: FakeCluster
) -> None:
    api.create(PYTORCHJOBS, job(), dry_run=True)
    assert cluster.all("pytorchjobs") == []
    assert cluster.seen[-1].query == {"fieldValidation": "Strict", "dryRun": "All"}


def test_a_job_is_deleted_only_if_it_is_still_this_one(api: ClusterClient, cluster: FakeCluster) -> None:
    api.create(PYTORCHJOBS, job())
    with pytest.raises(ApiConflict):
        api.delete(PYTORCHJOBS, "r1", uid="another")
    assert cluster.get("pytorchjobs", "r1") is not None


def test_long_lists_are_read_in_pages(api: ClusterClient, cluster: FakeCluster) -> None:
    for number in range(260):
        cluster.put("pods", pod(number))
    found, version = api.list(PODS, labels="podscale.dev/run=r1")
    assert len(found) == 260
    assert len(cluster.seen) == 2
    assert int(version) >= 260


def test_a_busy_server_is_retried_after_the_time_that_it_names(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.faults.append(once(429, "slow down", Retry_After="1"))
    began = time.monotonic()
    api.version()
    assert time.monotonic() - began > 1.0


def test_a_failing_server_is_retried(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.faults += [once(503), once(500)]
    api.create(PYTORCHJOBS, job())
    assert len(cluster.seen) == 3


def test_a_response_that_breaks_off_is_retried(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.faults.append(lambda seen: Answer(200, half=True))
    assert api.version()["gitVersion"] == "v1.35.4"
    assert len(cluster.seen) == 2


def test_an_outage_is_waited_out_and_reported_once(
    api: ClusterClient, cluster: FakeCluster, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "NOTICE_AFTER_SECONDS", 0.1)
    cluster.down()
    later(0.5, cluster.up)
    assert api.version()["gitVersion"] == "v1.35.4"
    assert len(notices) == len(set(notices)) == 2


def test_retries_end_with_one_error(cluster: FakeCluster) -> None:
    api = connect_cluster(NamedCluster(), policy=RetryPolicy(0.4, first_pause=0.05))
    cluster.down()
    with pytest.raises(ApiUnreachable, match="kubectl cluster-info") as raised:
        api.version()
    assert raised.value.exit_code == ExitCode.FAILED  # not BAD_INPUT: the same command may succeed later


def test_a_server_that_accepts_and_never_answers_does_not_hang(cluster: FakeCluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = Path(tmp_path / "kubeconfig")
        config.write_text(config.read_text().replace(str(cluster._port), str(silent.getsockname()[1])))
        api = connect_cluster(NamedCluster(), policy=RetryPolicy(0.5, read_timeout=0.3, first_pause=0.05))
        began = time.monotonic()
        with pytest.raises(ApiUnreachable):
            api.version()
        assert time.monotonic() - began < 5


def test_a_new_token_is_read_when_the_old_one_is_refused(
    api: ClusterClient, cluster: FakeCluster, tmp_path: Path
) -> None:
    api.version()
    cluster.tokens = {"new"}
    cluster.kubeconfig(tmp_path / "kubeconfig", token="new")
    assert api.version()


def test_connecting_sends_no_request_and_leaves_no_file(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    api = connect_cluster(NamedCluster())
    assert cluster.seen == []
    api.list(PODS)
    assert [seen.path for seen in cluster.seen] == ["/api/v1/namespaces/train/pods"]
    assert list(temporary.iterdir()) == []


def test_names_are_quoted_in_urls() -> None:
    assert PODS.path("../nodes", "a/b", "log") == "/api/v1/namespaces/a%2Fb/pods/..%2Fnodes/log"


def test_a_certificate_of_another_cluster_is_bad_input_at_once(cluster: FakeCluster, tmp_path: Path) -> None:
    pair, other = Authority(tmp_path).sign("server"), Authority(tmp_path, "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = tmp_path / "kubeconfig"
        config = yaml.safe_load(file.read_text())
        entry = {
            "server": f"https://127.0.0.1:{server.server_address[1]}",
            "certificate-authority": str(other.pair.certificate),
        }
        config["clusters"][0]["cluster"] = entry
        file.write_text(yaml.safe_dump(config))
        with pytest.raises(InputError, match="certificate verify failed") as raised:
            connect_cluster(NamedCluster()).version()
        server.shutdown()
    assert "context fake" in raised.value.field


def test_the_error_of_an_expired_token_names_the_login(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.tokens = set()
    with refused("HTTP 401", "get-credentials", kind=ApiError):
        api.version()


def test_no_cluster_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with refused("KUBECONFIG", "launch.backend=local") as refusal:
        connect_cluster(NamedCluster())
    assert ".." not in refusal.text


def test_a_broken_kubeconfig_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("{")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "broken"))
    with refused(tmp_path / "broken"):
        connect_cluster(NamedCluster())


def test_the_error_of_a_wrong_context_lists_the_existing_ones(cluster: FakeCluster) -> None:
    with refused("fake", field="launch.cluster.context", got="prod"):
        connect_cluster(NamedCluster(context="prod"))


def test_the_namespace_is_the_documents_else_the_contexts(cluster: FakeCluster) -> None:
    assert connect_cluster(NamedCluster()).namespace == "train"
    assert connect_cluster(NamedCluster(namespace="other")).namespace == "other"


def test_the_error_of_a_missing_kind_names_its_operator(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.kinds["kubeflow.org/v1"].discard("pytorchjobs")
    with refused("Kubeflow Training Operator 1.9", field="PyTorchJob", kind=KindNotServed):
        api.create(PYTORCHJOBS, job())


def test_the_error_of_an_old_version_names_both_versions(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.kinds["jobset.x-k8s.io/v1alpha1"] = cluster.kinds.pop("jobset.x-k8s.io/v1alpha2")
    error = api.missing_error(JOB_KINDS["jobset"])
    assert error.field == "JobSet"
    assert " v1alpha1" in error.problem
    assert "JobSet 0.12 or newer" in error.hint


def test_the_error_of_an_unknown_field_names_a_newer_operator(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.faults.append(once(400, 'strict decoding error: unknown field "spec.replicatedJobs[0].groupName"'))
    with refused("spec.replicatedJobs[0].groupName", "JobSet 0.12", field="JobSet r1", kind=ApiError):
        api.create(JOB_KINDS["jobset"], job("JobSet"))


def test_rbac_names_verb_and_resource(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.denied.add(("create", "pytorchjobs"))
    expected = ("me may not create pytorchjobs.kubeflow.org", "namespace train", "podscale doctor --cluster")
    with refused(*expected, field="PyTorchJob r1", kind=ApiError):
        api.create(PYTORCHJOBS, job())


REFUSALS = {
    "exceeded quota": (
        'pytorchjobs.kubeflow.org "r1" is forbidden: exceeded quota: few, requested: count/pytorchjobs=1, limited: 0',
        ("exceeded quota: few", "kubectl describe quota -n train"),
    ),
    "webhook": (
        'admission webhook "validator.pytorchjob.training-operator.kubeflow.org" denied the request: spec is wrong',
        ("spec is wrong",),
    ),
    "pod security": (
        'pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged',
        ("launch.cluster.security=restricted",),
    ),
    "ending namespace": (
        "unable to create new content in namespace train because it is being terminated",
        ("namespace train", "launch.cluster.namespace"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_the_error_of_admission_names_the_remedy(api: ClusterClient, cluster: FakeCluster, name: str) -> None:
    message, expected = REFUSALS[name]
    cluster.admission.append(lambda plural, body: Answer(403, "Forbidden", message))
    with refused(*expected, field="PyTorchJob r1", kind=ApiError):
        api.create(PYTORCHJOBS, job())


def test_a_webhook_without_endpoints_is_retried_briefly_and_names_the_doctor(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "WEBHOOK_TIMEOUT_SECONDS", 0.2)
    api = connect_cluster(NamedCluster(), policy=RetryPolicy(1800.0, first_pause=0.05))
    cluster.admission.append(lambda *_: Answer(500, "InternalError", 'failed calling webhook "v": no endpoints'))
    with refused("no endpoints", "podscale doctor --cluster", kind=ApiUnreachable):
        api.create(PYTORCHJOBS, job())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_keeps_failing_is_not_bad_input(
    cluster: FakeCluster, notices: list[str], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(retry, "NOTICE_AFTER_SECONDS", 0.0)
    api = connect_cluster(NamedCluster(), policy=RetryPolicy(0.4, first_pause=0.05), notify=notices.append)
    cluster.admission.append(lambda *_: Answer(status, "InternalError", "etcdserver: leader changed"))
    with pytest.raises(ApiUnreachable, match="etcdserver: leader changed") as raised:
        api.create(PYTORCHJOBS, job())
    assert raised.value.exit_code == ExitCode.FAILED
    assert f"HTTP {status}" in notices[0]
    assert "PyTorchJob r1" in notices[0]
    assert "etcdserver: leader changed" in notices[0]


def test_a_missing_namespace_is_refused(cluster: FakeCluster) -> None:
    with refused("kubectl create namespace nowhere", kind=ApiNotFound):
        connect_cluster(NamedCluster(namespace="nowhere")).create(PYTORCHJOBS, job())


def test_the_error_of_a_long_name_names_run_id(api: ClusterClient) -> None:
    with refused("run.id", field=f"PyTorchJob {'x' * 64}", kind=ApiError):
        api.create(PYTORCHJOBS, job(name="x" * 64))


def test_an_existing_object_differs_from_a_conflict(api: ClusterClient) -> None:
    api.create(PYTORCHJOBS, job())
    with pytest.raises(ApiAlreadyExists):
        api.create(PYTORCHJOBS, job())


def test_a_retried_watch_sends_the_same_request(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.faults.append(once(503))
    cluster.put("pods", pod(0))
    assert next(api.watch(PODS, "100", labels="podscale.dev/run=r1"))["type"] == "ADDED"
    first, second = cluster.seen
    assert first == second
    assert first.query["resourceVersion"] == "100"


def test_a_watch_yields_changes_and_fails_when_it_is_too_old(api: ClusterClient, cluster: FakeCluster) -> None:
    _, version = api.list(PODS)
    cluster.put("pods", pod(0))
    changes = api.watch(PODS, version)
    assert next(changes)["type"] == "ADDED"
    cluster.forget_history()
    with pytest.raises(StreamInterrupted):
        next(changes)
    with pytest.raises(WatchExpired):
        list(api.watch(PODS, version))


def test_server_errors_within_a_watch_do_not_end_it(
    api: ClusterClient, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informer, "RETRY_SECONDS", 0.02)
    errors = [Answer(500, "InternalError", "etcdserver: no leader"), Answer(504, "Timeout", "too large version")]
    real = cluster.changes

    def changes(*arguments: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        if errors:
            yield "ERROR", vars(errors[0]) | {"kind": "Status", "code": errors.pop(0).status}
        else:
            yield from real(*arguments)

    monkeypatch.setattr(cluster, "changes", changes)
    watched = Informer(api, PODS, threading.Event())
    cluster.put("pods", pod(0))
    until(lambda: len(watched.objects()) == 1 and not errors)
    cluster.put("pods", pod(1))
    until(lambda: len(watched.objects()) == 2)
    watched.close()


def test_can_i_returns_the_permissions_of_the_server(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.denied.add(("get", "pods/log"))
    assert api.can_i("get", "", "pods")
    assert not api.can_i("get", "", "pods/log")
