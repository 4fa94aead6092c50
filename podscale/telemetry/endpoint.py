"""Where a stage of this machine serves its metrics, and reading them there: through TLS, with a token."""

import socket
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from podscale.config.telemetry import TelemetrySection
from podscale.errors import InputError
from podscale.util.files import write_atomically

LOOPBACK_ADDRESSES = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""What a server listens on, and where it is found."""


class EndpointError(Exception):
    """Why an endpoint that is there does not give its metrics to this reader, and what to do."""


@dataclass(frozen=True)
class ClientCertFiles:
    """PEM files of a certificate and its key, for endpoints that want one (mTLS)."""

    certificate: Path
    key: Path

    @classmethod
    def from_options(cls, certificate: Path | None, key: Path | None) -> "ClientCertFiles | None":
        """As two options say it. Raises InputError where one of them is missing or the files are of no use."""
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            raise InputError(
                "--client-certificate and --client-key belong together",
                field="--client-key" if key is None else "--client-certificate",
                hint="Give both, or neither.",
            )
        try:
            ssl.create_default_context().load_cert_chain(certificate, key)
        except OSError as error:  # SSLError is one
            reason = getattr(error, "reason", None) or error.strerror
            raise InputError(
                f"{reason} (with --client-key {key})",
                field="--client-certificate",
                got=str(certificate),
                hint="Give the PEM files of a certificate and of its own key.",
            ) from error
        return cls(certificate.absolute(), key.absolute())


@dataclass(frozen=True)
class Endpoint:
    """url: of the metrics. certificate: the PEM file that an HTTPS endpoint shows. token_file: what requests must bear.
    requires_client_certificate: it answers clients with a certificate alone.

    Whoever can read the file of the certificate needs no authority: it is that very certificate which is trusted, and
    whatever names it has.
    """

    url: str
    certificate: Path | None = None
    token_file: Path | None = None
    requires_client_certificate: bool = False

    @classmethod
    def from_section(cls, url: str, section: TelemetrySection) -> "Endpoint":
        """That of a stage of this process, whose document has paths that count from where it was started."""
        certificate, token = section.tls_certificate, section.bearer_token_file
        return cls(
            url,
            Path(certificate).absolute() if certificate else None,
            Path(token).absolute() if token else None,
            section.tls_client_ca is not None,
        )

    @property
    def address(self) -> str:
        """Host and port."""
        return urlsplit(self.url).netloc

    def write(self, path: Path) -> None:
        """The URL in the first line, and a line for each thing more that a reader needs."""
        more = {
            "certificate": self.certificate,
            "token": self.token_file,
            "mutual": "TLS" if self.requires_client_certificate else None,
        }
        lines = [self.url, *(f"{name} {value}" for name, value in more.items() if value is not None)]
        write_atomically(path, "\n".join(lines) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Endpoint | None":
        """What `write` left there; None where nothing is served."""
        try:
            url, *more = path.read_text(encoding="utf-8").splitlines()
            host = urlsplit(url).netloc.rpartition(":")[0]
        except (OSError, ValueError):
            return None
        if not host:
            return None
        files = {name: Path(file) for name, _, file in (line.partition(" ") for line in more)}
        here = url.replace(host, LOOPBACK_ADDRESSES.get(host, host), 1)
        return cls(here, files.get("certificate"), files.get("token"), "mutual" in files)

    def fetch_metrics(self, seconds: float, client: ClientCertFiles | None = None) -> str:
        """The metrics as text. Raises NotServed where this reader gets none, OSError where nobody answers."""
        if self.requires_client_certificate and client is None:
            raise EndpointError(f"{self.url} wants a certificate: give --client-certificate and --client-key")
        request = urllib.request.Request(self.url)
        if self.token_file is not None:
            request.add_header("Authorization", f"Bearer {self._token()}")
        try:
            with urllib.request.urlopen(request, timeout=seconds, context=self._context(client)) as answer:
                text: str = answer.read().decode("utf-8", "replace")
                return text
        except urllib.error.HTTPError as error:
            with error:
                raise EndpointError(f"{self.url} answers {error.code} {error.reason}") from error
        except OSError as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, ssl.SSLError):
                raise EndpointError(f"{self.url}: {_openssl_reason(cause)}") from error
            raise

    def certificate_name(self, seconds: float, client: ClientCertFiles | None = None) -> str | None:
        """A name in the certificate, for readers that compare names; None where the host of the URL is one.

        Raises OSError where nobody answers, and NotServed where TLS does not come about.
        """
        context = self._context(client)
        if context is None:
            return None
        place = urlsplit(self.url)
        assert place.hostname is not None
        try:
            with (
                socket.create_connection((place.hostname, place.port or 443), timeout=seconds) as plain,
                context.wrap_socket(plain) as secured,
            ):
                shown = secured.getpeercert() or {}
        except ssl.SSLError as error:
            raise EndpointError(f"{self.url}: {_openssl_reason(error)}") from error
        names = [str(pair[1]) for pair in shown.get("subjectAltName", ())]
        if not names or place.hostname in names:
            return None
        return names[0].replace("*", "any", 1)

    def _context(self, client: ClientCertFiles | None) -> ssl.SSLContext | None:
        """Trusts the one certificate; None for plain HTTP."""
        if self.certificate is None:
            return None
        first, end, _ = _read_text(self.certificate).partition("-----END CERTIFICATE-----")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be an authority's
        context.load_verify_locations(cadata=first[first.find("-----BEGIN") :] + end)
        if client is not None:
            context.load_cert_chain(client.certificate, client.key)
        return context

    def _token(self) -> str:
        assert self.token_file is not None
        return _read_text(self.token_file).strip()


def _openssl_reason(error: ssl.SSLError) -> str:
    """OpenSSL's words."""
    return (error.reason or str(error)).replace("_", " ").lower()


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise EndpointError(f"{file}: {error.strerror}") from error
