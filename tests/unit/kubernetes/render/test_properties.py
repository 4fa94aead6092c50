"""Properties of every job of any document."""

import json
import re
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.kubernetes.job_spec import build_job_spec
from podscale.kubernetes.render import RENDERERS_BY_KIND, JobManifests, render_job
from podscale.runs.stage_outcomes import StageName
from tests.support.pod_security import violations
from tests.support.pods import pods_of
from tests.support.rendering import document

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LONGEST = 63
"""Maximal length of a pod's host name; the longest name that operators derive from a job's is checked against it."""
BASE = document("digits", "train.global_batch=5040").model_dump(mode="json")
HARDWARE = ("cpu", "nvidia-l4", "nvidia-l4 x8", "nvidia-h100-80gb x8", "tpu-v5e-2x2", "tpu-v6e-4x4", "tpu-v5e-2x4")

labels = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
paths = st.from_regex(r"/[a-z]{1,8}(/[a-z0-9]{1,8})?", fullmatch=True).filter(
    lambda path: not path.startswith(("/tmp", "/dev", "/proc", "/sys", "/etc", "/usr", "/workspace", "/cache"))
)
volumes = st.lists(
    st.builds(
        lambda path, kind, only: {"path": path, **kind, "read_only": only},
        paths,
        st.sampled_from([{"claim": "c"}, {"bucket": "b"}, {"secret": "s"}, {"config_map": "m"}, {"empty_gib": 1.5}]),
        st.booleans(),
    ),
    max_size=3,
    unique_by=lambda volume: volume["path"],
)
clusters = st.fixed_dictionaries(
    {
        "workspace_claim": labels,
        "volumes": volumes,
        "labels": st.dictionaries(labels, labels, max_size=2),
        "node_selector": st.dictionaries(labels, labels, max_size=2),
        "env": st.dictionaries(st.from_regex(r"[A-Z]{3}_[A-Z]{1,5}", fullmatch=True), st.text(max_size=20), max_size=3),
        "spot": st.booleans(),
        "local_ssd": st.booleans(),
        "placement": st.sampled_from(["any", "compact"]),
        "queue": st.none() | labels,
        "compute_class": st.none() | labels,
        "restarts": st.integers(0, 50),
        "keep_hours": st.none() | st.floats(0, 100),
    }
)
launches = st.fixed_dictionaries(
    {
        "hardware": st.sampled_from(HARDWARE),
        "nodes": st.sampled_from([1, 2, 3, 4, 16]),
        "processes": st.sampled_from([0, 1, 2, 4, 8]),
        "shard_pods": st.integers(1, 9),
        "grace_seconds": st.floats(1, 1000),
        "cluster": clusters,
    }
)
identities = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)


def made(identity: str, launch: dict[str, Any], stage: StageName, backend: str) -> tuple[Any, JobManifests]:
    """Return the job of a document; reject the example if the document contradicts itself."""
    values = json.loads(json.dumps(BASE))
    values["run"]["id"] = identity
    values["launch"] |= launch
    try:
        spec = build_job_spec(RunConfig.model_validate(values), stage)
        return spec, render_job(spec, backend)
    except (InputError, ValueError):
        assume(False)
        raise


@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking an example takes long
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(
    identities,
    launches,
    st.sampled_from(["shard", "train", "evaluate", "report"]),
    st.sampled_from([*RENDERERS_BY_KIND]),
)
def test_every_job(identity: str, launch: dict[str, Any], stage: StageName, backend: str) -> None:
    spec, manifests = made(identity, launch, stage, backend)
    pods = pods_of(manifests)

    # the same document gives the same objects, which are plain JSON and share no containers
    _, again = made(identity, launch, stage, backend)
    assert manifests == again
    assert json.loads(json.dumps(manifests.all_objects)) == list(manifests.all_objects)
    assert _shared(manifests.all_objects) == []

    # every rank has its process
    assert pods.count == spec.nodes
    if pods.processes is not None:
        assert pods.count * pods.processes == spec.world_size

    # names that Kubernetes accepts, with the suffixes that operators append
    for manifest in manifests.all_objects:
        assert DNS_1035.fullmatch(manifest["metadata"]["name"])
    assert len(f"{spec.name}-worker-{spec.nodes}") <= LONGEST
    assert len(f"{spec.name}-node-{spec.slices}-{spec.nodes}") <= LONGEST

    # security, and consistent pods
    if spec.security_mode == "restricted":
        assert violations(pods.spec) == []
    mounted = {mount["name"] for mount in pods.container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pods.spec["volumes"]}
    assert pods.spec["terminationGracePeriodSeconds"] > launch["grace_seconds"]
    assert spec.selector.items() <= pods.metadata["labels"].items()
    assert set(launch["cluster"]["env"].items()) <= {(name, value) for name, value in _values(pods.container)}


def _values(container: dict[str, Any]) -> list[tuple[str, str]]:
    return [(entry["name"], entry["value"]) for entry in container["env"] if "value" in entry]


def _shared(objects: Any) -> list[Any]:
    """Return containers that several objects share: a change of one would change the others."""
    seen: set[int] = set()
    twice = []

    def walk(value: Any) -> None:
        if isinstance(value, (dict, list)) and value:
            if id(value) in seen:
                twice.append(value)
            seen.add(id(value))
            for inner in value.values() if isinstance(value, dict) else value:
                walk(inner)

    for one in objects:
        walk(one)
    return twice
