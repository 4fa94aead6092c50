"""Images in the body of a request: the body itself, or the parts of a form (RFC 7578)."""

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from podscale.util.formatting import printable

MULTIPART = "multipart/form-data"
RAW_TYPES = ("", "application/octet-stream")
"""Content types of a body that is one image, besides image/*."""
MAX_NAME_LENGTH = 200
"""Longest file name of an answer, characters."""


class RequestError(Exception):
    """Request that cannot be answered; `reason` is a stable key, `detail` a text for users."""

    def __init__(self, status: HTTPStatus, reason: str, detail: str, retry_after: int | None = None) -> None:
        super().__init__(detail)
        self.status, self.reason, self.detail, self.retry_after = status, reason, detail, retry_after


@dataclass(frozen=True, slots=True)
class Upload:
    """Bytes of one image file, and its name if the client sent one."""

    data: bytes
    name: str = ""


def media_type(content_type: str) -> str:
    """Return the type of a Content-Type header without its parameters. Raises RequestError for an unusable one."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (MULTIPART, *RAW_TYPES) and not kind.startswith("image/"):
        detail = f"{printable(kind)[:100]}: send an image with Content-Type image/jpeg, or files as {MULTIPART}"
        raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unusable_content_type", detail)
    return kind


def parse_uploads(content_type: str, body: bytes, max_images: int) -> list[Upload]:
    """Return the images of a body. Raises RequestError if it is an invalid form, without parts, or with too many."""
    if media_type(content_type) != MULTIPART:
        return [Upload(body)]
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise RequestError(HTTPStatus.BAD_REQUEST, "invalid_form", f"{MULTIPART} without a boundary")
    form = _Form(max_images)
    try:
        parser = MultipartParser(boundary, form.callbacks)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, "invalid_form", printable(str(error))[:200]) from error
    if not form.is_complete:
        raise RequestError(HTTPStatus.BAD_REQUEST, "invalid_form", "the end of the form is missing")
    if not form.uploads:
        raise RequestError(HTTPStatus.BAD_REQUEST, "no_images", "the form has no parts")
    return form.uploads


@dataclass
class _Form:
    """Receiver of the parser's events. Every part is an image."""

    max_images: int
    uploads: list[Upload] = field(default_factory=list)
    is_complete: bool = False
    _header: bytes = b""
    _value: bytes = b""
    _name: str = ""
    _data: bytearray = field(default_factory=bytearray)

    @property
    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin_part,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_header_field": self._add_header,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        if len(self.uploads) == self.max_images:
            detail = f"more than {self.max_images} images in one request"
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_many_images", detail)
        self._name, self._data = "", bytearray()

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self._name = printable(name)[:MAX_NAME_LENGTH]
        self._header = self._value = b""

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]

    def _end_part(self) -> None:
        self.uploads.append(Upload(bytes(self._data), self._name))

    def _end(self) -> None:
        self.is_complete = True
