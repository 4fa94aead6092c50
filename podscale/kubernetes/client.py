"""Client of the Kubernetes API in one namespace, with raw dicts and the verbs that the launcher needs."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing

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
from podscale.kubernetes.resources import ACCESS_REVIEWS, PODS, KubernetesObject, ResourceKind
from podscale.kubernetes.retry import Notify, RetryPolicy
from podscale.kubernetes.transport import (
    RETRYABLE_STATUSES,
    ClusterSelector,
    ClusterTarget,
    StreamInterrupted,
    Transport,
    find_cluster_target,
    open_client,
    parse_object,
    stream_lines,
)

STREAM_SECONDS = 60
"""Length of a watch, ended by the server, seconds."""
STREAM_MARGIN_SECONDS = 15.0
"""Silence beyond that length after which the connection counts as dead, seconds."""
LOG_SILENCE_SECONDS = 120.0
"""Silence after which the stream of a log breaks off; it is opened again from where it was."""
PAGE_SIZE = 250
"""Objects in one page of a list."""


def connect_cluster(
    choice: ClusterSelector, *, policy: RetryPolicy = retry.INTERACTIVE, notify: Notify | None = None
) -> "ClusterClient":
    """Return a client of the cluster that `choice` (launch.cluster) names. Raises InputError if none is named."""
    target = find_cluster_target(choice)
    return ClusterClient(Transport(target, open_client(target), policy, notify or (lambda line: None)))


class ClusterClient:
    """Requests in one namespace of one cluster; used from several threads.

    Every method raises ApiError (InputError) if the server refuses the request, and Unreachable if no retry helped.
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
        """Return a client of the same cluster with another retry policy."""
        return ClusterClient(Transport(self.target, self._transport.client, policy, notify))

    def get(self, resource: ResourceKind, name: str, *, namespace: str | None = None) -> KubernetesObject:
        """Return an object. Raises NotFound if there is none."""
        request = ApiRequest("get", resource, namespace or self.namespace, name)
        return self._transport.request_json(request, "get", resource, name, request.namespace)

    def get_or_none(self, resource: ResourceKind, name: str) -> KubernetesObject | None:
        """Return an object, or None if there is none."""
        try:
            return self.get(resource, name)
        except ApiNotFound:
            return None

    def create(self, resource: ResourceKind, body: KubernetesObject, *, dry_run: bool = False) -> KubernetesObject:
        """Create an object, or have the server check that it could be created. Unknown fields are refused."""
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
        """Delete an object, which stays until all it owns is gone.

        Args:
            resource: kind of the object.
            name: name of the object.
            uid: delete only if the object still has this uid; "" for any.
        """
        request = ApiRequest("delete", resource, self.namespace, name)
        body: KubernetesObject = {"propagationPolicy": "Foreground", **({"preconditions": {"uid": uid}} if uid else {})}
        self._transport.request_json(request, "delete", resource, name, self.namespace, body)

    def list(
        self,
        resource: ResourceKind,
        *,
        labels: str = "",
        fields: str = "",
        limit: int = 0,
        namespace: str | None = None,
        keep: Callable[[KubernetesObject], KubernetesObject] = lambda found: found,
    ) -> tuple[list[KubernetesObject], str]:
        """Return the objects that match, fetched page by page, and the resource version to watch from.

        Args:
            resource: kind of the objects.
            labels: label selector.
            fields: field selector.
            limit: stop after about this many objects; 0 for all.
            namespace: "" for all; None for the client's.
            keep: returns the part of an object to keep.
        """
        where = self.namespace if namespace is None else namespace
        request = ApiRequest("list", resource, where)
        size = min(limit, PAGE_SIZE) if limit else PAGE_SIZE
        typed = {"apiVersion": resource.api_version, "kind": resource.kind}  # left out in lists of built-in kinds
        found: list[KubernetesObject] = []
        token: str | None = None
        while True:
            selected = {"label_selector": labels or None, "field_selector": fields or None, "limit": size}
            page = self._transport.request_json(request, "get", resource, None, where, **selected, _continue=token)
            found += [keep({**typed, **item}) for item in page.get("items") or ()]
            metadata = page.get("metadata") or {}
            token = metadata.get("continue") or None
            if token is None or (limit and len(found) >= limit):
                return found, str(metadata.get("resourceVersion", ""))

    def watch(
        self, resource: ResourceKind, version: str, *, labels: str = "", fields: str = ""
    ) -> Iterator[KubernetesObject]:
        """Yield changes after `version` as {'type', 'object'} until the server ends the stream (STREAM_SECONDS).

        Raises Expired if `version` is too old (list again), and Interrupted if the stream breaks off or the server has
        trouble (watch again from there).
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
        """Yield the lines of a container's log. Raises Interrupted if the stream breaks off.

        Args:
            pod: name of the pod.
            query: parameters of the API's pods/log: container, follow and so on.
        """
        request = ApiRequest("get", PODS, self.namespace, pod)
        path = PODS.path(pod, self.namespace, "log")
        stream = self._transport.stream(request, LOG_SILENCE_SECONDS, "request", "get", path, query=query.items())
        with closing(stream) as answer:
            yield from stream_lines(answer)

    def proxy_get(self, pod: str, port: int, path: str, seconds: float, *, tls: bool = False) -> str:
        """Return a pod's answer to a GET that the API server passes on, sent once.

        Args:
            pod: name of the pod.
            port: port of the pod.
            path: path of the URL, without a leading slash.
            seconds: longest wait for the answer.
            tls: the pod speaks HTTPS; the API server takes any certificate and shows none.
        """
        request = ApiRequest("get", PODS, self.namespace, f"{pod}/proxy")
        target = f"https:{pod}:{port}" if tls else f"{pod}:{port}"
        return self._once(seconds).request_text(request, f"{PODS.path(target, self.namespace, 'proxy')}/{path}")

    def is_service_healthy(self, path: str) -> bool:
        """Return whether one GET through the API server (to a service, by its proxy) succeeds.

        Raises ApiError if these credentials may not send it.
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
        """Return a transport that sends a request once and waits `seconds` for its answer."""
        return Transport(self.target, self._transport.client, RetryPolicy(0.0, seconds), lambda line: None)

    def version(self) -> KubernetesObject:
        """Return the version of the API server."""
        return self._discover("/version") or {}

    def served_versions(self, group: str) -> tuple[str, ...]:
        """Return the versions of an API group that this cluster serves; none if it does not know the group."""
        found = self._discover(f"/apis/{group}") or {}
        return tuple(str(entry["version"]) for entry in found.get("versions") or ())

    def serves(self, resource: ResourceKind) -> bool:
        """Return whether this cluster has a kind of object in this version."""
        found = self._discover(resource.root) or {}
        return any(entry.get("name") == resource.plural for entry in found.get("resources") or ())

    def _discover(self, path: str) -> KubernetesObject | None:
        """Return the answer to a request about the cluster itself; None if there is no such path."""
        try:
            return self._transport.request_json(ApiRequest("get", None, "", path), "request", "get", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def missing_error(self, resource: ResourceKind) -> KindNotServed:
        """Return the error of a kind that this cluster lacks."""
        return kind_not_served_error(resource, self.served_versions(resource.group) if resource.group else ())

    def can_i(self, verb: str, group: str, resource: str, *, name: str = "") -> bool:
        """Return whether RBAC allows a request in the namespace (SelfSubjectAccessReview).

        Args:
            verb: as in RBAC.
            group: API group; "" is the core group.
            resource: plural, with a subresource behind a slash: pods/log.
            name: of the one object that is meant; "" for all.
        """
        plural, _, part = resource.partition("/")
        attributes = {
            "namespace": self.namespace,
            "verb": verb,
            "group": group,
            "resource": plural,
            "subresource": part,
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


DELETE_TIMEOUT_SECONDS = 600.0
"""How long a job that is being deleted may take: its pods save first."""


def delete_job(api: ClusterClient, resource: ResourceKind, name: str, uid: str) -> bool:
    """Delete a job if it still has its uid. Returns False if it is gone or another job has its name."""
    try:
        api.delete(resource, name, uid=uid)
    except (ApiNotFound, ApiConflict):
        return False
    return True


def wait_until_gone(api: ClusterClient, resource: ResourceKind, name: str, uid: str) -> None:
    """Wait until the job and its pods are gone. Raises PodscaleError after a timeout."""
    until = time.monotonic() + DELETE_TIMEOUT_SECONDS
    while (found := api.get_or_none(resource, name)) is not None and found["metadata"]["uid"] == uid:
        if time.monotonic() > until:
            raise PodscaleError(
                f"is being deleted for {DELETE_TIMEOUT_SECONDS / 60:.0f} minutes",
                field=f"{resource.kind} {name}",
                hint="Look at its pods and finalizers with "
                f"`kubectl get {resource.full_name},pods -n {api.namespace} -o wide`",
            )
        time.sleep(1.0)
