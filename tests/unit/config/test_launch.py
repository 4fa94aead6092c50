"""Cluster section of a document: conflicting options are refused with their location; defaults below a document."""

from pathlib import Path

import pytest

from podscale.config import Defaults, RunConfig, dumps, load, loads, result_values
from podscale.config.yaml_reader import NotYaml
from podscale.errors import ABSENT
from tests.support.refusals import refused


def cluster(*changes: str) -> RunConfig:
    return load(None, [f"launch.cluster.{change}" for change in changes])


@pytest.mark.parametrize(
    ("change", "field", "got"),
    [
        ("volumes=[{path: /x}]", "volumes.0.path", "/x"),
        ("volumes=[{path: /x, claim: a, bucket: b}]", "volumes.0.path", "/x"),
        ("volumes=[{path: x, claim: a}]", "volumes.0.path", "x"),
        ("volumes=[{path: /tmp/, claim: a}]", "volumes.0.path", "/tmp/"),
        ("volumes=[{path: /x, claim: a}, {path: /x/, claim: b}]", "volumes", "/x"),
        ("volumes=[{path: /x, nfs: nonsense}]", "volumes.0.nfs", "nonsense"),
        ("tolerations=[{key: a, value: b}]", "tolerations.0.value", "b"),
        ("tolerations=[{key: a, operator: Equal}]", "tolerations.0.value", None),
        ("tolerations=[{operator: Equal, value: b}]", "tolerations.0.key", None),
        ("tolerations=[{seconds: 5}]", "tolerations.0.seconds", 5),
        ("labels={podscale.dev/run: other}", "labels", "podscale.dev/run"),
        ("labels={team: 'not a label!'}", "labels.team", "not a label!"),
        ("annotations={podscale.dev/identity: x}", "annotations", "podscale.dev/identity"),
        ("env={PODSCALE_RUN_DOCUMENT: x}", "env", "PODSCALE_RUN_DOCUMENT"),
        ("env={RANK: 0}", "env", "RANK"),
        ("env={1x: 0}", "env.1x.[key]", "1x"),
        ("topology=required", "topology", "required"),
        ("topology_level=zone", "topology_level", "zone"),
        ("reservation=A", "reservation", "A"),
        ("namespace=Default", "namespace", "Default"),
        ("min_nodes=2", "min_nodes", 2),
        ("labls.a=b", "labls", ABSENT),
    ],
)
def test_contradictions(change: str, field: str, got: object) -> None:
    with refused(field=f"launch.cluster.{field}", got=got) as refusal:
        cluster(change)
    assert refusal.error.location == f"--set launch.cluster.{change}"


def test_the_archive_of_a_page_is_the_one_variable_of_podscale_that_a_document_sets() -> None:
    set_in_pods = cluster("env={PODSCALE_WEB_RUNTIME: /workspace/web.tgz}").launch.cluster.env
    assert set_in_pods == {"PODSCALE_WEB_RUNTIME": "/workspace/web.tgz"}


def test_a_volume_has_exactly_one_kind() -> None:
    with refused("claim, bucket, secret, config_map, empty_gib, nfs", "none"):
        cluster("volumes=[{path: /x}]")
    with refused("claim", "bucket", field="launch.cluster.volumes.0.path", got="/x"):
        cluster("volumes=[{path: /x, claim: a, bucket: b}]")


def test_choices_that_exclude_each_other() -> None:
    with refused("reservation", field="launch.cluster.spot"):
        cluster("spot=true", "reservation=mine")
    with refused("security", field="launch.cluster.network", got="gpudirect"):
        cluster("security=restricted", "network=gpudirect")
    with refused("memory_gib=2", field="launch.resources.shm_gib", got=2.0):
        load(None, ["launch.resources.memory_gib=2", "launch.resources.shm_gib=2"])


def test_numbers_are_text_where_kubernetes_has_text() -> None:
    section = cluster("env.THREADS=4", "labels.year=2026", "node_selector={gpus: 8}").launch.cluster
    assert (section.env, section.labels, section.node_selector) == ({"THREADS": "4"}, {"year": "2026"}, {"gpus": "8"})


def test_where_a_run_goes_is_no_part_of_what_it_computes() -> None:
    moved = load(None, ["launch.hardware=nvidia-l4", "launch.cluster.queue=q", "launch.cluster.env.A=b"])
    assert result_values(moved) == result_values(load(None))


def test_documents_with_everything_survive_being_written() -> None:
    full = cluster(
        "volumes=[{path: /x, claim: a}]", "tolerations=[{key: k}]", "env={A: 'x: y'}", "labels={a.b/c: d}", "queue=q"
    )
    assert loads(dumps(full)) == full


DEFAULTS = Defaults(
    "run: {workspace: /ws}\nlaunch:\n  image: theirs\n  cluster: {queue: q, labels: {a: b}}\n", "theirs.yaml"
)


def test_defaults_hold_where_the_document_says_nothing() -> None:
    text = "launch:\n  image: mine\n  cluster: {labels: {c: d}}\n"
    config = loads(text, "mine.yaml", ["launch.cluster.queue=mine"], DEFAULTS)
    assert config.run.workspace == "/ws"
    assert config.launch.image == "mine"
    assert config.launch.cluster.labels == {"a": "b", "c": "d"}
    assert config.launch.cluster.queue == "mine"


def test_mistakes_in_defaults_name_their_location(tmp_path: Path) -> None:
    wrong = Defaults("launch:\n  cluster:\n    queue: NO\n", "theirs.yaml")
    document = tmp_path / "run.yaml"
    document.write_text("launch:\n  nodes: 1\n")
    with refused(field="launch.cluster.queue", got="NO") as refusal:
        load(document, (), wrong)
    assert refusal.error.location == "theirs.yaml:3"
    with refused("theirs.yaml:2", kind=NotYaml):
        load(document, (), Defaults("a: 1\nb: ]\n", "theirs.yaml"))
    mine = tmp_path / "mine.yaml"
    mine.write_text("launch:\n  cluster: {queue: NEITHER}\n")
    with refused(field="launch.cluster.queue", got="NEITHER") as refusal:
        load(mine, (), wrong)
    assert refusal.error.location == f"{mine}:2"
