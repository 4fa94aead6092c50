"""Control plane: etcd, the API server, the controllers and the scheduler."""

from collections.abc import Iterable
from pathlib import Path

from tests.cluster.lab import places, processes
from tests.cluster.lab.commands import attempt, kubectl, wait_for
from tests.cluster.lab.pki import kubeconfig_of

PROCESSES = ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd")


def up() -> None:
    """Start the processes that are not running, and wait until the API server is ready."""
    processes.start("etcd", "etcd", *_etcd())
    processes.start("kube-apiserver", "kube-apiserver", *_api_server())
    wait_for("the API server", 120, api_ready, log=processes.log_of("kube-apiserver"))
    start_controllers()
    start_scheduler()
    kubectl("apply", "--server-side", "-f", places.ETC / "cluster.yaml")


def start_controllers(flags: Iterable[str] = ()) -> None:
    processes.start("kube-controller-manager", "kube-controller-manager", *_controller_manager(), *flags)


def start_scheduler(configuration: Path | None = None) -> None:
    """Start the scheduler with a configuration file, or with the usual flags."""
    usual = ("--leader-elect=false", f"--kubeconfig={kubeconfig_of('scheduler')}")
    flags = usual if configuration is None else (f"--config={configuration}",)
    processes.start("kube-scheduler", "kube-scheduler", "--bind-address=127.0.0.1", *flags)


def down() -> None:
    for name in PROCESSES:
        processes.stop(name)


def api_ready() -> bool:
    return attempt("kubectl", "get", "--raw", "/readyz", "--request-timeout=2s").returncode == 0


def _etcd() -> list[str]:
    return [
        f"--data-dir={places.STATE / 'etcd'}",
        f"--listen-client-urls={places.ETCD_URL}",
        f"--advertise-client-urls={places.ETCD_URL}",
        f"--listen-peer-urls={places.ETCD_PEER_URL}",
        f"--initial-advertise-peer-urls={places.ETCD_PEER_URL}",
        f"--initial-cluster=default={places.ETCD_PEER_URL}",
        "--auto-compaction-retention=5m",
        "--quota-backend-bytes=8589934592",  # 2 GB by default, which the changes of some 10,000 pods exceed
        "--unsafe-no-fsync",  # after a power loss, a test cluster starts from scratch
        "--log-level=warn",
    ]


def _api_server() -> list[str]:
    return [
        f"--etcd-servers={places.ETCD_URL}",
        f"--bind-address={places.NODE_IP}",
        f"--advertise-address={places.NODE_IP}",
        "--secure-port=6443",
        f"--service-cluster-ip-range={places.SERVICE_SUBNET}",
        f"--tls-cert-file={_pki('apiserver.crt')}",
        f"--tls-private-key-file={_pki('apiserver.key')}",
        f"--client-ca-file={_pki('ca.crt')}",
        f"--kubelet-client-certificate={_pki('apiserver-kubelet.crt')}",
        f"--kubelet-client-key={_pki('apiserver-kubelet.key')}",
        "--kubelet-preferred-address-types=InternalIP",  # the node's name does not resolve, so logs and exec would fail
        f"--requestheader-client-ca-file={_pki('front-ca.crt')}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={_pki('front-proxy.crt')}",
        f"--proxy-client-key-file={_pki('front-proxy.key')}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={_pki('sa.pub')}",
        f"--service-account-signing-key-file={_pki('sa.key')}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
    ]


def _controller_manager() -> list[str]:
    return [
        f"--kubeconfig={kubeconfig_of('controller-manager')}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--use-service-account-credentials",
        f"--root-ca-file={_pki('ca.crt')}",
        f"--service-account-private-key-file={_pki('sa.key')}",
        f"--cluster-signing-cert-file={_pki('ca.crt')}",
        f"--cluster-signing-key-file={_pki('ca.key')}",
    ]


def _pki(name: str) -> Path:
    return places.PKI / name
