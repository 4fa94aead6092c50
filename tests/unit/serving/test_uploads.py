"""Images in the body of a request."""

from http import HTTPStatus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.serving.uploads import RequestError, Upload, media_type, parse_uploads

FORM = "multipart/form-data; boundary=limit"


def form(*parts: tuple[str, bytes]) -> bytes:
    """Return a form with parts of these headers and data."""
    written = (b"--limit\r\n" + header.encode() + b"\r\n\r\n" + data + b"\r\n" for header, data in parts)
    return b"".join(written) + b"--limit--\r\n"


def disposition(name: str) -> str:
    return f'Content-Disposition: form-data; name="image"; filename="{name}"'


def test_a_body_that_is_an_image_is_taken_as_it_is() -> None:
    for kind in ("image/jpeg", "IMAGE/PNG; q=1", "application/octet-stream", ""):
        assert parse_uploads(kind, b"--limit", 1) == [Upload(b"--limit")]


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_parts_come_back_as_they_were_sent(datas: list[bytes]) -> None:
    datas = [data for data in datas if b"\r\n--limit" not in b"\r\n" + data] or [b""]
    sent = form(*((disposition(f"{number}.jpg"), data) for number, data in enumerate(datas)))
    assert parse_uploads(FORM, sent, 9) == [Upload(data, f"{number}.jpg") for number, data in enumerate(datas)]


def test_names_are_printable_and_short() -> None:
    names = ["a\x1b[31m.jpg", "\u00e4\u6f22.png", "x" * 999]
    uploads = parse_uploads(FORM, form(*((disposition(name), b"") for name in names)), 9)
    assert [upload.name for upload in uploads] == ["a\\x1b[31m.jpg", "\u00e4\u6f22.png", "x" * 200]
    assert parse_uploads(FORM, form(('Content-Disposition: form-data; name="image"', b"x")), 9) == [Upload(b"x")]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "invalid_form"),
        (b"--limit--\r\n", "no_images"),
        (b"--other\r\n\r\nx\r\n--other--", "invalid_form"),
        (form((disposition("a"), b"x"))[:-8], "invalid_form"),
        (form(("X" * 9000, b"x")), "invalid_form"),
        (form(("\r\n".join(["A: b"] * 99), b"x")), "invalid_form"),
    ],
)
def test_invalid_forms_are_refused(body: bytes, reason: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_uploads(FORM, body, 9)
    assert (error.value.status, error.value.reason) == (HTTPStatus.BAD_REQUEST, reason)


def test_more_images_than_the_queue_holds_are_refused() -> None:
    three = form(*[(disposition("a"), b"")] * 3)
    assert len(parse_uploads(FORM, three, 3)) == 3
    with pytest.raises(RequestError) as error:
        parse_uploads(FORM, three, 2)
    assert error.value.reason == "too_many_images"


@pytest.mark.parametrize("kind", ["text/html", "multipart/mixed", "application/x-www-form-urlencoded", "imagex/png"])
def test_other_types_are_refused(kind: str) -> None:
    with pytest.raises(RequestError) as error:
        media_type(kind)
    assert error.value.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE
