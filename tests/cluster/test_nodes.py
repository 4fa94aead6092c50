"""The cluster provides what the other tests rely on."""

import pytest
from kubernetes.client.exceptions import ApiException

from tests.cluster.cluster import Cluster, plain_pod

pytestmark = pytest.mark.cluster_ci


def test_a_pod_resolves_services_and_finds_what_an_earlier_one_wrote(
    cluster: Cluster, namespace: str, image: str
) -> None:
    cluster.run(namespace, image, "sh", "-c", "id -u > /workspace/user; mkdir /workspace/folder")
    output = cluster.run(
        namespace, image, "sh", "-c", "cat /workspace/user; getent hosts kubernetes.default.svc.cluster.local"
    )
    user, address = output.splitlines()
    assert user == "65532"
    assert address.split()[1] == "kubernetes.default.svc.cluster.local"


def test_pod_security_restricted_is_enforced(cluster: Cluster, namespace: str, image: str) -> None:
    pod = plain_pod("as-root", image, ["true"])
    pod["spec"]["securityContext"] = {}
    with pytest.raises(ApiException) as refused:
        cluster.core.create_namespaced_pod(namespace, pod)
    assert refused.value.status == 403
    assert "violates PodSecurity" in str(refused.value.body)


def test_root_file_system_and_service_account_token_are_out_of_reach(
    cluster: Cluster, namespace: str, image: str
) -> None:
    script = "touch /etc/x 2>&1; touch /opt/x 2>&1; ls /var/run/secrets/kubernetes.io 2>&1; touch /tmp/x; ls /tmp/x"
    out = cluster.run(namespace, image, "sh", "-c", script).splitlines()
    assert "Read-only file system" in out[0]
    assert "Read-only file system" in out[1]
    assert "No such file" in out[2]
    assert out[3] == "/tmp/x"


def test_an_evicted_pod_is_asked_to_end_first(cluster: Cluster, namespace: str, image: str) -> None:
    script = "trap 'echo asked > /workspace/asked; exit 0' TERM; touch /workspace/waiting; while :; do sleep 0.2; done"
    cluster.core.create_namespaced_pod(namespace, plain_pod("evicted", image, ["sh", "-c", script]))
    cluster.wait("the pod", lambda: cluster.core.read_namespaced_pod("evicted", namespace).status.phase == "Running")
    cluster.wait("its trap", lambda: "waiting" in cluster.run(namespace, image, "ls", "/workspace"))
    cluster.evict(namespace, "evicted")
    assert "asked" in cluster.wait("its answer", lambda: cluster.run(namespace, image, "ls", "/workspace"), poll=2)
