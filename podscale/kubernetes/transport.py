"""Requests to the API server with time limits, retries and renewed tokens, on `kubernetes`' DynamicClient.

Credentials, connections, URLs' queries, bodies and error classes are DynamicClient's. Four parts of it are left out,
each measured or read in kubernetes 30.1 (the newest that kfp admits):

- Its discovery sends GET /version and GET /apis when a client is made and one more for each API group, without a time
  limit, and keeps the answers in /tmp/osrcp-HASH.json: a predictable name in a folder that all users share. The kinds
  of objects that we ask for are known (see resources), so a client is made without any request.
- Its `watch` has no read timeout: a connection that dies without a FIN waits forever. It also drops the bookmarks that
  keep a quiet watch from expiring. `ClusterClient.watch` sends the same request and reads the lines itself.
- Its reader of lines (kubernetes.watch.iter_resp_lines) drops empty lines, which a log has, and the last line of a
  stream that breaks off; it bounds no line.
- It renews a token by its stated expiry alone. A launcher outlives tokens that the server refuses before that, or that
  a new login replaces in the kubeconfig: after a 401 the credentials are read again, once.

Credentials for the API server: the pod's service account, or a context of a kubeconfig.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import urllib3

from podscale.errors import InputError, PodscaleError
from podscale.kubernetes.errors import WEBHOOK_FAILED, ApiError, ApiRequest, ApiUnreachable, api_error
from podscale.kubernetes.resources import KubernetesObject
from podscale.kubernetes.retry import Notify, OutageNotice, RetryPolicy
from podscale.version import VERSION

SERVICE_ACCOUNT_PATH = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ClusterSelector(Protocol):
    """Namespace and context, as launch.cluster of the run document has them."""

    @property
    def namespace(self) -> str | None: ...
    @property
    def context(self) -> str | None: ...


@dataclass(frozen=True)
class NamedCluster:
    """Namespace and context of a command that has no run document."""

    namespace: str | None = None
    context: str | None = None


@dataclass(frozen=True)
class ClusterTarget:
    """A cluster: the source of its credentials, and the namespace of the jobs."""

    origin: str
    """For messages: `context gke-prod of ~/.kube/config`, or `the service account of this pod`."""
    namespace: str
    context: str | None
    is_in_cluster: bool


def find_cluster_target(choice: ClusterSelector) -> ClusterTarget:
    """Return the cluster that the document, KUBECONFIG or the pod of this process names.

    Raises InputError if none of them names one, or if the context does not exist.
    """
    if choice.context is None and "KUBECONFIG" not in os.environ and (SERVICE_ACCOUNT_PATH / "token").exists():
        own = (SERVICE_ACCOUNT_PATH / "namespace").read_text(encoding="utf-8").strip()
        return ClusterTarget("the service account of this pod", choice.namespace or own, None, is_in_cluster=True)
    from kubernetes import config
    from kubernetes.config.config_exception import ConfigException

    try:
        contexts, active = config.list_kube_config_contexts(config_file=_load_kubeconfig())
    except ConfigException as error:
        raise InputError(
            f"no Kubernetes cluster to talk to: {error}",
            hint="Set KUBECONFIG, or make the file (GKE: `gcloud container clusters get-credentials CLUSTER`), or work "
            "here with launch.backend=local",
        ) from None
    except Exception as error:
        raise InputError(f"not a usable kubeconfig: {error}", field=_load_kubeconfig()) from None
    names = [str(entry["name"]) for entry in contexts]
    name = choice.context or (str(active["name"]) if active else "")
    found = next((entry for entry in contexts if entry["name"] == name), None)
    if found is None:
        raise InputError(
            f"{_load_kubeconfig()} has no such context",
            field="launch.cluster.context",
            got=name,
            hint=f"Choose one of {', '.join(names)}" if names else "It has none: log in to a cluster first",
        )
    namespace = choice.namespace or str(found["context"].get("namespace") or "default")
    return ClusterTarget(f"context {name} of {_load_kubeconfig()}", namespace, name, is_in_cluster=False)


def open_client(target: ClusterTarget) -> Any:
    """Return a `kubernetes.dynamic.DynamicClient` with fresh credentials; no request is sent (see transport)."""
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException
    from kubernetes.dynamic import DynamicClient

    configuration = client.Configuration()
    configuration.retries = False  # the retries are RetryPolicy's
    try:
        if target.is_in_cluster:
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(
                config_file=_load_kubeconfig(), context=target.context, client_configuration=configuration
            )
    except (ConfigException, OSError) as error:
        raise InputError(f"the credentials cannot be used: {error}", field=target.origin) from None
    api_client = client.ApiClient(configuration)
    api_client.user_agent = f"podscale/{VERSION}"
    return DynamicClient(api_client, discoverer=lambda *_: None)


def _load_kubeconfig() -> str:
    return os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())


CONNECT_TIMEOUT_SECONDS = 10.0
RETRYABLE_STATUSES = (429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""
WEBHOOK_TIMEOUT_SECONDS = 60.0
"""Retry time for an operator's webhook: one that restarts is back by then, one that is down needs a person."""
MAX_LINE_BYTES = 4 * 2**20
"""Longest line of a log or a watch, bytes; longer ones are cut to bound the memory."""

Result = TypeVar("Result")


class StreamInterrupted(PodscaleError):
    """A stream broke off; what came so far is good."""


