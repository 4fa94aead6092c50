"""Readers on the machine of a run find its endpoint and read its metrics, with TLS and a token."""

import errno
import os
import socket
import ssl
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from podscale.config.telemetry import TelemetrySection
from podscale.errors import ABSENT
from podscale.telemetry.endpoint import ClientCertFiles, Endpoint, EndpointError
from podscale.telemetry.pod_telemetry import StageTelemetry
from tests.support.certificates import Authority
from tests.support.refusals import refused

SECONDS = 30.0


def serving(tmp_path: Path, **options: object) -> StageTelemetry:
    """Serve a stage with these options of the document; it writes its endpoint to the file `url`."""
    section = TelemetrySection.model_validate({name: str(value) for name, value in options.items()})
    served = StageTelemetry(section, run="r", stage="train", volumes={})
    served.start(tmp_path / "url")
    return served


@contextmanager
def untrusted(endpoint: Endpoint) -> Iterator[None]:
    """Expect in the block that the reader does not trust the endpoint's certificate."""
    with refused(field=endpoint.url, got=ABSENT, kind=EndpointError) as refusal:
        yield
    cause = refusal.error.__cause__
    assert isinstance(cause, urllib.error.URLError)
    assert isinstance(cause.reason, ssl.SSLCertVerificationError)


def test_a_plain_endpoint(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        endpoint = Endpoint.read(tmp_path / "url")
        assert endpoint == Endpoint(served.url or "")
        assert "podscale_build_info" in endpoint.fetch_metrics(SECONDS)
        assert endpoint.certificate_name(SECONDS) is None
    assert Endpoint.read(tmp_path / "url") is None
    with pytest.raises(urllib.error.URLError) as raised:
        endpoint.fetch_metrics(SECONDS)
    assert isinstance(raised.value.reason, ConnectionRefusedError)


def test_an_answer_that_ends_early_is_no_answer() -> None:
    """The stage may be killed while it answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")

        threading.Thread(target=answer).start()
        with pytest.raises(OSError, match="no complete answer"):
            Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}/metrics").fetch_metrics(SECONDS)


@pytest.mark.parametrize("text", ["", "no certificate"])
def test_a_certificate_that_is_being_written_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tls.crt").write_text(text)
    with refused(field=str(tmp_path / "tls.crt"), kind=EndpointError):
        Endpoint("https://127.0.0.1:1/metrics", tmp_path / "tls.crt").fetch_metrics(SECONDS)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://0.0.0.0:9464/metrics\n", "127.0.0.1:9464"),
        ("http://[::]:9464/metrics\n", "[::1]:9464"),
        ("http://[::1]:1/metrics", "[::1]:1"),
        ("", None),
        ("nonsense", None),
    ],
)
def test_the_address_is_read_from_the_url_file(tmp_path: Path, text: str, address: str | None) -> None:
    (tmp_path / "url").write_text(text)
    endpoint = Endpoint.read(tmp_path / "url")
    assert (endpoint.address if endpoint else None) == address


@pytest.mark.parametrize("signed_for", ["127.0.0.1", "node-7.example"])
def test_the_certificate_itself_is_trusted_whatever_names_it_has(
    tmp_path: Path, authority: Authority, signed_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = authority.sign("server", name=signed_for)
    monkeypatch.chdir(tmp_path)  # paths in a document are relative to the directory where its run was started
    with serving(tmp_path, tls_certificate=pair.certificate.name, tls_key=pair.key.name):
        monkeypatch.chdir("/")
        endpoint = Endpoint.read(tmp_path / "url")
        assert endpoint is not None
        assert "podscale_build_info" in endpoint.fetch_metrics(SECONDS)
        assert endpoint.certificate_name(SECONDS) == (None if signed_for == "127.0.0.1" else signed_for)
        other = Endpoint(endpoint.url, authority.sign("other").certificate)
        with untrusted(other):
            other.fetch_metrics(SECONDS)
        with refused(os.strerror(errno.ENOENT), field=tmp_path / "gone", kind=EndpointError):
            Endpoint(endpoint.url, tmp_path / "gone").fetch_metrics(SECONDS)


def test_a_certificate_with_its_chain(tmp_path: Path, authority: Authority) -> None:
    """Only the first certificate is the endpoint's; others that the same authority signed are not trusted."""
    pair, other = authority.sign("server"), authority.sign("other")
    chain = tmp_path / "chain.crt"
    chain.write_bytes(pair.certificate.read_bytes() + authority.pair.certificate.read_bytes())
    with serving(tmp_path, tls_certificate=chain, tls_key=pair.key):
        endpoint = Endpoint.read(tmp_path / "url")
        assert endpoint is not None
        assert "podscale_build_info" in endpoint.fetch_metrics(SECONDS)
    chain.write_bytes(other.certificate.read_bytes() + authority.pair.certificate.read_bytes())
    with serving(tmp_path, tls_certificate=pair.certificate, tls_key=pair.key) as served:
        endpoint = Endpoint(served.url or "", chain)
        with untrusted(endpoint):
            endpoint.fetch_metrics(SECONDS)


def test_a_token_goes_with_the_request(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    with serving(tmp_path, bearer_token_file=tmp_path / "token"):
        endpoint = Endpoint.read(tmp_path / "url")
        assert endpoint is not None
        assert "podscale_build_info" in endpoint.fetch_metrics(SECONDS)
        with refused(field=endpoint.url, got=HTTPStatus.UNAUTHORIZED, kind=EndpointError):
            Endpoint(endpoint.url).fetch_metrics(SECONDS)


def test_an_endpoint_that_wants_a_certificate(tmp_path: Path, authority: Authority) -> None:
    pair, mine = authority.sign("server"), authority.sign("me")
    options = {"tls_certificate": pair.certificate, "tls_key": pair.key, "tls_client_ca": authority.pair.certificate}
    with serving(tmp_path, **options):
        endpoint = Endpoint.read(tmp_path / "url")
        assert endpoint is not None
        assert "podscale_build_info" in endpoint.fetch_metrics(
            SECONDS, ClientCertFiles.from_options(mine.certificate, mine.key)
        )
        options = ("--client-certificate", "--client-key")
        with refused(*options, field=endpoint.url, got=ABSENT, kind=EndpointError):
            endpoint.fetch_metrics(SECONDS)


def test_the_files_of_a_client_are_checked_first(tmp_path: Path, authority: Authority) -> None:
    mine, other = authority.sign("me"), authority.sign("other")
    assert ClientCertFiles.from_options(None, None) is None
    for certificate, key, field, expected in (
        (mine.certificate, None, "--client-key", "--client-certificate"),
        (mine.certificate, other.key, "--client-certificate", "KEY_VALUES_MISMATCH"),
        (mine.certificate, tmp_path / "gone", "--client-certificate", os.strerror(errno.ENOENT)),
    ):
        with refused(expected, field=field):
            ClientCertFiles.from_options(certificate, key)
