"""Values of the chart's policy: the ConfigMap, defaults that satisfy it, and readable errors."""

from typing import Any

import pytest

from tests.support import helm
from tests.support.cluster_policy import VALUES, installed, policy_values


def test_defaults_of_the_namespace_satisfy_its_policy() -> None:
    defaults = helm.defaults(installed(policy_values(), "team-a"))
    assert defaults["launch"]["time_limit_hours"] == 48.5
    assert defaults["launch"]["cluster"]["queue"] == "team-a"
    longer = helm.template(None, {"policy": {"maxHours": 1000}})
    assert helm.defaults(longer)["launch"]["time_limit_hours"] == 168


def test_without_locks_there_is_no_policy() -> None:
    made = helm.template(None, VALUES)
    assert not [item for item in made if item["kind"].startswith("ValidatingAdmissionPolicy")]
    assert "policy.yaml" not in next(item["data"] for item in made if item["metadata"]["name"] == "podscale-defaults")


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"policy": {"admission": {"enabled": True}}}, ["policy.admission.enabled", "policy.images"]),
        ({"policy": {"images": ["other.example"]}}, ["policy.images", "podscale-base:0.2.0", "images.train"]),
        ({"policy": {"images": ["bad image"]}}, ["/policy/images/0", "bad image"]),
        ({"policy": {"images": ["registry.example/"]}}, ["/policy/images/0"]),
        ({"policy": {"security": "baseline"}}, ["/policy/security", "restricted"]),
        ({"policy": {"maxAccelerators": -1}}, ["/policy/maxAccelerators"]),
        ({"policy": {"admission": {"actions": ["Refuse"]}}}, ["/policy/admission/actions/0", "Deny"]),
        ({"policy": {"maxDollars": 5}}, ["/policy", "maxDollars"]),
    ],
)
def test_wrong_values_get_a_readable_message(values: dict[str, Any], texts: list[str]) -> None:
    message = helm.refused(values)
    assert all(text in message for text in texts), message


def test_the_queue_of_the_chart_must_be_allowed() -> None:
    values = {"kueue": {"enabled": True, "clusterQueue": "c"}, "policy": {"queues": ["theirs"]}}
    assert "policy.queues" in helm.refused(values, apis=[helm.KUEUE])


def test_an_older_kubernetes_is_refused() -> None:
    values = {"policy": {"maxHours": 1, "admission": {"enabled": True}}}
    done = helm.run("template", "podscale", helm.CHART, "--kube-version", "1.29.0", values=values)
    assert done.returncode != 0
    assert "policy.admission.enabled" in done.stderr
    assert "1.29" in done.stderr
