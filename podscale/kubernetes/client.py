"""Client of the Kubernetes API in one namespace, with objects as dicts and only the requests that Podscale sends."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing

from podscale.config.launch import ClusterSection
from podscale.errors import PodscaleError
from podscale.kubernetes import retry
from podscale.kubernetes.errors import (
    ApiConflict,
    ApiError,
    ApiNotFound,
    ApiRequest,
    ApiUnreachable,
    KindNotServed,
    api_error,
    kind_not_served_error,
)
from podscale.kubernetes.resources import (
    ACCESS_REVIEWS,
    PODS,
    KubernetesObject,
    ResourceKind,
    name_of,
    resource_of,
    title_of,
    uid_of,
)
from podscale.kubernetes.retry import Notify, RetryPolicy
from podscale.kubernetes.transport import (
    RETRYABLE_STATUSES,
    ClusterTarget,
    NamedCluster,
    StreamInterrupted,
    Transport,
    find_cluster_target,
    open_client,
    parse_object,
    stream_lines,
)

STREAM_SECONDS = 60
"""Duration of a watch, after which the server ends it, seconds."""
STREAM_MARGIN_SECONDS = 15.0
"""Silence beyond STREAM_SECONDS after which the connection counts as lost, seconds."""
LOG_SILENCE_SECONDS = 120.0
"""Read timeout of a log stream, seconds; the reader opens it again at its position."""
DELETE_TIMEOUT_SECONDS = 600.0
"""Timeout of a job's deletion, seconds. Its pods save before they exit."""
PAGE_SIZE = 250


def connect_cluster(
    choice: ClusterSection | NamedCluster, *, policy: RetryPolicy = retry.INTERACTIVE, notify: Notify | None = None
) -> "ClusterClient":
    """Return a client of the cluster that `choice` names, else of the current one. Raises InputError."""
    target = find_cluster_target(choice)
    return ClusterClient(Transport(target, open_client(target), policy, notify or (lambda line: None)))


