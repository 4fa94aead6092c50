"""Address and credentials of a KFP backend, and a probe that gives clear errors before anything is sent.

Host and credentials come from options or from the environment variables of kfp's own client.
"""

import json
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, Request, build_opener

from podscale.errors import InputError, PodscaleError
from podscale.util import env
from podscale.util.redirects import NoRedirect

HOST_VARIABLE = "KF_PIPELINES_ENDPOINT"
UI_VARIABLE = "KF_PIPELINES_UI_ENDPOINT"
IN_CLUSTER_ADDRESS = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
PROJECTED_TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")
"""Path of the token for KFP's API in a pod of a multi-user Kubeflow."""
TIMEOUT_SECONDS = 15.0
PORT_FORWARD_COMMAND = "kubectl port-forward --namespace kubeflow service/ml-pipeline 8888"


class BackendUnreachable(PodscaleError):
    """The backend does not answer at the moment."""


@dataclass(frozen=True)
class KfpEndpoint:
    """A KFP backend and its credentials; `namespace` is the user's, if several share the backend."""

    host: str
    namespace: str = ""
    ui: str = ""
    token: str = ""
    token_file: Path | None = None
    """Read again at every use, because such tokens expire after an hour."""
    cookies: str = ""
    ca_file: Path | None = None

    def link(self, page: str) -> str:
        """Return the URL of `page`, a path such as runs/details/<id>, in KFP's user interface."""
        return f"{(self.ui or self.host).rstrip('/')}/#/{page}"

    def read_token(self) -> str:
        """Return the current token, or an empty string without one. Raises InputError if its file is unreadable."""
        if self.token_file is None:
            return self.token
        try:
            return self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise InputError(f"the token for KFP cannot be read: {error}", field=str(self.token_file)) from error