class Transport:
    """Calls methods of DynamicClient with the credentials of one target; used from several threads.

    Every call raises ApiError (InputError) if the server refuses the request, and Unreachable if no retry helped.
    """

    def __init__(self, target: ClusterTarget, client: Any, policy: RetryPolicy, notify: Notify) -> None:
        self.target = target
        self.client = client
        self.requests = 0
        """Number of requests, retries included."""
        self._policy = policy
        self._notice = OutageNotice(notify)

    def request_json(self, request: ApiRequest, method: str, *arguments: Any, **options: Any) -> KubernetesObject:
        """Return the JSON object that a method of DynamicClient answers with; {} if the answer is none."""
        return self._call(request, lambda answer: parse_object(answer.data), None, method, *arguments, **options)

    def request_text(self, request: ApiRequest, path: str) -> str:
        """Return the answer to a GET, of whatever type."""
        return self._call(request, lambda answer: answer.data.decode("utf-8", "replace"), None, "request", "get", path)

    def stream(
        self, request: ApiRequest, read_timeout: float, method: str, *arguments: Any, **options: Any
    ) -> urllib3.BaseHTTPResponse:
        """Return an answer to read with `lines` and to close.

        Args:
            request: for messages.
            read_timeout: silence after which the stream breaks off, seconds.
            method: method of DynamicClient, called with `arguments` and `options` (see `_call`).
        """
        return self._call(request, lambda answer: answer, read_timeout, method, *arguments, **options)

    def _call(
        self,
        request: ApiRequest,
        read: Callable[[urllib3.BaseHTTPResponse], Result],
        read_timeout: float | None,
        method: str,
        *arguments: Any,
        query: Iterable[tuple[str, str]] = (),
        **options: Any,
    ) -> Result:
        """Call a method of DynamicClient and read its answer, both retried.

        Args:
            request: for messages.
            read: returns the part of the answer that is asked for.
            read_timeout: longest silence, seconds; None for the policy's.
            method: method of DynamicClient, called with `arguments` and `options`.
            query: parameters of the URL for which DynamicClient has no option.
        """
        timeouts = (CONNECT_TIMEOUT_SECONDS, read_timeout or self._policy.read_timeout)

        def send() -> Result:
            self.requests += 1
            changed = {"header_params": {"Accept": "application/json, */*"}, "query_params": list(query)}
            call = getattr(self.client, method)  # which adds to what it is given
            return read(call(*arguments, serialize=False, _request_timeout=timeouts, **changed, **options))

        result: Result = self._policy.retrying(self._notice)(self._attempt, request, send)
        self._notice.outage_ended()
        return result

    def _attempt(self, request: ApiRequest, send: Callable[[], Result]) -> Result:
        """Send a request, and once more with new credentials if they are refused."""
        try:
            return self._checked(request, send)
        except ApiError as error:
            if error.status != 401:
                raise
        self.client = open_client(self.target)
        return self._checked(request, send)

    def _checked(self, request: ApiRequest, send: Callable[[], Result]) -> Result:
        """Send a request; its errors are ours."""
        from kubernetes.client.exceptions import ApiException  # with the client itself: 0.4 s

        try:
            return send()
        except urllib3.exceptions.HTTPError as error:
            raise self._no_answer(request, _short_error(error)) from None
        except ApiException as error:
            if not error.status:  # kubernetes wraps failures of TLS so
                raise self._no_answer(request, str(error.reason)) from None
            raise _refusal(request, error) from None

    def _no_answer(self, request: ApiRequest, why: str) -> PodscaleError:
        if "CERTIFICATE_VERIFY_FAILED" in why:
            return InputError(
                f"the API server's certificate is not the one that the credentials name: {_short_error(why)}",
                field=self.target.origin,
                hint="They belong to another cluster, or the cluster was made anew: get them again",
            )
        notice = f"the API server ({self.target.origin}) does not answer: {why}"
        hint = "Check the network or VPN with `kubectl cluster-info`"
        return ApiUnreachable(f"cannot {request}: {notice}", hint=hint, notice=notice)


def _refusal(request: ApiRequest, answer: Any) -> PodscaleError:
    """Return the error for an answer (ApiException): Unreachable if the same request may succeed later."""
    body = answer.body.encode() if isinstance(answer.body, str) else answer.body or b""
    error = api_error(
        request, answer.status, parse_object(body) or {"message": body.decode("utf-8", "replace").strip()}
    )
    if answer.status not in RETRYABLE_STATUSES:
        return error
    retry_after = str((answer.headers or {}).get("Retry-After", ""))
    return ApiUnreachable(
        str(error),
        notice=f"the API server is busy or has trouble (HTTP {answer.status}): {error}",
        retry_after=float(retry_after) if retry_after.isdigit() else 0.0,
        retry_for=WEBHOOK_TIMEOUT_SECONDS if WEBHOOK_FAILED in str(error) else float("inf"),
    )


def stream_lines(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the lines of a stream as they come, without their ends. Raises Interrupted if it breaks off."""
    rest = b""
    try:
        for chunk in answer.stream(2**16, decode_content=False):
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
            if len(rest) > MAX_LINE_BYTES:
                yield rest
                rest = b""
    except urllib3.exceptions.HTTPError as error:
        raise StreamInterrupted(f"the stream broke off: {_short_error(error)}") from None
    if rest:
        yield rest


def parse_object(text: bytes) -> KubernetesObject:
    """Return the JSON object in `text`; {} if it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _short_error(error: object) -> str:
    """Return the last part of urllib3's message, which names the cause."""
    text = str(error.args[-1] if isinstance(error, Exception) and error.args else error)
    return text.rpartition(": ")[2] if ">: " in text else text
