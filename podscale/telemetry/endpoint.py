"""Address and credentials of a stage's metrics endpoint, and a client that reads it with TLS and a token."""

import socket
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from podscale.config.telemetry import TelemetrySection
from podscale.errors import InputError, PodscaleError
from podscale.util.files import write_atomically

LOOPBACK_ADDRESSES = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Wildcard addresses of a server and the loopback addresses that reach it."""


class EndpointError(PodscaleError):
    """The endpoint refused the reader, the TLS handshake failed, or a credential file is not readable.

    Its `field` is the URL or the file, and its `got` the HTTP status if there is one.
    """


@dataclass(frozen=True)
class ClientCertFiles:
    """PEM files of a client certificate and its key, for endpoints with mutual TLS."""

    certificate: Path
    key: Path

    @classmethod
    def from_options(cls, certificate: Path | None, key: Path | None) -> "ClientCertFiles | None":
        """Return the two files; None if neither is given. Raises InputError if one is missing or invalid."""
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            field = "--client-key" if key is None else "--client-certificate"
            problem = "--client-certificate and --client-key belong together"
            raise InputError(problem, field=field, hint="Give both, or neither.")
        try:
            ssl.create_default_context().load_cert_chain(certificate, key)
        except OSError as error:  # SSLError is one
            reason = getattr(error, "reason", None) or error.strerror
            problem = f"{reason} (with --client-key {key})"
            hint = "Give the PEM files of a certificate and of its own key."
            raise InputError(problem, field="--client-certificate", got=str(certificate), hint=hint) from error
        return cls(certificate.absolute(), key.absolute())


@dataclass(frozen=True)
class Endpoint:
    """Metrics endpoint of a stage.

    Args:
        certificate: PEM file of the only certificate that a reader trusts, for any host name; None for plain HTTP.
        token_file: File with the bearer token of requests.
        requires_client_certificate: The endpoint refuses clients without a certificate.
    """

    url: str
    certificate: Path | None = None
    token_file: Path | None = None
    requires_client_certificate: bool = False

    @classmethod
    def from_section(cls, url: str, section: TelemetrySection) -> "Endpoint":
        """Return the endpoint of this process's stage, with absolute paths."""
        certificate, token = section.tls_certificate, section.bearer_token_file
        return cls(
            url,
            Path(certificate).absolute() if certificate else None,
            Path(token).absolute() if token else None,
            section.tls_client_ca is not None,
        )

    @property
    def address(self) -> str:
        return urlsplit(self.url).netloc

    def write(self, path: Path) -> None:
        """Write the URL as the first line, and one line for each credential that a reader needs."""
        mutual = "TLS" if self.requires_client_certificate else None
        credentials = {"certificate": self.certificate, "token": self.token_file, "mutual": mutual}
        lines = [self.url, *(f"{name} {value}" for name, value in credentials.items() if value is not None)]
        write_atomically(path, "\n".join(lines) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Endpoint | None":
        """Read what `write` wrote; None without a valid file."""
        try:
            url, *credentials = path.read_text(encoding="utf-8").splitlines()
            host = urlsplit(url).netloc.rpartition(":")[0]
        except (OSError, ValueError):
            return None
        if not host:
            return None
        files = {name: Path(file) for name, _, file in (line.partition(" ") for line in credentials)}
        reachable_url = url.replace(host, LOOPBACK_ADDRESSES.get(host, host), 1)
        return cls(reachable_url, files.get("certificate"), files.get("token"), "mutual" in files)

    def fetch_metrics(self, seconds: float, client: ClientCertFiles | None = None) -> str:
        """Return the metrics as text. Raises EndpointError if refused, OSError if there is no complete answer."""
        if self.requires_client_certificate and client is None:
            hint = "Give --client-certificate and --client-key."
            raise EndpointError("requires a client certificate", field=self.url, hint=hint)
        request = urllib.request.Request(self.url)
        if self.token_file is not None:
            request.add_header("Authorization", f"Bearer {self._token()}")
        try:
            with urllib.request.urlopen(request, timeout=seconds, context=self._context(client)) as answer:
                text: str = answer.read().decode("utf-8", "replace")
                return text
        except urllib.error.HTTPError as error:
            with error:
                raise EndpointError(f"refused: {error.reason}", field=self.url, got=error.code) from error
        except HTTPException as error:
            raise ConnectionError(f"no complete answer: {error}") from error
        except OSError as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, ssl.SSLError):
                raise EndpointError(openssl_reason(cause), field=self.url) from error
            raise

    def certificate_name(self, seconds: float, client: ClientCertFiles | None = None) -> str | None:
        """Return a name in the certificate, for readers that compare names; None if the URL's host is one of them.

        Raises:
            OSError: Nothing answers.
            EndpointError: The TLS handshake failed.
        """
        context = self._context(client)
        if context is None:
            return None
        url_parts = urlsplit(self.url)
        assert url_parts.hostname is not None
        try:
            with (
                socket.create_connection((url_parts.hostname, url_parts.port or 443), timeout=seconds) as plain,
                context.wrap_socket(plain) as connection,
            ):
                certificate = connection.getpeercert() or {}
        except ssl.SSLError as error:
            raise EndpointError(openssl_reason(error), field=self.url) from error
        names = [str(pair[1]) for pair in certificate.get("subjectAltName", ())]
        if not names or url_parts.hostname in names:
            return None
        return names[0].replace("*", "any", 1)

    def _context(self, client: ClientCertFiles | None) -> ssl.SSLContext | None:
        """Return a context that trusts only the endpoint's certificate; None for plain HTTP."""
        if self.certificate is None:
            return None
        leaf, end, _ = _read_text(self.certificate).partition("-----END CERTIFICATE-----")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust the certificate itself, without its authority
        try:
            context.load_verify_locations(cadata=leaf[leaf.find("-----BEGIN") :] + end)
        except (ssl.SSLError, ValueError) as error:
            raise EndpointError("not a certificate", field=str(self.certificate)) from error
        if client is not None:
            context.load_cert_chain(client.certificate, client.key)
        return context

    def _token(self) -> str:
        assert self.token_file is not None
        return _read_text(self.token_file).strip()


def openssl_reason(error: Exception) -> str:
    """Return OpenSSL's reason in words, or the error's text."""
    return str(getattr(error, "reason", None) or error).replace("_", " ").lower()


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise EndpointError(str(error.strerror), field=str(file)) from error
