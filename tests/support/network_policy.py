"""Allowed connections under a set of NetworkPolicies, computed by Kubernetes' definition.

A pod that no policy selects for a direction is open in it. Otherwise a connection is allowed if any of those policies
allows it. Both ends must allow the connection. (Kubernetes: concepts/services-networking/network-policies.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

METRICS = 9464
Policy = Mapping[str, Any]


@dataclass(frozen=True)
class Pod:
    """Pod; `namespace` is also its namespace's label kubernetes.io/metadata.name."""

    name: str
    namespace: str = "podscale"
    labels: Mapping[str, str] = field(default_factory=dict)
    ip: str = "10.4.0.9"

    @property
    def ports(self) -> dict[str, int]:
        return {"metrics": METRICS}


@dataclass(frozen=True)
class Outside:
    """Address outside of pods."""

    name: str
    ip: str


End = Pod | Outside


def reaches(policies: Iterable[Policy], source: End, target: End, port: int, protocol: str = "TCP") -> bool:
    """Return True if `source` may open a connection to this port of `target`."""
    known = list(policies)
    out = _allowed(known, "Egress", source, target, target, port, protocol)
    return out and _allowed(known, "Ingress", target, source, target, port, protocol)


def _allowed(policies: list[Policy], way: str, pod: End, peer: End, server: End, port: int, protocol: str) -> bool:
    if isinstance(pod, Outside):
        return True
    selecting = [policy for policy in policies if _selects(policy, pod) and way in policy["spec"]["policyTypes"]]
    if not selecting:
        return True
    key, side = ("egress", "to") if way == "Egress" else ("ingress", "from")
    return any(
        _to_peer(rule.get(side), peer, policy) and _on_port(rule.get("ports"), server, port, protocol)
        for policy in selecting
        for rule in policy["spec"].get(key, [])
    )


def _selects(policy: Policy, pod: Pod) -> bool:
    same = policy["metadata"].get("namespace", pod.namespace) == pod.namespace
    return same and matches(policy["spec"]["podSelector"], pod.labels)


def _to_peer(peers: list[Any] | None, end: End, policy: Policy) -> bool:
    return not peers or any(_is_peer(peer, end, policy) for peer in peers)


def _is_peer(peer: Mapping[str, Any], end: End, policy: Policy) -> bool:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        address = ip_address(end.ip)
        return address in ip_network(block["cidr"]) and not any(
            address in ip_network(left_out) for left_out in block.get("except", [])
        )
    if isinstance(end, Outside):
        return False
    if "namespaceSelector" in peer:
        here = matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": end.namespace})
    else:
        here = policy["metadata"]["namespace"] == end.namespace
    return here and matches(peer.get("podSelector", {}), end.labels)


def _on_port(ports: list[Any] | None, server: End, port: int, protocol: str) -> bool:
    named = server.ports if isinstance(server, Pod) else {}
    return not ports or any(
        entry.get("protocol", "TCP") == protocol
        and ("port" not in entry or named.get(str(entry["port"]), entry["port"]) == port)
        for entry in ports
    )


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return True if a label selector selects these labels; an empty one selects all."""
    labels_match = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return labels_match and all(_meets(term, labels) for term in selector.get("matchExpressions", []))


def _meets(term: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, operator = labels.get(term["key"]), term["operator"]
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    return (value in term["values"]) == (operator == "In")
