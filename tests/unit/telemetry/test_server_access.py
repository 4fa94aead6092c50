"""Authentication of scrapers: TLS, client certificates, tokens; unusable certificates are refused."""

import errno
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podscale.config.telemetry import TelemetrySection
from podscale.telemetry.server import MAX_CONNECTIONS, EndpointAuth, MetricsServer
from tests.support.certificates import Authority
from tests.support.refusals import invalid, refused

Serve = Callable[..., MetricsServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server as a telemetry section configures it."""
    servers: list[MetricsServer] = []

    def start(**options: object) -> MetricsServer:
        auth = EndpointAuth.from_section(
            TelemetrySection.model_validate({name: str(value) for name, value in options.items()})
        )
        servers.append(MetricsServer("127.0.0.1", 0, lambda: b"a 1\n", auth=auth, request_seconds=20))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def get(server: MetricsServer, context: ssl.SSLContext | None = None, token: str | None = None) -> bytes:
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    with urllib.request.urlopen(urllib.request.Request(server.url, headers=headers), timeout=30, context=context) as a:
        return bytes(a.read())


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.pair.certificate))


def test_https_serves_clients_that_trust_the_authority(authority: Authority, serve: Serve) -> None:
    pair = authority.sign("server")
    server = serve(tls_certificate=pair.certificate, tls_key=pair.key)
    assert server.url.startswith("https://127.0.0.1:")
    assert get(server, trusting(authority)) == b"a 1\n"
    with pytest.raises(urllib.error.URLError) as raised:
        get(server, ssl.create_default_context())
    assert isinstance(raised.value.reason, ssl.SSLCertVerificationError)
    with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
        urllib.request.urlopen(server.url.replace("https", "http"), timeout=30)
    assert get(server, trusting(authority)) == b"a 1\n"


def test_only_certificates_of_the_authority_may_scrape(authority: Authority, serve: Serve, tmp_path: Path) -> None:
    pair, client = authority.sign("server"), authority.sign("client")
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "stranger").sign("mallory")
    server = serve(tls_certificate=pair.certificate, tls_key=pair.key, tls_client_ca=authority.pair.certificate)
    context = trusting(authority)
    context.load_cert_chain(client.certificate, client.key)
    assert get(server, context) == b"a 1\n"
    for certificate in (None, stranger):
        context = trusting(authority)
        if certificate is not None:
            context.load_cert_chain(certificate.certificate, certificate.key)
        with pytest.raises((ssl.SSLError, OSError)):  # with TLS 1.3 the client gets the error when it reads
            get(server, context)
    assert server.scrapes <= 1


def test_silent_tls_clients_block_no_scrape(authority: Authority, serve: Serve) -> None:
    """prometheus_client's server is blocked by one such client."""
    pair = authority.sign("server")
    server = serve(tls_certificate=pair.certificate, tls_key=pair.key)
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(3 * MAX_CONNECTIONS)]
    try:
        assert [get(server, trusting(authority)) for _ in range(5)] == [b"a 1\n"] * 5
    finally:
        for client in silent:
            client.close()


def test_a_request_needs_the_bearer_token(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    server = serve(bearer_token_file=tmp_path / "token")
    assert get(server, token="s3cret") == b"a 1\n"
    for wrong in (None, "", "S3cret", "s3cret2", "s3cre"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(server, token=wrong)
        assert refused.value.code == 401
        assert refused.value.headers["WWW-Authenticate"] == "Bearer"
        refused.value.close()
    for header in ("authorization: BEARER s3cret", "Authorization:  Bearer   s3cret"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall(f"GET /metrics HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("wrong", ["key of another", "no key", "locked", "no certificate", "no authority", "missing"])
def test_unusable_certificates_are_refused(wrong: str, authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.sign("server"), authority.sign("other")
    (tmp_path / "text").write_text("nothing of the kind")
    options: dict[str, Path] = {"tls_certificate": pair.certificate, "tls_key": pair.key}
    field, expected = "tls_key", ""
    match wrong:
        case "key of another":
            options["tls_key"] = other.key
            expected = "key values mismatch"
        case "no key":
            options["tls_key"] = tmp_path / "text"
        case "locked":
            options["tls_key"] = locked(pair.key, tmp_path / "locked.key")
        case "no certificate":
            options["tls_certificate"] = tmp_path / "text"
        case "no authority":
            options["tls_client_ca"] = tmp_path / "text"
            field = "tls_client_ca"
        case "missing":
            options["tls_certificate"] = tmp_path / "gone"
            field, expected = "tls_certificate", os.strerror(errno.ENOENT)
    section = TelemetrySection.model_validate({name: str(path) for name, path in options.items()})
    with refused(expected, field=f"telemetry.{field}", got=str(options[field])):
        EndpointAuth.from_section(section)


def locked(key: Path, target: Path) -> Path:
    """Return the key, encrypted with a password."""
    from cryptography.hazmat.primitives import serialization

    opened = serialization.load_pem_private_key(key.read_bytes(), None)
    form, encryption = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")
    target.write_bytes(opened.private_bytes(serialization.Encoding.PEM, form, encryption))
    return target


@pytest.mark.parametrize("content", ["", "\n", "one\ntwo\n"])
def test_a_token_file_holds_one_token(content: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(content)
    with refused(field="telemetry.bearer_token_file", got=str(tmp_path / "token")):
        EndpointAuth.from_section(TelemetrySection(bearer_token_file=str(tmp_path / "token")))


@pytest.mark.parametrize(
    ("options", "field", "named"),
    [
        ({"tls_certificate": "a"}, "tls_key", ""),
        ({"tls_key": "a"}, "tls_certificate", ""),
        ({"tls_client_ca": "a"}, "tls_client_ca", "tls_certificate"),
        ({"pushgateway": "http://here:9091"}, "pushgateway", "linger_seconds"),
        ({"pushgateway": "here:9091", "linger_seconds": 1}, "pushgateway", "http"),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, object], field: str, named: str) -> None:
    with invalid(named, field=field):
        TelemetrySection.model_validate(options)
