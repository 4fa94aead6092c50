"""Values of the chart with every lock of its policy, for tests."""

from collections.abc import Mapping
from typing import Any

from podscale.config.document import loads_as
from podscale.kubernetes.namespace import ClusterPolicy
from tests.support import helm

REGISTRY = "registry.example/team"
LOCKS: dict[str, Any] = {
    "contact": "ml@example.org",
    "images": [REGISTRY, "localhost:5000", "mirror.example"],
    "queues": ["team-a", "shared"],
    "security": "restricted",
    "maxAccelerators": 16,
    "maxHours": 48.5,
}
VALUES = {"images": {"registry": REGISTRY}}


def policy_values(scope: str = "podscale", actions: tuple[str, ...] = ("Deny",), **locks: Any) -> dict[str, Any]:
    admission = {"enabled": True, "scope": scope, "actions": list(actions)}
    return {**VALUES, "policy": {**(locks or LOCKS), "admission": admission}}


def installed(values: Mapping[str, Any], namespace: str) -> list[dict[str, Any]]:
    """Return the objects of the chart that need no controller and no volume."""
    kinds = ("ServiceAccount", "Role", "RoleBinding", "ConfigMap", "ValidatingAdmissionPolicy")
    objects = helm.template(None, values, apis=(), namespace=namespace)
    return [item for item in objects if item["kind"].startswith(kinds)]


def policy_of_chart() -> ClusterPolicy:
    """Return the policy that the command line reads from the namespace."""
    (config_map,) = [
        item for item in installed(policy_values(), "team-a") if item["metadata"]["name"].endswith("defaults")
    ]
    return loads_as(ClusterPolicy, config_map["data"]["policy.yaml"], "policy.yaml")
