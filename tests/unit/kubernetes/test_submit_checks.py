"""Missing things are found before the first stage is submitted, one clear error for each."""

from collections.abc import Callable

import pytest

from podscale import config
from podscale.errors import InputError, InputErrors
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.submit_checks import check_before_submit
from podscale.runs.stage_outcomes import STAGES
from tests.support.cluster_objects import condition
from tests.support.fake_cluster import FakeCluster

DOCUMENT = (
    *("run.id=r1", "run.workspace=/work", "launch.nodes=2", "launch.processes=1", "launch.backend=trainjob"),
    *("launch.cluster.workspace_claim=w", "launch.cluster.service_account=trainer", "launch.cluster.queue=lq"),
)


@pytest.fixture(autouse=True)
def _complete(cluster: FakeCluster) -> None:
    """A cluster that has everything that the document names."""
    for claim in ("w", "data"):
        cluster.put("persistentvolumeclaims", {"metadata": {"name": claim}, "spec": {"accessModes": ["ReadWriteMany"]}})
    cluster.put("serviceaccounts", {"metadata": {"name": "trainer"}})
    cluster.put("localqueues", {"metadata": {"name": "lq"}, "spec": {"clusterQueue": "cq"}})


def check(api: ClusterClient, *changes: str) -> None:
    check_before_submit(api, config.load(None, (*DOCUMENT, *changes)), STAGES)


def errors(api: ClusterClient, *changes: str) -> list[InputError]:
    with pytest.raises(InputError) as caught:
        check(api, *changes)
    return list(caught.value.errors) if isinstance(caught.value, InputErrors) else [caught.value]


def test_a_complete_cluster_is_accepted_with_few_requests(api: ClusterClient, cluster: FakeCluster) -> None:
    check(api)
    assert api.requests <= 7
    assert {seen.method for seen in cluster.seen} == {"GET"}


def no_claim(cluster: FakeCluster) -> None:
    cluster.remove("persistentvolumeclaims", "w")


def lost_claim(cluster: FakeCluster) -> None:
    cluster.put("persistentvolumeclaims", {"metadata": {"name": "w"}, "spec": {}, "status": {"phase": "Lost"}})


def no_data_claim(cluster: FakeCluster) -> None:
    cluster.remove("persistentvolumeclaims", "data")


def no_account(cluster: FakeCluster) -> None:
    cluster.remove("serviceaccounts", "trainer")


def no_trainer(cluster: FakeCluster) -> None:
    del cluster.kinds["trainer.kubeflow.org/v1alpha1"]


def no_kueue(cluster: FakeCluster) -> None:
    del cluster.kinds["kueue.x-k8s.io/v1beta2"]


def no_queue(cluster: FakeCluster) -> None:
    cluster.remove("localqueues", "lq")


def stopped_queue(cluster: FakeCluster) -> None:
    state = {"conditions": [condition("Active", "False", "", "ClusterQueue cq is stopped")]}
    cluster.put("localqueues", {"metadata": {"name": "lq"}, "spec": {"clusterQueue": "cq"}, "status": state})


VOLUME = "launch.cluster.volumes=[{path: /data, claim: data}]"


@pytest.mark.parametrize(
    ("spoil", "field", "got", "changes"),
    [
        (no_claim, "launch.cluster.workspace_claim", "w", ()),
        (lost_claim, "launch.cluster.workspace_claim", "w", ()),
        (no_data_claim, "launch.cluster.volumes", "data", (VOLUME,)),
        (no_account, "launch.cluster.service_account", "trainer", ()),
        (no_trainer, "launch.backend", "trainjob", ()),
        (no_kueue, "launch.cluster.queue", "lq", ()),
        (no_queue, "launch.cluster.queue", "lq", ()),
        (stopped_queue, "launch.cluster.queue", "lq", ()),
        (lambda cluster: None, "launch.cluster.min_nodes", 1, ("launch.cluster.min_nodes=1",)),
    ],
    ids=lambda value: getattr(value, "__name__", None) if callable(value) else None,
)
def test_each_missing_thing_is_one_error(
    api: ClusterClient,
    cluster: FakeCluster,
    spoil: Callable[[FakeCluster], None],
    field: str,
    got: object,
    changes: tuple[str, ...],
) -> None:
    spoil(cluster)
    (error,) = errors(api, *changes)
    assert (error.field, error.got) == (field, got)
    assert error.hint


def test_all_that_is_missing_is_reported_at_once(api: ClusterClient, cluster: FakeCluster) -> None:
    for spoil in (no_claim, no_account, no_trainer, no_kueue):
        spoil(cluster)
    assert len(errors(api)) == 4


def test_a_missing_namespace_is_the_only_error(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.remove("namespaces", "train")
    (error,) = errors(api)
    assert (error.field, error.got) == ("launch.cluster.namespace", "train")


def test_what_may_not_be_read_is_left_out(api: ClusterClient, cluster: FakeCluster) -> None:
    plurals = ("persistentvolumeclaims", "serviceaccounts", "localqueues", "namespaces")
    for plural in plurals[:-1]:
        for thing in cluster.all(plural):
            cluster.remove(plural, thing["metadata"]["name"])
    cluster.denied |= {("get", plural) for plural in plurals}
    check(api)


def test_an_older_kueue_is_no_error(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.kinds["kueue.x-k8s.io/v1beta1"] = cluster.kinds.pop("kueue.x-k8s.io/v1beta2")
    check(api)


def test_the_queue_counts_for_ranks_only(api: ClusterClient, cluster: FakeCluster) -> None:
    no_kueue(cluster)
    check_before_submit(api, config.load(None, DOCUMENT), ("shard", "report"))
