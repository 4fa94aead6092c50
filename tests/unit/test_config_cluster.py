"""The cluster's part of a document: contradictions refused where they are written, and defaults below a document."""

import re
from pathlib import Path

import pytest

from podscale.config import Defaults, RunConfig, dumps, load, loads, result_values
from podscale.errors import InputError


def cluster(*changes: str) -> RunConfig:
    return load(None, [f"launch.cluster.{change}" for change in changes])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("volumes=[{path: /x}]", "exactly one of claim, bucket, secret, config_map, empty_gib, nfs; none given for /x"),
        ("volumes=[{path: /x, claim: a, bucket: b}]", "claim and bucket given for /x"),
        ("volumes=[{path: x, claim: a}]", "should match pattern"),
        ("volumes=[{path: /tmp/, claim: a}]", "/tmp/ belongs to the container itself"),
        ("volumes=[{path: /x, claim: a}, {path: /x/, claim: b}]", "two of them at /x"),
        ("volumes=[{path: /x, nfs: nonsense}]", "should match pattern"),
        ("tolerations=[{key: a, value: b}]", "goes with operator Equal"),
        ("tolerations=[{key: a, operator: Equal}]", "goes with operator Equal"),
        ("tolerations=[{seconds: 5}]", "goes with effect NoExecute"),
        ("labels={podscale.dev/run: other}", "podscale.dev/run is set by podscale"),
        ("labels={team: 'not a label!'}", "should match pattern"),
        ("annotations={podscale.dev/identity: x}", "is set by podscale"),
        ("env={PODSCALE_RUN_DOCUMENT: x}", "PODSCALE_RUN_DOCUMENT is set by podscale or the launcher"),
        ("env={RANK: 0}", "RANK is set by podscale or the launcher"),
        ("env={1x: 0}", "should match pattern"),
        ("topology=required", "name its queue"),
        ("topology_level=zone", "goes with topology"),
        ("reservation=A", "should match pattern"),
        ("namespace=Default", "should match pattern"),
        ("min_nodes=2", "2 is more than launch.nodes=1"),
        ("labls.a=b", "did you mean launch.cluster.labels?"),
    ],
)
def test_contradictions(change: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as refused:
        cluster(change)
    assert f"--set launch.cluster.{change}" in str(refused.value)


def test_choices_that_exclude_each_other() -> None:
    with pytest.raises(InputError, match="choose one of spot and reservation"):
        cluster("spot=true", "reservation=mine")
    with pytest.raises(InputError, match="restricted Pod Security forbids"):
        cluster("security=restricted", "network=gpudirect")
    with pytest.raises(InputError, match="leave nothing of memory_gib=2"):
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


def test_mistakes_in_defaults_are_told_with_their_place(tmp_path: Path) -> None:
    wrong = Defaults("launch:\n  cluster:\n    queue: NO\n", "theirs.yaml")
    document = tmp_path / "run.yaml"
    document.write_text("launch:\n  nodes: 1\n")
    with pytest.raises(InputError, match=r"^theirs\.yaml:3: launch\.cluster\.queue"):
        load(document, (), wrong)
    with pytest.raises(InputError, match=r"^theirs\.yaml:1: not valid YAML"):
        load(document, (), Defaults("a: [", "theirs.yaml"))
    mine = tmp_path / "mine.yaml"
    mine.write_text("launch:\n  cluster: {queue: NEITHER}\n")
    with pytest.raises(InputError, match=r"mine\.yaml:2: launch\.cluster\.queue"):
        load(mine, (), wrong)
