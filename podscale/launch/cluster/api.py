"""A thin client of the Kubernetes API: raw dicts, the verbs that the launcher needs."""

from collections.abc import Callable, Iterator
from contextlib import closing

from podscale.launch.cluster import patience as waiting
from podscale.launch.cluster.connection import ClusterChoice, Target, find_target, open_client
from podscale.launch.cluster.errors import Missing, NotFound, Refused, Request, Unreachable, missing_kind, refusal
from podscale.launch.cluster.patience import Patience, Tell
from podscale.launch.cluster.resources import ACCESS_REVIEWS, PODS, Object, Resource
from podscale.launch.cluster.transport import BUSY, Interrupted, Transport, lines, parsed

STREAM_SECONDS = 60
"""A watch is asked to end after this; a connection that died without a word is noticed a little later."""
SILENCE_SECONDS = 120.0
"""A log stream that is silent for longer breaks off; it is opened again from where it was."""
PAGE = 250
"""Objects in one page of a list."""


def connect(choice: ClusterChoice, *, patience: Patience = waiting.BRIEF, tell: Tell | None = None) -> "Api":
    """The API of the cluster that `choice` (launch.cluster) names. Raises InputError where none is named."""
    target = find_target(choice)
    return Api(Transport(target, open_client(target), patience, tell or (lambda line: None)))