class ClusterClient:
    """Requests in one namespace of one cluster; thread-safe.

    Every method raises ApiError if the server refuses the request, and ApiUnreachable if all retries fail.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def target(self) -> ClusterTarget:
        return self._transport.target

    @property
    def requests(self) -> int:
        """Number of requests so far, retries included."""
        return self._transport.requests

    @property
    def namespace(self) -> str:
        return self.target.namespace

    def with_retry(self, policy: RetryPolicy, notify: Notify) -> "ClusterClient":
        return ClusterClient(Transport(self.target, self._transport.client, policy, notify))

    def get(self, resource: ResourceKind, name: str, *, namespace: str | None = None) -> KubernetesObject:
        """Return an object. Raises ApiNotFound if there is none."""
        request = ApiRequest("get", resource, namespace or self.namespace, name)
        return self._transport.request_json(request, "get", resource, name, request.namespace)

    def get_or_none(self, resource: ResourceKind, name: str) -> KubernetesObject | None:
        try:
            return self.get(resource, name)
        except ApiNotFound:
            return None

    def create(self, resource: ResourceKind, body: KubernetesObject, *, dry_run: bool = False) -> KubernetesObject:
        """Create an object; if `dry_run`, the server only checks it. The server refuses unknown fields."""
        request = ApiRequest("create", resource, self.namespace, str(body["metadata"].get("name", "")))
        query = [("fieldValidation", "Strict"), *([("dryRun", "All")] if dry_run else [])]
        return self._transport.request_json(request, "create", resource, body, self.namespace, query=query)

    def patch(self, resource: ResourceKind, name: str, change: KubernetesObject) -> KubernetesObject:
        """Apply a JSON merge patch (RFC 7396)."""
        request = ApiRequest("patch", resource, self.namespace, name)
        content = "application/merge-patch+json"
        return self._transport.request_json(
            request, "patch", resource, change, name, self.namespace, content_type=content
        )

    def delete(self, resource: ResourceKind, name: str, *, uid: str = "") -> None:
        """Delete an object after everything that it owns; if `uid` is given, only if the object still has it."""
        request = ApiRequest("delete", resource, self.namespace, name)
        body: KubernetesObject = {"propagationPolicy": "Foreground", **({"preconditions": {"uid": uid}} if uid else {})}
        self._transport.request_json(request, "delete", resource, name, self.namespace, body)

    def list(
        self,
        resource: ResourceKind,
        *,
        labels: str = "",
        fields: str = "",
        namespace: str | None = None,
        keep: Callable[[KubernetesObject], KubernetesObject] = lambda item: item,
    ) -> tuple[list[KubernetesObject], str]:
        """Return the objects that match the label and field selectors, and the resource version to watch from.

        Args:
            namespace: "" for all; None for the client's.
            keep: returns the part of an object to keep.
        """
        namespace = self.namespace if namespace is None else namespace
        request = ApiRequest("list", resource, namespace)
        kind = {"apiVersion": resource.api_version, "kind": resource.kind}  # missing in lists of built-in kinds
        items: list[KubernetesObject] = []
        token: str | None = None
        while True:
            selected = {"label_selector": labels or None, "field_selector": fields or None, "limit": PAGE_SIZE}
            page = self._transport.request_json(request, "get", resource, None, namespace, **selected, _continue=token)
            items += [keep({**kind, **item}) for item in page.get("items") or ()]
            metadata = page.get("metadata") or {}
            token = metadata.get("continue") or None
            if token is None:
                return items, str(metadata.get("resourceVersion", ""))

    def watch(
        self, resource: ResourceKind, version: str, *, labels: str = "", fields: str = ""
    ) -> Iterator[KubernetesObject]:
        """Yield changes after `version` as {'type', 'object'} until the server ends the stream (STREAM_SECONDS).

        Raises WatchExpired if `version` is too old (list again), and StreamInterrupted if the stream breaks or the
        server fails (watch again from there).
        """
        request = ApiRequest("watch", resource, self.namespace)
        selected = {"label_selector": labels or None, "field_selector": fields or None, "resource_version": version}
        bounded = {"timeout_seconds": STREAM_SECONDS, "query": [("allowWatchBookmarks", "true")]}
        silence = STREAM_SECONDS + STREAM_MARGIN_SECONDS
        stream = self._transport.stream(
            request, silence, "get", resource, None, self.namespace, watch="1", **selected, **bounded
        )
        with closing(stream) as answer:
            for line in stream_lines(answer):
                change = parse_object(line)
                if change.get("type") == "ERROR":
                    status = change.get("object") or {}
                    error = api_error(request, int(status.get("code") or 500), status)
                    raise StreamInterrupted(str(error)) if error.status in RETRYABLE_STATUSES else error
                yield change

    def read_log(self, pod: str, query: dict[str, str]) -> Iterator[bytes]:
        """Yield the lines of a container's log; `query` has the parameters of pods/log. Raises StreamInterrupted."""
        request = ApiRequest("get", PODS, self.namespace, pod)
        path = PODS.path(pod, self.namespace, "log")
        stream = self._transport.stream(request, LOG_SILENCE_SECONDS, "request", "get", path, query=query.items())
        with closing(stream) as answer:
            yield from stream_lines(answer)

    def proxy_get(self, pod: str, port: int, path: str, seconds: float, *, tls: bool = False) -> str:
        """Return a pod's answer to a GET through the API server, without retries.

        Args:
            path: path of the URL, without a leading slash.
            seconds: timeout.
            tls: use HTTPS; the API server accepts any certificate and presents none.
        """
        request = ApiRequest("get", PODS, self.namespace, f"{pod}/proxy")
        target = f"https:{pod}:{port}" if tls else f"{pod}:{port}"
        return self._once(seconds).request_text(request, f"{PODS.path(target, self.namespace, 'proxy')}/{path}")

    def is_service_healthy(self, path: str) -> bool:
        """Return whether a GET to a service through the API server's proxy succeeds, without retries.

        Raises ApiError if the credentials lack the permission.
        """
        try:
            self._once(10.0).request_json(ApiRequest("get", None, "", path), "request", "get", path)
        except ApiUnreachable:
            return False
        except ApiError as error:
            if error.status == 403:
                raise
            return False
        return True

    def _once(self, seconds: float) -> Transport:
        """Return a transport without retries and with a timeout of `seconds`."""
        return Transport(self.target, self._transport.client, RetryPolicy(0.0, seconds), lambda line: None)

    def version(self) -> KubernetesObject:
        return self._discover("/version") or {}

    def served_versions(self, group: str) -> tuple[str, ...]:
        """Return the versions of an API group that this cluster serves; empty for an unknown group."""
        versions = (self._discover(f"/apis/{group}") or {}).get("versions") or ()
        return tuple(str(entry["version"]) for entry in versions)

    def serves(self, resource: ResourceKind) -> bool:
        """Return whether this cluster serves a kind of object in this version."""
        resources = (self._discover(resource.root) or {}).get("resources") or ()
        return any(entry.get("name") == resource.plural for entry in resources)

    def _discover(self, path: str) -> KubernetesObject | None:
        """Return the answer of a discovery path; None if there is no such path."""
        try:
            return self._transport.request_json(ApiRequest("get", None, "", path), "request", "get", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def missing_error(self, resource: ResourceKind) -> KindNotServed:
        return kind_not_served_error(resource, self.served_versions(resource.group) if resource.group else ())

    def can_i(self, verb: str, group: str, resource: str, *, name: str = "") -> bool:
        """Return whether RBAC allows a request in the namespace (SelfSubjectAccessReview).

        Args:
            group: API group; "" is the core group.
            resource: plural, with a subresource after a slash: pods/log.
            name: name of the object; "" for all.
        """
        plural, _, subresource = resource.partition("/")
        attributes = {
            "namespace": self.namespace,
            "verb": verb,
            "group": group,
            "resource": plural,
            "subresource": subresource,
            "name": name,
        }
        body = {
            "apiVersion": ACCESS_REVIEWS.api_version,
            "kind": ACCESS_REVIEWS.kind,
            "spec": {"resourceAttributes": attributes},
        }
        request = ApiRequest("create", ACCESS_REVIEWS, self.namespace)
        answer = self._transport.request_json(request, "create", ACCESS_REVIEWS, body)
        return bool((answer.get("status") or {}).get("allowed"))


def delete_object(api: ClusterClient, item: KubernetesObject) -> bool:
    """Delete an object if it still has its uid. Returns False if it is gone or another object has its name."""
    try:
        api.delete(resource_of(item), name_of(item), uid=uid_of(item))
    except (ApiNotFound, ApiConflict):
        return False
    return True


def wait_until_gone(api: ClusterClient, item: KubernetesObject) -> None:
    """Wait until an object and everything that it owns are gone. Raises PodscaleError after a timeout."""
    resource, deadline = resource_of(item), time.monotonic() + DELETE_TIMEOUT_SECONDS
    while (current := api.get_or_none(resource, name_of(item))) is not None and uid_of(current) == uid_of(item):
        if time.monotonic() > deadline:
            raise PodscaleError(
                f"not deleted after {DELETE_TIMEOUT_SECONDS / 60:.0f} minutes",
                field=title_of(item),
                hint="Check its pods and finalizers with "
                f"`kubectl get {resource.full_name},pods -n {api.namespace} -o wide`",
            )
        time.sleep(1.0)