def resolve_endpoint(
    host: str | None,
    *,
    namespace: str = "",
    ui: str | None = None,
    token_file: Path | None = None,
    ca_file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> KfpEndpoint:
    """Return the backend from options or environment. Raises InputError if neither names one."""
    in_cluster = IN_CLUSTER_ADDRESS if "KUBERNETES_SERVICE_HOST" in environment else ""
    address, ui = host or environment.get(HOST_VARIABLE) or in_cluster, ui or environment.get(UI_VARIABLE)
    if not address:
        raise InputError(
            "no address of a KFP backend",
            field="--host",
            hint=f"Set it, or {HOST_VARIABLE}. For your cluster's KFP: `{PORT_FORWARD_COMMAND}` in another "
            "terminal, then --host http://localhost:8888.",
        )
    if ca_file is not None:
        _check_ca_file(ca_file)
    return KfpEndpoint(
        host=_normalise_url(address),
        namespace=namespace,
        ui=_normalise_url(ui, "--ui") if ui else "",
        token=environment.get(env.KFP_TOKEN, ""),
        token_file=token_file or _find_token_file(environment),
        cookies=environment.get(env.KFP_COOKIES, ""),
        ca_file=ca_file,
    )


def probe_backend(endpoint: KfpEndpoint) -> bool:
    """Query the backend's health; return True if it is multi-user.

    Raises:
        InputError: unknown host, login page, rejected credentials, not KFP, or too old.
        BackendUnreachable: no answer, or a server error.
    """
    status, content_type, body = _get(endpoint, "/apis/v2beta1/healthz")
    if status == 404 and _get(endpoint, "/apis/v1beta1/healthz")[0] == 200:
        hint = "Podscale's pipelines need 2.15 or newer."
        raise InputError("this KFP is older than 2.0", field=endpoint.host, hint=hint)
    if status in (401, 403) or 300 <= status < 400:
        raise credentials_error(endpoint, status)
    if status >= 500:
        problem = "KFP returns a server error"
        raise BackendUnreachable(problem, field=endpoint.host, got=status, hint="Check its pods.")
    try:
        answer = json.loads(body) if status == 200 else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise InputError(
            f"answers HTTP {status} with {content_type or 'nothing'}, which is not KFP's API",
            field=endpoint.host,
            got=status,
            hint="Check the address (that of the API or of KFP's user interface, with its path if it has one).",
        )
    return bool(answer.get("multi_user", False))


def credentials_error(endpoint: KfpEndpoint, status: int, message: str = "") -> InputError:
    """Return the error of a backend that refuses the credentials with an HTTP status and a message."""
    sent = "the token" if endpoint.token or endpoint.token_file else "the cookies" if endpoint.cookies else "nothing"
    hint = (
        f"Give a token by --token-file FILE (or {env.KFP_TOKEN}), or the cookies of a browser that is logged in by "
        f"{env.KFP_COOKIES}, or bypass the login: `{PORT_FORWARD_COMMAND}`"
    )
    if status == 403:
        scope = f" in namespace {endpoint.namespace}" if endpoint.namespace else " (a shared KFP needs --namespace)"
        problem = f"{sent} was sent, but this user is not authorized{scope}"
    elif status == 401:
        problem = f"{sent} was sent, but rejected (tokens expire after about an hour)"
    else:
        problem = f"{sent} was sent, and the answer is a login page"
    return InputError(f"{problem}: {message}" if message else problem, field=endpoint.host, got=status, hint=hint)


def _get(endpoint: KfpEndpoint, path: str) -> tuple[int, str, bytes]:
    """Return status, content type and body; redirects are not followed, because they lead to login pages."""
    request = Request(f"{endpoint.host}{path}", headers={"Accept": "application/json", **_auth_headers(endpoint)})
    context = ssl.create_default_context(cafile=str(endpoint.ca_file) if endpoint.ca_file else None)
    try:
        with build_opener(NoRedirect, HTTPSHandler(context=context)).open(request, timeout=TIMEOUT_SECONDS) as answer:
            return answer.status, answer.headers.get_content_type(), answer.read(1 << 20)
    except HTTPError as error:
        return error.code, error.headers.get_content_type() if error.headers else "", b""
    except (URLError, OSError, HTTPException, ValueError) as error:
        raise _unreachable_error(endpoint, getattr(error, "reason", error)) from error


def _auth_headers(endpoint: KfpEndpoint) -> dict[str, str]:
    bearer = endpoint.read_token()
    return {
        **({"Authorization": f"Bearer {bearer}"} if bearer else {}),
        **({"Cookie": endpoint.cookies} if endpoint.cookies else {}),
    }


def _unreachable_error(endpoint: KfpEndpoint, reason: Any) -> PodscaleError:
    """Return InputError if another address or option helps, BackendUnreachable if a retry may."""
    host = endpoint.host
    if isinstance(reason, ssl.SSLCertVerificationError):
        problem = f"its certificate is not trusted ({reason.verify_message})"
        return InputError(problem, field=host, hint="Set its certificate authority with --ca-file.")
    if isinstance(reason, ssl.SSLError):
        return InputError(f"TLS fails ({reason.reason})", field=host, hint="It may be an http:// address.")
    if isinstance(reason, socket.gaierror) and reason.errno != socket.EAI_AGAIN:
        hint = f"Check the address, or use `{PORT_FORWARD_COMMAND}`."
        return InputError("unknown host", field=host, hint=hint)
    if isinstance(reason, TimeoutError):
        hint = f"If a firewall blocks it, use `{PORT_FORWARD_COMMAND}`."
        return BackendUnreachable(f"no answer within {TIMEOUT_SECONDS:.0f} s", field=host, hint=hint)
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    hint = f"`{PORT_FORWARD_COMMAND}` makes a cluster's KFP available on localhost."
    return BackendUnreachable(f"cannot be reached: {text}", field=host, hint=hint)


def _normalise_url(address: str, field: str = "--host") -> str:
    """Add a scheme and drop the trailing slash; plain http is the default for localhost only."""
    url = address
    if "://" not in url:
        host = url.partition("/")[0].partition(":")[0]
        url = f"{'http' if host in ('localhost', '127.0.0.1') else 'https'}://{url}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        hint = "Example: https://kfp.example.com/pipeline"
        raise InputError("not the address of a KFP backend", field=field, got=address, hint=hint)
    return url.rstrip("/")


def _check_ca_file(path: Path) -> None:
    try:
        ssl.create_default_context(cafile=str(path))
    except OSError as error:  # it is missing, or has no certificate
        problem = "not a file with the endpoint's certificate authority (PEM)"
        raise InputError(problem, field="--ca-file", got=str(path)) from error


def _find_token_file(environment: Mapping[str, str]) -> Path | None:
    if env.KFP_TOKEN in environment:
        return None
    if (path := env.read_path(env.KF_PIPELINES_SA_TOKEN_PATH, environment)) is not None:
        return path
    return PROJECTED_TOKEN if PROJECTED_TOKEN.exists() else None
