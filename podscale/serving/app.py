"""Routes of a prediction server, as an ASGI application."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableSequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from podscale.prediction.writers import row_of
from podscale.serving.metrics import ServingMetrics
from podscale.serving.options import ServeOptions
from podscale.serving.service import ClassificationService, status_of
from podscale.serving.uploads import MULTIPART, RequestError, media_type
from podscale.telemetry.server import CONTENT_TYPE
from podscale.version import VERSION

CLIENT_CLOSED = 499
"""Code of a request whose client closed the connection, as nginx counts them."""
Handler = Callable[[Request], Awaitable[Response]]


@dataclass
class ServerState:
    """State that the routes share with the server.

    Args:
        render_metrics: returns the exposition of all processes; called on a thread.
        ready: one flag for each process of the server, True once it accepts images.
        process: index of this process.
        is_draining: the server was asked to stop.
        buffered_bytes: bytes of the bodies of all requests without an answer.
    """

    service: ClassificationService
    options: ServeOptions
    metrics: ServingMetrics
    render_metrics: Callable[[], bytes]
    ready: MutableSequence[bool]
    process: int = 0
    is_draining: bool = False
    buffered_bytes: int = 0
    description: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.description = describe_model(self.service)
        self.metrics.set_model_info(self.description["weights"][:12], VERSION)
        self.metrics.watch("serve_ready", lambda: float(self.service.is_ready and not self.is_draining))


def describe_model(service: ClassificationService) -> dict[str, Any]:
    """Return the answer of `GET /`."""
    model = service.model
    return {
        "model": model.files.name,
        "architecture": model.config.model.name,
        "classes": list(model.classes),
        "image_size": service.image_size,
        "temperature": model.temperature,
        "weights": model.weights_sha256,
        "exported": model.exported_sha256,
        "podscale": VERSION,
    }


def build_app(state: ServerState) -> Starlette:
    """Return the application: POST /predict, GET /, /healthz, /livez and /metrics."""
    routes = _Routes(state)
    return Starlette(
        routes=[
            Route("/predict", _counted(state.metrics, routes.predict), methods=["POST"]),
            Route("/", routes.model),
            Route("/healthz", routes.ready),
            Route("/livez", routes.live),
            Route("/metrics", routes.metrics),
        ],
        exception_handlers={HTTPException: _http_error},
    )


class _Routes:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def predict(self, request: Request) -> Response:
        state = self._state
        if not state.service.is_ready:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "loading", "the model is being loaded", 2)
        content_type = request.headers.get("content-type", "")
        is_form = media_type(content_type) == MULTIPART
        top = _parse_top(request.query_params.get("top"), state.options.top)
        limit = state.options.max_request_bytes
        async with self._received_body(
            request, limit if is_form else min(limit, state.service.max_image_bytes)
        ) as body:
            predictions = await state.service.classify_body(content_type, bytes(body), top)
        rows = [row_of(prediction) for prediction in predictions]
        answer = {"model": state.description["model"], "weights": state.description["weights"], "predictions": rows}
        return JSONResponse(answer, status_of(predictions), self._headers())

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._state.description, headers=self._headers())

    async def ready(self, request: Request) -> Response:
        """Answer 200 if every process has predicted its first batches, and this one was not asked to stop."""
        state = self._state
        if state.is_draining:
            return _plain("draining", HTTPStatus.SERVICE_UNAVAILABLE)
        if not all(state.ready):
            return _plain("loading", HTTPStatus.SERVICE_UNAVAILABLE)
        return _plain("ready") if state.service.is_healthy else _plain("failed", HTTPStatus.SERVICE_UNAVAILABLE)

    async def live(self, request: Request) -> Response:
        """Answer 200 unless only a restart can help."""
        if self._state.service.is_healthy:
            return _plain("alive")
        return _plain("the model's thread has ended or makes no progress", HTTPStatus.SERVICE_UNAVAILABLE)

    async def metrics(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(self._state.render_metrics), media_type=CONTENT_TYPE)

    @asynccontextmanager
    async def _received_body(self, request: Request, limit: int) -> AsyncIterator[bytearray]:
        """Receive the body, and count its bytes until the end of the block.

        Raises RequestError if it is too large or too slow, or if all bodies together are too large.
        """
        state, seconds = self._state, self._state.options.request_seconds
        declared = request.headers.get("content-length", "0")
        if int(declared) > limit:  # the HTTP parser has checked that it is a number
            raise _too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():
                    body += chunk
                    state.buffered_bytes += len(chunk)
                    if len(body) > limit:
                        raise _too_large(limit)
                    if state.buffered_bytes > state.options.max_buffered_bytes:
                        detail = "the bodies of all requests are too large"
                        raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "overloaded", detail, 1)
        except BaseException as error:
            state.buffered_bytes -= len(body)
            if not isinstance(error, TimeoutError):
                raise
            detail = f"the body did not arrive within {seconds:g} s"
            raise RequestError(HTTPStatus.REQUEST_TIMEOUT, "too_slow", detail) from error
        try:
            yield body
        finally:
            state.buffered_bytes -= len(body)

    def _headers(self) -> dict[str, str]:
        """Return headers that send the client to another server once this one is asked to stop."""
        return {"Connection": "close"} if self._state.is_draining else {}


def _counted(metrics: ServingMetrics, handler: Handler) -> Handler:
    """Return the handler with its answers counted by code, and its refusals as JSON."""

    async def count(request: Request) -> Response:
        started = time.monotonic()
        try:
            response = await handler(request)
        except RequestError as error:
            response = _refusal(error)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_CLOSED)  # the client does not receive it
        except Exception:
            metrics.count_request(HTTPStatus.INTERNAL_SERVER_ERROR, time.monotonic() - started)
            raise
        metrics.count_request(response.status_code, time.monotonic() - started)
        return response

    return count


def _refusal(error: RequestError) -> Response:
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else {}
    if error.status == HTTPStatus.REQUEST_TIMEOUT:
        headers["Connection"] = "close"
    return JSONResponse({"reason": error.reason, "detail": error.detail}, error.status, headers)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path}: POST an image to /predict, or GET /, /healthz, /livez or /metrics"
    return JSONResponse({"reason": error.detail.lower(), "detail": detail}, error.status_code, error.headers)


def _parse_top(text: str | None, default: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise RequestError(HTTPStatus.BAD_REQUEST, "invalid_top", "top must be a number of classes, at least 1")
    return int(text)


def _too_large(limit: int) -> RequestError:
    detail = f"at most {limit} bytes"
    return RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_many_bytes", detail)


def _plain(text: str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(f"{text}\n", status, media_type="text/plain")