class Api:
    """Requests in one namespace of one cluster; used from several threads.

    Every method raises Refused (InputError) for what the server refuses and Unreachable when patience is over.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def target(self) -> Target:
        return self._transport.target

    @property
    def requests(self) -> int:
        """Requests made so far, repeated ones included."""
        return self._transport.requests

    @property
    def namespace(self) -> str:
        return self.target.namespace

    def patient(self, patience: Patience, tell: Tell) -> "Api":
        """The same cluster, with another patience."""
        return Api(Transport(self.target, self._transport.client, patience, tell))

    def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Object:
        request = Request("get", resource, namespace or self.namespace, name)
        return self._transport.json(request, "GET", resource.path(request.namespace, name))

    def find(self, resource: Resource, name: str) -> Object | None:
        """As `get`, or None where there is no such object."""
        try:
            return self.get(resource, name)
        except NotFound:
            return None

    def create(self, resource: Resource, body: Object, *, dry_run: bool = False) -> Object:
        """Creates an object, or only has the server check that it could be; unknown fields are refused."""
        request = Request("create", resource, self.namespace, str(body["metadata"].get("name", "")))
        query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self._transport.json(request, "POST", resource.path(self.namespace), query, body)

    def merge(self, resource: Resource, name: str, change: Object) -> Object:
        """Applies a JSON merge patch (RFC 7396)."""
        request = Request("patch", resource, self.namespace, name)
        return self._transport.json(
            request, "PATCH", resource.path(self.namespace, name), {}, change, "application/merge-patch+json"
        )

    def delete(self, resource: Resource, name: str, *, uid: str = "") -> None:
        """Deletes an object; it is there until all it owns is gone. uid: only if it is still this very one."""
        request = Request("delete", resource, self.namespace, name)
        body: Object = {"propagationPolicy": "Foreground", **({"preconditions": {"uid": uid}} if uid else {})}
        self._transport.json(request, "DELETE", resource.path(self.namespace, name), {}, body)

    def list(
        self,
        resource: Resource,
        *,
        labels: str = "",
        fields: str = "",
        limit: int = 0,
        namespace: str | None = None,
        keep: Callable[[Object], Object] = lambda found: found,
    ) -> tuple[list[Object], str]:
        """The objects that match, and the version to watch from; fetched page by page, each passed through `keep`.

        limit: stop after about so many; 0 = all.
        """
        where = self.namespace if namespace is None else namespace
        request = Request("list", resource, where)
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(min(limit, PAGE) if limit else PAGE)}
        typed = {"apiVersion": resource.api_version, "kind": resource.kind}  # left out in lists of built-in kinds
        found: list[Object] = []
        while True:
            path = resource.path(where) if where else f"{resource.root}/{resource.plural}"
            page = self._transport.json(request, "GET", path, {name: value for name, value in query.items() if value})
            found += [keep({**typed, **item}) for item in page.get("items") or ()]
            metadata = page.get("metadata") or {}
            query["continue"] = str(metadata.get("continue") or "")
            if not query["continue"] or (limit and len(found) >= limit):
                return found, str(metadata.get("resourceVersion", ""))

    def watch(self, resource: Resource, version: str, *, labels: str = "", fields: str = "") -> Iterator[Object]:
        """Changes after `version`, until the server ends the stream (about a minute): {'type', 'object'}.

        Raises Expired where `version` is too old: list again; Interrupted where the stream breaks off, or the server
        has trouble: watch again from there.
        """
        request = Request("watch", resource, self.namespace)
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(STREAM_SECONDS),
            "labelSelector": labels,
            "fieldSelector": fields,
        }
        query = {name: value for name, value in query.items() if value}
        path = resource.path(self.namespace)
        with closing(self._transport.stream(request, path, query, STREAM_SECONDS + 15.0)) as answer:
            for line in lines(answer):
                change = parsed(line)
                if change.get("type") == "ERROR":
                    status = change.get("object") or {}
                    error = refusal(request, int(status.get("code") or 500), status)
                    raise Interrupted(str(error)) if error.status in BUSY else error
                yield change

    def log(self, pod: str, query: dict[str, str]) -> Iterator[bytes]:
        """The lines of a container's log; query: the parameters of the API's pods/log (container, follow, ...).

        Raises Interrupted where the stream breaks off.
        """
        request = Request("get", PODS, self.namespace, pod)
        path = PODS.path(self.namespace, pod, "log")
        with closing(self._transport.stream(request, path, query, SILENCE_SECONDS)) as answer:
            yield from lines(answer)

    def through(self, pod: str, port: int, path: str, seconds: float, *, tls: bool = False) -> str:
        """What a pod answers to a GET that the API server passes on, within so many seconds; asked once.

        tls: the pod speaks HTTPS; the API server takes any certificate, and has none of its own to show.
        """
        request = Request("get", PODS, self.namespace, f"{pod}/proxy")
        target = f"https:{pod}:{port}" if tls else f"{pod}:{port}"
        return self._once_for(seconds).text(request, f"{PODS.path(self.namespace, target, 'proxy')}/{path}")

    def healthy(self, path: str) -> bool:
        """Whether one GET through the API server (to a service, by its proxy) succeeds. Raises Refused where that may
        not be asked."""
        try:
            self._once_for(10.0).json(Request("get", None, "", path), "GET", path)
        except Unreachable:
            return False
        except Refused as error:
            if error.status == 403:
                raise
            return False
        return True

    def _once_for(self, seconds: float) -> Transport:
        """The same cluster for one request without patience."""
        return Transport(self.target, self._transport.client, Patience(0.0, answer=seconds), lambda line: None)

    def version(self) -> Object:
        """The version of the API server."""
        return self._transport.json(Request("get", None, "", "/version"), "GET", "/version")

    def served(self, group: str) -> tuple[str, ...]:
        """The versions of an API group that this cluster has; none where the group is unknown."""
        try:
            answer = self._transport.json(Request("get", None, "", f"/apis/{group}"), "GET", f"/apis/{group}")
        except Refused as error:
            if error.status == 404:
                return ()
            raise
        return tuple(str(entry["version"]) for entry in answer.get("versions") or ())

    def has(self, resource: Resource) -> bool:
        """Whether this cluster knows a kind of object in this version."""
        try:
            answer = self._transport.json(Request("get", None, "", resource.root), "GET", resource.root)
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return any(entry.get("name") == resource.plural for entry in answer.get("resources") or ())

    def missing(self, resource: Resource) -> Missing:
        """Return the error of a kind that this cluster lacks."""
        return missing_kind(resource, self.served(resource.group) if resource.group else ())

    def allowed(self, verb: str, group: str, resource: str, *, name: str = "") -> bool:
        """Whether these credentials may do this in the namespace, by the server's judgement (SelfSubjectAccessReview).

        resource: the plural, with a part behind a slash: pods/log.
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
        request = Request("create", ACCESS_REVIEWS, self.namespace)
        answer = self._transport.json(request, "POST", ACCESS_REVIEWS.path(self.namespace), {}, body)
        return bool((answer.get("status") or {}).get("allowed"))
