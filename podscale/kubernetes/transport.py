"""Requests to the API server with time limits, retries and renewed tokens, on `kubernetes`' DynamicClient.

DynamicClient handles credentials (of the pod's service account or a context of a kubeconfig), connections, queries,
bodies and error classes. Four parts of it are replaced, as measured or read in kubernetes 30.1, the newest version that
kfp allows:

- Discovery sends GET /version, GET /apis and one GET for each API group, without a timeout, and caches the answers in
  /tmp/osrcp-HASH.json: a predictable name in a shared folder. Our kinds of objects are known (see resources), so a
  client is created without a request.
- `watch` has no read timeout: a connection lost without a FIN waits forever. It also drops the bookmarks that keep a
  quiet watch from expiring. `ClusterClient.watch` sends the same request and reads the lines itself.
- kubernetes.watch.iter_resp_lines drops empty lines, which a log has, and the last line of an interrupted stream. It
  does not limit the length of a line.
- A token is renewed only when it expires. The server may refuse a launcher's token before that, or a new login may
  replace it in the kubeconfig. So after a 401 the credentials are read again, once.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import urllib3

from podscale.config.launch import ClusterSection
from podscale.errors import InputError, PodscaleError
from podscale.kubernetes.errors import WEBHOOK_FAILED, ApiError, ApiRequest, ApiUnreachable, api_error
from podscale.kubernetes.resources import KubernetesObject
from podscale.kubernetes.retry import Notify, OutageNotice, RetryPolicy
from podscale.version import VERSION

SERVICE_ACCOUNT_PATH = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_TIMEOUT_SECONDS = 10.0
RETRYABLE_STATUSES = (429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""
WEBHOOK_TIMEOUT_SECONDS = 60.0
"""Retry time for an operator's webhook, seconds; enough for its restart."""
MAX_LINE_BYTES = 4 * 2**20
"""Maximal length of a line of a log or a watch, bytes; longer lines are split."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class NamedCluster:
    """Namespace and context of a command without a run document."""

    namespace: str | None = None
    context: str | None = None


@dataclass(frozen=True)
class ClusterTarget:
    """A cluster and the namespace of the jobs; `origin` is the source of the credentials, for messages."""

    origin: str
    namespace: str
    context: str | None
    is_in_cluster: bool


def find_cluster_target(choice: ClusterSection | NamedCluster) -> ClusterTarget:
    """Return the cluster that the document or KUBECONFIG names, or in which this process runs as a pod.

    Raises InputError if none of them names one, or if the context does not exist.
    """
    if choice.context is None and "KUBECONFIG" not in os.environ and (SERVICE_ACCOUNT_PATH / "token").exists():
        namespace = choice.namespace or (SERVICE_ACCOUNT_PATH / "namespace").read_text(encoding="utf-8").strip()
        return ClusterTarget("the service account of this pod", namespace, None, is_in_cluster=True)
    from kubernetes import config
    from kubernetes.config.config_exception import ConfigException

    try:
        contexts, active = config.list_kube_config_contexts(config_file=_kubeconfig_path())
    except ConfigException as error:
        raise InputError(
            f"no Kubernetes cluster: {error}",
            hint="Set KUBECONFIG, or create the file (GKE: `gcloud container clusters get-credentials CLUSTER`), or "
            "run on this machine with launch.backend=local",
        ) from None
    except Exception as error:
        raise InputError(f"not a usable kubeconfig: {error}", field=_kubeconfig_path()) from None
    names = [str(entry["name"]) for entry in contexts]
    name = choice.context or (str(active["name"]) if active else "")
    entry = next((entry for entry in contexts if entry["name"] == name), None)
    if entry is None:
        raise InputError(
            f"{_kubeconfig_path()} has no such context",
            field="launch.cluster.context",
            got=name,
            hint=f"Choose one of {', '.join(names)}" if names else "Log in to a cluster first",
        )
    namespace = choice.namespace or str(entry["context"].get("namespace") or "default")
    return ClusterTarget(f"context {name} of {_kubeconfig_path()}", namespace, name, is_in_cluster=False)


def open_client(target: ClusterTarget) -> Any:
    """Return a `kubernetes.dynamic.DynamicClient` with fresh credentials; no request is sent."""
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
                config_file=_kubeconfig_path(), context=target.context, client_configuration=configuration
            )
    except (ConfigException, OSError) as error:
        raise InputError(f"the credentials cannot be used: {error}", field=target.origin) from None
    api_client = client.ApiClient(configuration)
    api_client.user_agent = f"podscale/{VERSION}"
    return DynamicClient(api_client, discoverer=lambda *_: None)


def _kubeconfig_path() -> str:
    return os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())


class StreamInterrupted(PodscaleError):
    """A stream was interrupted; the lines read before are valid."""


class Transport:
    """Calls methods of DynamicClient with the credentials of one target; thread-safe.

    Every call raises ApiError if the server refuses the request, and ApiUnreachable if all retries fail.
    """

    def __init__(self, target: ClusterTarget, client: Any, policy: RetryPolicy, notify: Notify) -> None:
        self.target = target
        self.client = client
        self.requests = 0
        """Number of requests, retries included."""
        self._policy = policy
        self._notice = OutageNotice(notify)

    def request_json(self, request: ApiRequest, method: str, *arguments: Any, **options: Any) -> KubernetesObject:
        """Return the JSON object of the answer; {} if it is not one."""
        return self._call(request, lambda answer: parse_object(answer.data), None, method, *arguments, **options)

    def request_text(self, request: ApiRequest, path: str) -> str:
        """Return the answer to a GET as text."""
        return self._call(request, lambda answer: answer.data.decode("utf-8", "replace"), None, "request", "get", path)

    def stream(
        self, request: ApiRequest, read_timeout: float, method: str, *arguments: Any, **options: Any
    ) -> urllib3.BaseHTTPResponse:
        """Return an answer to read with `stream_lines` and to close; `read_timeout` is the longest silence, seconds."""
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
            read_timeout: longest silence, seconds; None for the policy's.
            method: method of DynamicClient, called with `arguments` and `options`.
            query: parameters of the URL for which DynamicClient has no option.
        """
        timeouts = (CONNECT_TIMEOUT_SECONDS, read_timeout or self._policy.read_timeout)

        def send() -> Result:
            self.requests += 1
            params = {"header_params": {"Accept": "application/json, */*"}, "query_params": list(query)}  # modified
            call = getattr(self.client, method)
            return read(call(*arguments, serialize=False, _request_timeout=timeouts, **params, **options))

        result: Result = self._policy.retrying(self._notice)(self._attempt, request, send)
        self._notice.outage_ended()
        return result

    def _attempt(self, request: ApiRequest, send: Callable[[], Result]) -> Result:
        """Send a request, and again with new credentials after HTTP 401."""
        try:
            return self._translate_errors(request, send)
        except ApiError as error:
            if error.status != 401:
                raise
        self.client = open_client(self.target)
        return self._translate_errors(request, send)

    def _translate_errors(self, request: ApiRequest, send: Callable[[], Result]) -> Result:
        """Send a request; translate the client's exceptions into ApiError and ApiUnreachable."""
        from kubernetes.client.exceptions import ApiException  # 0.4 s

        try:
            return send()
        except urllib3.exceptions.HTTPError as error:
            raise self._no_answer_error(request, _short_error(error)) from None
        except ApiException as error:
            if not error.status:  # a TLS failure, which kubernetes raises as ApiException
                raise self._no_answer_error(request, str(error.reason)) from None
            raise _error_of_answer(request, error) from None

    def _no_answer_error(self, request: ApiRequest, reason: str) -> PodscaleError:
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            return InputError(
                f"the API server's certificate does not match the credentials: {_short_error(reason)}",
                field=self.target.origin,
                hint="They belong to another cluster, or the cluster was recreated: get new credentials",
            )
        notice = f"the API server ({self.target.origin}) does not answer: {reason}"
        hint = "Check the network or VPN with `kubectl cluster-info`"
        return ApiUnreachable(f"cannot {request}: {notice}", hint=hint, notice=notice)


