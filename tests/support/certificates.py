"""Certificates for TLS tests: an authority and certificates for 127.0.0.1."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Pair:
    """PEM files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Certificate authority; its files are in `place`."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._place, self._name = directory, x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.pair = self._write(name, self._key, self._sign(self._name, self._key, authority=True))

    def sign(self, file: str, *, name: str = "127.0.0.1") -> Pair:
        """Create a server or client certificate for an address or host name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, file)])
        return self._write(file, key, self._sign(subject, key, authority=False, name=name))

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, authority: bool, name: str = "127.0.0.1"
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        numbers = name.replace(".", "").isdigit()
        known: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name)) if numbers else x509.DNSName(name)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([known]), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _write(self, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> Pair:
        pair = Pair(self._place / f"{name}.crt", self._place / f"{name}.key")
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair
