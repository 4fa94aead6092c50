"""Real Kubernetes API server with etcd and nothing else: it validates and admits objects, and no controller acts.

The programs are those of `make cluster-up`. Both are processes of this test on free ports of 127.0.0.1, in a folder of
their own.
"""

import contextlib
import functools
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support import helm
from tests.support.ports import free_port

ADMIN_TOKEN = "admin"
START_SECONDS = 120.0
"""Time limit of the start on two busy cores, seconds."""


@dataclass(frozen=True)
class Answer:
    """Message with which the server refuses an object, empty if it accepts it, and its warning."""

    refusal: str
    warning: str


@dataclass(frozen=True)
class ApiServer:
    """Running API server; `kubeconfig` is that of its administrator."""

    url: str
    folder: Path

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "admin.kubeconfig"

    def kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(_program("kubectl")), f"--kubeconfig={self.kubeconfig}", *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)

    def apply(self, *objects: dict[str, Any]) -> None:
        done = self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump_all(objects))
        assert done.returncode == 0, done.stderr

    def dry_run(self, manifest: dict[str, Any]) -> Answer:
        """Return the server's answer to the creation of an object, which is not stored."""
        group, _, version = manifest["apiVersion"].rpartition("/")
        namespace, kind = manifest["metadata"].get("namespace"), manifest["kind"].lower()
        plural = (
            f"{kind.removesuffix('y')}ies" if kind.endswith("y") else f"{kind}{'es' if kind.endswith('s') else 's'}"
        )
        path = f"/apis/{group}/{version}" if group else f"/api/{version}"
        path += f"/namespaces/{namespace}/{plural}" if namespace else f"/{plural}"
        response = self._post(f"{path}?dryRun=All&fieldValidation=Strict", manifest)
        message = str(response.json().get("message", ""))
        return Answer(message if response.status >= 300 else "", response.headers.get("Warning", ""))

    def allows(self, user: str, attributes: dict[str, str]) -> bool:
        """Ask with a SubjectAccessReview if RBAC allows a user a request."""
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": attributes},
        }
        response = self._post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(response.json()["status"]["allowed"])

    def _post(self, path: str, body: dict[str, Any]) -> urllib3.BaseHTTPResponse:
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        return self._http.request("POST", f"{self.url}{path}", json=body, headers=headers)

    def refusal(self, manifest: dict[str, Any]) -> str:
        """Return the server's message against the creation of an object; empty if it accepts the object."""
        return self.dry_run(manifest).refusal

    @functools.cached_property
    def _http(self) -> urllib3.PoolManager:
        return urllib3.PoolManager(ca_certs=str(self.folder / "apiserver.crt"))

    def account_kubeconfig(self, namespace: str, account: str) -> Path:
        """Return a kubeconfig of a service account, with a token that the server issued."""
        done = self.kubectl("create", "token", account, "--namespace", namespace)
        assert done.returncode == 0, done.stderr
        return self._write_kubeconfig(f"{namespace}-{account}", done.stdout.strip(), namespace)

    def _write_kubeconfig(self, name: str, token: str, namespace: str = "default") -> Path:
        cluster = {"server": self.url, "certificate-authority": str(self.folder / "apiserver.crt")}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": "bare", "cluster": cluster}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": name, "context": {"cluster": "bare", "user": name, "namespace": namespace}}],
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(content), encoding="utf-8")
        return path


@contextlib.contextmanager
def running(folder: Path, definitions: Sequence[dict[str, Any]] = ()) -> Iterator[ApiServer]:
    """Start an API server with these CustomResourceDefinitions; skip the test if the programs are not built."""
    programs = [_program(name) for name in ("etcd", "kube-apiserver")]
    ports = [free_port() for _ in range(3)]
    _make_keys(folder)
    server = ApiServer(f"https://127.0.0.1:{ports[2]}", folder)
    server._write_kubeconfig("admin", ADMIN_TOKEN)
    with contextlib.ExitStack() as stack:
        for program, options in zip(programs, (_etcd(folder, ports), _api_server(folder, ports)), strict=True):
            stack.enter_context(_process(program, options, folder))
        _wait_until_ready(server, folder)
        if definitions:
            server.apply(*definitions)
            done = server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
            assert done.returncode == 0, done.stderr
        yield server


def _program(name: str) -> Path:
    path = helm.cached_programs() / name
    if not os.access(path, os.X_OK):
        pytest.skip(f"{name} is not in the cluster's cache; `make cluster-up` builds it")
    return path


def _make_keys(folder: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "accounts.key").write_bytes(private)
    (folder / "accounts.pub").write_bytes(public)
    (folder / "tokens.csv").write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n', encoding="utf-8")


def _etcd(folder: Path, ports: Sequence[int]) -> list[str]:
    client, peer = (f"http://127.0.0.1:{port}" for port in ports[:2])
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _api_server(folder: Path, ports: Sequence[int]) -> list[str]:
    return [
        f"--etcd-servers=http://127.0.0.1:{ports[0]}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={ports[2]}",
        f"--cert-dir={folder}",
        "--service-cluster-ip-range=10.119.0.0/24",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={folder / 'accounts.pub'}",
        f"--service-account-signing-key-file={folder / 'accounts.key'}",
        "--authorization-mode=RBAC",
        "--allow-privileged=true",
    ]


@contextlib.contextmanager
def _process(program: Path, options: list[str], folder: Path) -> Iterator[None]:
    with (folder / f"{program.name}.log").open("wb") as log:
        process = subprocess.Popen([str(program), *options], stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(server: ApiServer, folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.kubectl("get", "--raw", "/readyz", "--request-timeout=2s").returncode:
        assert time.monotonic() < deadline, (folder / "kube-apiserver.log").read_text(encoding="utf-8")[-2000:]
        time.sleep(0.5)
