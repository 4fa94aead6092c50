"""Certificates and kubeconfig files of the cluster, created once with openssl."""

import base64
import json
from pathlib import Path

from tests.cluster.lab import places
from tests.cluster.lab.commands import run

CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "kubelet": f"/O=system:nodes/CN=system:node:{places.NAME}",
    "kube-proxy": "/CN=system:kube-proxy",
    "coredns": "/CN=coredns",
    "provisioner": "/CN=provisioner",
}


def make() -> None:
    """Create two authorities, the API server's certificates, the service-account key, and a kubeconfig per client."""
    places.PKI.mkdir(parents=True, exist_ok=True)
    places.PKI.chmod(0o700)
    _certificate("ca", f"/CN={places.NAME}")
    _certificate("front-ca", f"/CN={places.NAME}-front")
    hosts = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
    addresses = ["127.0.0.1", places.NODE_IP, places.API_SERVICE_IP]
    names = [f"DNS:{host}" for host in [*hosts, "localhost"]] + [f"IP:{address}" for address in addresses]
    _certificate("apiserver", "/CN=kube-apiserver", authority="ca", names=names)
    _certificate("fake-kubelet", "/CN=fake-kubelet", authority="ca", names=[f"IP:{places.NODE_IP}"])
    _certificate("apiserver-kubelet", "/O=system:masters/CN=apiserver-kubelet", authority="ca")
    _certificate("front-proxy", "/CN=front-proxy-client", authority="front-ca")
    if not (places.PKI / "sa.pub").exists():
        run("openssl", "genrsa", "-out", places.PKI / "sa.key", "2048")
        run("openssl", "rsa", "-in", places.PKI / "sa.key", "-pubout", "-out", places.PKI / "sa.pub")
    for client, subject in CLIENTS.items():
        _certificate(client, subject, authority="ca")
        _kubeconfig(client)


def kubeconfig_of(client: str) -> Path:
    return places.STATE / f"{client}.kubeconfig"


def _certificate(name: str, subject: str, *, authority: str | None = None, names: list[str] | None = None) -> None:
    """Create a key and a certificate, signed by the authority of that name; without one, create an authority."""
    key, certificate = places.PKI / f"{name}.key", places.PKI / f"{name}.crt"
    if certificate.exists():
        return
    command: list[str | Path] = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "365", "-subj", subject, "-keyout", key, "-out", certificate]
    if authority:
        command += ["-CA", places.PKI / f"{authority}.crt", "-CAkey", places.PKI / f"{authority}.key"]
        command += [
            "-addext",
            "extendedKeyUsage=serverAuth,clientAuth",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        ]
    if names:
        command += ["-addext", f"subjectAltName={','.join(names)}"]
    run(*command)


def _kubeconfig(client: str) -> None:
    if kubeconfig_of(client).exists():
        return
    cluster = {"server": f"https://{places.NODE_IP}:6443", "certificate-authority-data": _data("ca.crt")}
    user = {"client-certificate-data": _data(f"{client}.crt"), "client-key-data": _data(f"{client}.key")}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": places.NAME,
        "clusters": [{"name": places.NAME, "cluster": cluster}],
        "users": [{"name": client, "user": user}],
        "contexts": [{"name": places.NAME, "context": {"cluster": places.NAME, "user": client}}],
    }
    kubeconfig_of(client).touch(mode=0o600)
    kubeconfig_of(client).write_text(json.dumps(document, indent=1))


def _data(name: str) -> str:
    return base64.b64encode((places.PKI / name).read_bytes()).decode()
