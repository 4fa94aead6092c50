"""One request to the API server until it is answered: outages waited out, tokens renewed, never without a time limit.

Credentials and connections are those of the `kubernetes` package; its generated methods are not used, because kinds of
operators have none, and because a watch or a log stream through them may wait for ever.
"""

import json
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlencode

import urllib3

from podscale.errors import InputError, PodscaleError
from podscale.launch.cluster.connection import Target, open_client
from podscale.launch.cluster.errors import WEBHOOK_SILENT, Request, Unreachable, refusal
from podscale.launch.cluster.patience import Announcer, Outage, Patience, Tell
from podscale.launch.cluster.resources import Object
from podscale.version import VERSION

CONNECT_SECONDS = 10.0
BUSY = (429, 500, 502, 503, 504)
WEBHOOK_SECONDS = 60.0
"""An operator that is being restarted is back by then; one that is not needs somebody."""
MAX_LINE = 4 * 2**20
"""Longer lines of a log or a watch are cut: one line must not fill the memory."""


class Interrupted(PodscaleError):
    """A stream broke off in the middle; what came so far is good."""


class Transport:
    """Sends requests with the credentials of one target; used from several threads.

    Raises Refused (InputError) for what the server refuses and Unreachable when patience with an outage, or with a
    server in trouble, is over.
    """

    def __init__(self, target: Target, client: Any, patience: Patience, tell: Tell) -> None:
        self.target = target
        self.client = client
        self.requests = 0
        """Requests made so far, repeated ones included."""
        self._patience = patience
        self._announcer = Announcer(tell)

    def json(
        self,
        request: Request,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        content: str = "application/json",
    ) -> Object:
        """The answer to a request as an object."""
        headers = {"Content-Type": content} if body is not None else {}
        data = json.dumps(body).encode() if body is not None else None
        return parsed(self._send(request, method, path, query or {}, headers, data, self._patience.answer).data)

    def text(self, request: Request, path: str) -> str:
        """The answer to a GET, whatever its type."""
        answer = self._send(request, "GET", path, {}, {}, None, self._patience.answer)
        return bytes(answer.data).decode("utf-8", "replace")

    def stream(self, request: Request, path: str, query: dict[str, str], silence: float) -> urllib3.BaseHTTPResponse:
        """An answer that is read as it comes (see `lines`) and then closed. silence: seconds until it breaks off."""
        return self._send(request, "GET", path, query, {}, None, silence, preload=False)

    def _send(
        self,
        request: Request,
        method: str,
        path: str,
        query: dict[str, str],
        headers: dict[str, str],
        data: bytes | None,
        read_seconds: float,
        *,
        preload: bool = True,
    ) -> urllib3.BaseHTTPResponse:
        """One request until it is answered: outages and a busy server are waited out, expired tokens renewed."""
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=read_seconds)
        outage = Outage(self._patience, self._announcer)
        renewed = False
        while True:
            try:
                answer = self._once(method, path, query, headers, data, timeout, preload=preload)
            except urllib3.exceptions.HTTPError as error:
                self._refuse_bad_certificate(error)
                why = f"the API server ({self.target.origin}) does not answer: {_short(error)}"
                if not outage.endured(why):
                    raise Unreachable(
                        f"cannot {request}: {why}. Check the network or VPN with `kubectl cluster-info`"
                    ) from None
                continue
            if answer.status == 401 and not renewed:
                renewed = True
                answer.close()
                self.client = open_client(self.target)
                continue
            if 200 <= answer.status < 300:
                self._announcer.up()
                return answer
            self._endure(request, answer, outage)

    def _endure(self, request: Request, answer: urllib3.BaseHTTPResponse, outage: Outage) -> None:
        """Waits where the server may answer otherwise later; raises where it will not, or not soon enough."""
        status, text = answer.status, b""
        with closing(answer), suppress(urllib3.exceptions.HTTPError):
            text = answer.data
        found = parsed(text)
        error = refusal(request, status, found if found else {"message": text.decode("utf-8", "replace").strip()})
        if status not in BUSY:
            raise error
        advised = answer.headers.get("Retry-After", "")
        if not outage.endured(
            f"the API server is busy or has trouble (HTTP {status}): {error}",
            advised=float(advised) if advised.isdigit() else 0.0,
            at_most=WEBHOOK_SECONDS if WEBHOOK_SILENT in str(error) else None,
        ):
            raise Unreachable(str(error))

    def _once(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        headers: dict[str, str],
        data: bytes | None,
        timeout: urllib3.Timeout,
        *,
        preload: bool,
    ) -> urllib3.BaseHTTPResponse:
        self.requests += 1
        client = self.client
        headers = {"Accept": "application/json, */*", "User-Agent": f"podscale/{VERSION}", **headers}
        client.update_params_for_auth(headers, [], ["BearerToken"])
        url = f"{client.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        answer: urllib3.BaseHTTPResponse = client.rest_client.pool_manager.request(
            method, url, body=data, headers=headers, timeout=timeout, preload_content=preload
        )
        return answer

    def _refuse_bad_certificate(self, error: Exception) -> None:
        cause = error.args[-1] if error.args else error
        if isinstance(error, urllib3.exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(cause):
            raise InputError(
                f"{self.target.origin}: the API server's certificate is not the one that the credentials name: "
                f"{_short(error)}. They belong to another cluster, or the cluster was made anew: get them again"
            ) from None


def lines(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """The lines of a streamed answer as they come, without their ends. Raises Interrupted where it breaks off."""
    rest = b""
    try:
        for chunk in answer.stream(2**16, decode_content=False):
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
            if len(rest) > MAX_LINE:
                yield rest
                rest = b""
    except urllib3.exceptions.HTTPError as error:
        raise Interrupted(f"the stream broke off: {_short(error)}") from None
    if rest:
        yield rest


def parsed(text: bytes) -> Object:
    """A JSON object; empty where it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _short(error: Exception) -> str:
    """The last part of urllib3's message, which says what happened."""
    text = str(error.args[-1] if error.args else error)
    return text.rpartition(": ")[2] if ">: " in text else text