def _error_of_answer(request: ApiRequest, answer: Any) -> PodscaleError:
    """Return the error of an answer (ApiException): ApiUnreachable if the same request may succeed later."""
    body = answer.body.encode() if isinstance(answer.body, str) else answer.body or b""
    error = api_error(
        request, answer.status, parse_object(body) or {"message": body.decode("utf-8", "replace").strip()}
    )
    if answer.status not in RETRYABLE_STATUSES:
        return error
    retry_after = str((answer.headers or {}).get("Retry-After", ""))
    return ApiUnreachable(
        str(error),
        notice=f"the API server is busy or fails (HTTP {answer.status}): {error}",
        retry_after=float(retry_after) if retry_after.isdigit() else 0.0,
        retry_for=WEBHOOK_TIMEOUT_SECONDS if WEBHOOK_FAILED in str(error) else float("inf"),
    )


def stream_lines(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the lines of a stream without line ends, as they arrive. Raises StreamInterrupted."""
    rest = b""
    try:
        for chunk in answer.stream(2**16, decode_content=False):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            if len(rest) > MAX_LINE_BYTES:
                yield rest
                rest = b""
    except urllib3.exceptions.HTTPError as error:
        raise StreamInterrupted(f"the stream was interrupted: {_short_error(error)}") from None
    if rest:
        yield rest


def parse_object(text: bytes) -> KubernetesObject:
    """Return the JSON object in `text`; {} if it is not one."""
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _short_error(error: object) -> str:
    """Return the last part of urllib3's message, which names the cause."""
    text = str(error.args[-1] if isinstance(error, Exception) and error.args else error)
    return text.rpartition(": ")[2] if ">: " in text else text
