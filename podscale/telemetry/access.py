"""Who may scrape: TLS, certificates of clients, and a token."""

import hmac
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from podscale.config.telemetry import TelemetrySection
from podscale.errors import InputError


@dataclass(frozen=True)
class EndpointAuth:
    """tls: what a connection must speak, with client certificates where the context asks for them; token: what every
    request must bear. None: open."""

    tls: ssl.SSLContext | None = None
    token: bytes | None = None

    def is_authorized(self, headers: Iterable[bytes]) -> bool:
        """Whether a request with these header lines bears the token; compared in constant time."""
        if self.token is None:
            return True
        for header in headers:
            name, _, value = header.partition(b":")
            kind, _, given = value.strip().partition(b" ")
            if name.lower() == b"authorization" and kind.lower() == b"bearer":
                return hmac.compare_digest(given.strip(), self.token)
        return False


NO_AUTH = EndpointAuth()


def read_endpoint_auth(section: TelemetrySection) -> EndpointAuth:
    """As the document says, which is read once: the files of a stage that runs may change unnoticed.

    Raises InputError where a file is missing, empty or not what it should be.
    """
    return EndpointAuth(_tls(section), _token(section.bearer_token_file))


def _tls(section: TelemetrySection) -> ssl.SSLContext | None:
    if section.tls_certificate is None or section.tls_key is None:
        return None
    _read_file("telemetry.tls_certificate", section.tls_certificate)
    _read_file("telemetry.tls_key", section.tls_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(section.tls_certificate, section.tls_key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise InputError(
            f"cannot be used with the certificate {section.tls_certificate}: {_openssl_reason(error)}",
            field="telemetry.tls_key",
            got=section.tls_key,
            hint="Give the PEM files of a certificate and of its own key, without a password.",
        ) from error
    if section.tls_client_ca is not None:
        _read_file("telemetry.tls_client_ca", section.tls_client_ca)
        try:
            context.load_verify_locations(section.tls_client_ca)
        except ssl.SSLError as error:
            raise InputError(
                _openssl_reason(error),
                field="telemetry.tls_client_ca",
                got=section.tls_client_ca,
                hint="Give the PEM file of the authority that signed the scraper's certificate.",
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _token(file: str | None) -> bytes | None:
    if file is None:
        return None
    token = _read_file("telemetry.bearer_token_file", file).strip()
    if not token or b"\n" in token:
        raise InputError("must hold one token, on one line", field="telemetry.bearer_token_file", got=file)
    return token


def _read_file(option: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InputError(
            f"{error.strerror}", field=option, got=file, hint="Give the path of a file that can be read."
        ) from error


def _openssl_reason(error: Exception) -> str:
    """OpenSSL's words, where it has any."""
    reason = getattr(error, "reason", None) or str(error)
    return str(reason).replace("_", " ").lower()


def _no_password() -> str:
    """OpenSSL would ask for one at the terminal."""
    raise ValueError("the key is protected by a password")
