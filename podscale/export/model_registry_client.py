"""Client of the Kubeflow Model Registry: its REST API v1alpha3 as JSON objects, with time limits and clear errors.

The package `model-registry` (0.3.18) is not used: for the four requests below it needs aiohttp, and patches asyncio's
loop by nest-asyncio2.
"""

import json
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, build_opener

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from podscale.errors import InputError, PodscaleError
from podscale.util import env
from podscale.util.formatting import one_line
from podscale.util.redirects import NoRedirect

API_PATH = "/api/model_registry/v1alpha3"
TIMEOUT_SECONDS = 30.0
"""Timeout of one answer, seconds."""
ATTEMPTS = 3
"""Attempts of a request that gets no answer, or a server error."""
PAGE_SIZE = 100
"""Entries of one page of a list."""
LARGEST_ANSWER = 16 << 20
"""Most bytes of an answer that are read."""

JsonObject = dict[str, Any]


class RegistryError(PodscaleError):
    """The registry refuses a request, or is not one.

    Args:
        status: HTTP status of its answer; None without an answer, or with another one than an error.
    """

    def __init__(self, problem: str, *, field: str, got: str, hint: str = "", status: int | None = None) -> None:
        super().__init__(problem, field=field, got=got, hint=hint)
        self.status = status


class RegistryUnreachable(RegistryError):
    """The registry does not answer at the moment, or answers with a server error."""


class RegistryConflict(RegistryError):
    """An entry of this name exists."""


@dataclass(frozen=True)
class ModelRegistryClient:
    """Client of one registry.

    Args:
        address: URL of the API without its path.
        field: option that named it, for errors.
    """

    address: str
    field: str

    def find(self, path: str, **query: str) -> JsonObject | None:
        """Return the entry that a query selects; None if there is none."""
        return self._request("GET", path, query)

    def list(self, path: str) -> Iterator[JsonObject]:
        """Yield all entries of a list, page by page."""
        query = {"pageSize": str(PAGE_SIZE)}
        while True:
            page = self._request("GET", path, query) or {}
            yield from page.get("items") or []
            token = page.get("nextPageToken")
            if not token:
                return
            query["nextPageToken"] = token

    def create(self, path: str, entry: JsonObject) -> JsonObject:
        """Create an entry. Raises RegistryConflict if there is one of its name."""
        return self._existing(self._request("POST", path, body=entry), path)

    def update(self, path: str, entry: JsonObject) -> JsonObject:
        """Change the given fields of an entry."""
        return self._existing(self._request("PATCH", path, body=entry), path)

    def _existing(self, answer: JsonObject | None, path: str) -> JsonObject:
        if answer is None:
            hint = "Check the address: that of the REST API, not of a user interface."
            raise RegistryError(f"HTTP 404 for {path}", field=self.field, got=self.address, hint=hint, status=404)
        return answer

    def _request(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: JsonObject | None = None
    ) -> JsonObject | None:
        """Return the answer; None for HTTP 404. A request without an answer is sent again.

        A creation that succeeded without an answer then raises RegistryConflict.
        """
        headers = {"Accept": "application/json", "Content-Type": "application/json", **_auth_header()}
        url = f"{self.address.rstrip('/')}{API_PATH}{path}" + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        request = Request(url, data, headers, method=method)
        retrying = Retrying(
            retry=retry_if_exception_type(RegistryUnreachable),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=0.5, max=4.0),
            reraise=True,
        )
        return retrying(self._send, request)

    def _send(self, request: Request) -> JsonObject | None:
        try:
            with build_opener(NoRedirect).open(request, timeout=TIMEOUT_SECONDS) as answer:
                text = answer.read(LARGEST_ANSWER)
        except HTTPError as error:
            with error:
                if error.code == 404 and _is_api_error(error):
                    return None
                raise self._status_error(error) from error
        except (URLError, OSError, HTTPException) as error:
            raise self._unreachable(getattr(error, "reason", error)) from error
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            hint = "Check the address: that of the REST API, not of a user interface."
            problem = "the answer is not JSON of a model registry"
            raise RegistryError(problem, field=self.field, got=self.address, hint=hint)
        return value

    def _status_error(self, error: HTTPError) -> RegistryError:
        """Return the error of an HTTP status, with the message of the registry."""
        message = _message(error)
        kind, problem, hint = RegistryError, f"HTTP {error.code}", ""
        if error.code in (401, 403):
            problem, hint = f"refuses the credentials (HTTP {error.code})", _credentials_hint()
        elif 300 <= error.code < 400:
            problem, hint = f"redirects to a login page (HTTP {error.code})", _credentials_hint()
        elif error.code == 404:
            problem, hint = "has no model registry API (HTTP 404)", "Check the address."
        elif error.code == 409:
            kind, problem = RegistryConflict, "an entry of this name exists (HTTP 409)"
        elif error.code == 429 or error.code >= 500:
            kind = RegistryUnreachable
        else:
            problem = f"refuses the request (HTTP {error.code})"
        text = f"{problem}: {message}" if message else problem
        return kind(text, field=self.field, got=self.address, hint=hint, status=error.code)

    def _unreachable(self, reason: Any) -> RegistryError:
        if isinstance(reason, ssl.SSLCertVerificationError):
            problem = f"its certificate is not trusted ({reason.verify_message})"
            hint = "Name the file of its certificate authority in SSL_CERT_FILE."
            return RegistryError(problem, field=self.field, got=self.address, hint=hint)
        if isinstance(reason, socket.gaierror) and reason.errno != socket.EAI_AGAIN:
            return RegistryError("unknown host", field=self.field, got=self.address, hint="Check the address.")
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        if isinstance(reason, TimeoutError):
            text = f"no answer within {TIMEOUT_SECONDS:.0f} s"
        return RegistryUnreachable(f"cannot be reached: {text}", field=self.field, got=self.address)


def _auth_header() -> dict[str, str]:
    """Return the header of the bearer token, read at every request because tokens in files expire; none without one."""
    token = os.environ.get(env.MODEL_REGISTRY_TOKEN, "")
    path = env.read_path(env.KF_PIPELINES_SA_TOKEN_PATH)
    if not token and path is not None:
        try:
            token = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            problem = f"the token of the model registry cannot be read: {error}"
            raise InputError(problem, field=env.KF_PIPELINES_SA_TOKEN_PATH, got=str(path)) from error
    return {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}


def _credentials_hint() -> str:
    token, file = env.MODEL_REGISTRY_TOKEN, env.KF_PIPELINES_SA_TOKEN_PATH
    return f"Set {token} to a bearer token, or {file} to a file that has one."


def _is_api_error(error: HTTPError) -> bool:
    """Return True for an error of the API, which is JSON; a proxy or another server answers in HTML or text."""
    return error.headers is not None and error.headers.get_content_type() == "application/json"


def _message(error: HTTPError) -> str:
    try:
        return one_line(str(json.loads(error.read(1 << 16))["message"]))
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return ""
