"""Two teams, a namespace and a release each, on a real API server: neither sees or stops the runs of the other."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from podscale.cli import main
from podscale.kubernetes.cluster_doctor import PERMISSION_RULES
from podscale.kubernetes.render import render_job
from tests.support import api_server, crds, helm, rendering
from tests.support.api_server import ApiServer
from tests.support.cluster_policy import policy_values
from tests.support.outcomes import assert_error

TEAMS = ("team-a", "team-b")
ROLES = ("launcher", "trainer", "uploader")
KINDS = (
    "PyTorchJob",
    "JAXJob",
    "TrainJob",
    "TrainingRuntime",
    "JobSet",
    "ResourceFlavor",
    "ClusterQueue",
    "LocalQueue",
)
VALUES = {
    **helm.EVERYTHING,
    **policy_values(maxHours=200),
    "metrics": {"dashboards": {"enabled": True, "namespace": "monitoring"}, "provider": "none"},
}


def release(namespace: str, **values: Any) -> list[dict[str, Any]]:
    """Return the objects of a release with everything, without the pods and jobs that it starts itself."""
    objects = helm.template(None, VALUES | values, apis=[helm.KUEUE], namespace=namespace)
    return [item for item in objects if item["kind"] not in ("Pod", "Job")]


def key(item: dict[str, Any]) -> tuple[str, str, str]:
    return item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """API server with the release and a running job of each team."""
    with api_server.running(tmp_path_factory.mktemp("api"), [crds.definition(kind) for kind in KINDS]) as running:
        for name in (*TEAMS, "monitoring"):
            running.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        for team in TEAMS:
            running.apply(*release(team))
            changes = (f"launch.cluster.namespace={team}", "launch.processes=1", f"run.id={team}-run")
            running.apply(*render_job(rendering.spec(*changes), "pytorchjob").all_objects)
        yield running


def test_no_object_of_one_release_is_an_object_of_the_other(server: ApiServer) -> None:
    """Helm refuses to install an object of another release, such as a PriorityClass or a dashboard."""
    first, second = ({key(item) for item in release(team)} for team in TEAMS)
    cluster_scoped = {kind for kind, namespace, _ in first if not namespace}
    assert cluster_scoped == {
        *("PriorityClass", "ResourceFlavor", "ClusterQueue"),
        *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    }
    assert ("ConfigMap", "monitoring") in {(kind, namespace) for kind, namespace, _ in first}
    assert not first & second


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("team", "a-podscale"), ("team-a", "podscale")),
        (("x", "podscale"), ("x-podscale", "x-podscale")),
        (("n" * 62 + "a", "podscale"), ("n" * 62 + "b", "podscale")),
    ],
)
def test_similar_names_of_namespaces_and_releases_share_nothing(one: tuple[str, str], other: tuple[str, str]) -> None:
    names = [
        {item["metadata"]["name"] for item in release(namespace, fullnameOverride=name) if not key(item)[1]}
        for namespace, name in (one, other)
    ]
    assert names[0]
    assert not names[0] & names[1]
    assert all(len(name) <= 80 for name in names[0] | names[1])


def test_a_long_name_is_accepted(server: ApiServer) -> None:
    for item in release("n" * 63):
        if not key(item)[1]:
            assert server.refusal(item) == "", key(item)


def reviews(server: ApiServer, account: str, namespace: str) -> dict[str, bool]:
    """Ask the API server for every request of the launcher's Role, and a few others, in a namespace."""
    asked = [
        {"group": rule.group, "resource": rule.resource, "verb": verb, "name": rule.only_names}
        for rule in PERMISSION_RULES
        for verb in rule.verbs
    ]
    others = itertools.product(
        ("secrets", "pods", "pods/exec", "configmaps", "serviceaccounts/token"), ("create", "list")
    )
    asked += [{"group": "", "resource": resource, "verb": verb, "name": ""} for resource, verb in others]
    answers = {}
    for attributes in asked:
        resource, _, subresource = attributes["resource"].partition("/")
        request = {**attributes, "resource": resource, "subresource": subresource, "namespace": namespace}
        name = f"{attributes['verb']} {attributes['resource']}.{attributes['group']}"
        answers[name] = server.allows(f"system:serviceaccount:{account}", request)
    return answers


@pytest.mark.parametrize("role", ROLES)
def test_accounts_have_no_right_in_the_other_namespace(server: ApiServer, role: str) -> None:
    own = reviews(server, f"team-a:podscale-{role}", "team-a")
    other = reviews(server, f"team-a:podscale-{role}", "team-b")
    assert any(own.values()) == (role == "launcher")
    assert {request for request, allowed in other.items() if allowed} == set()


def as_launcher(server: ApiServer, monkeypatch: pytest.MonkeyPatch, team: str) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.account_kubeconfig(team, "podscale-launcher")))


@pytest.mark.parametrize(
    "command",
    [
        ["status", "team-b-run"],
        ["logs", "team-b-run"],
        ["stop", "team-b-run", "--no-wait"],
        ["stop", "team-b-run", "--delete", "--no-wait"],
        ["list"],
    ],
)
def test_commands_of_one_team_do_not_reach_the_other(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    as_launcher(server, monkeypatch, "team-a")
    code = main([*command, "--namespace", "team-b"])
    captured = capsys.readouterr()
    assert code == 2, captured.out + captured.err
    assert "team-b-run" not in captured.out
    assert "RBAC" in captured.err
    kept = server.kubectl("get", "pytorchjob", "team-b-run", "--namespace", "team-b", "-o", "jsonpath={.metadata}")
    assert kept.returncode == 0
    assert "deletionTimestamp" not in kept.stdout


def test_a_submission_to_the_other_namespace_creates_nothing(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_launcher(server, monkeypatch, "team-a")
    options = ["--set", "run.id=intruder", "--set", "launch.backend=pytorchjob", "--set", "launch.processes=1"]
    options += ["--set", "run.workspace=/workspace", "--set", "launch.cluster.workspace_claim=w"]
    code = main(["submit", "digits", *options, "--namespace", "team-b", "--stage", "train", "--no-wait"])
    assert_error(code, capsys.readouterr().err, "RBAC", field="PyTorchJob intruder")
    assert "intruder" not in server.kubectl("get", "pytorchjobs,networkpolicies", "--namespace", "team-b").stdout


def test_the_same_commands_work_in_the_own_namespace(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_launcher(server, monkeypatch, "team-a")
    assert main(["list", "--json"]) == 0
    assert [entry["run"] for entry in json.loads(capsys.readouterr().out)] == ["team-a-run"]
    assert main(["status", "team-a-run"]) == 0
    assert "team-a-run" in capsys.readouterr().out
