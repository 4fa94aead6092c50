"""Rendezvous of a job's pods: read it from the environment of each launcher, and log its progress.

Pods of one job may start minutes apart, and torchrun retries the connection to the first pod for 15 minutes without a
message.
"""

import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from podscale.errors import InputError
from podscale.util import env

C10D_PORT = 29400
"""Port of torchrun's c10d rendezvous if its endpoint names none."""
TPU_PORT = 29500
"""Port of the rendezvous of a TPU slice, because GKE sets the hosts but no port."""
FIRST_LOG_SECONDS = 20.0
"""Time until the first message, seconds; pods that start together have joined by then."""
LOG_EVERY_SECONDS = 60.0
CONNECT_TIMEOUT_SECONDS = 5.0

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Rendezvous:
    """Number of pods, number of this pod, and address of the first pod.

    `node_rank` is None if the rendezvous itself assigns it (elastic c10d). `slices` is the number of TPU slices, or of
    groups of pods; each has the same number of consecutive nodes.
    """

    nodes: int = 1
    node_rank: int | None = 0
    address: str = ""
    port: int = 0
    slices: int = 1

    @property
    def is_leader(self) -> bool | None:
        """True if rank 0 runs in this pod; None if the rendezvous decides it later."""
        return None if self.node_rank is None else self.node_rank == 0

    @property
    def slice(self) -> int:
        """Number of this pod's slice."""
        return (self.node_rank or 0) // (self.nodes // self.slices)

    @classmethod
    def read(cls, environ: Environ) -> "Rendezvous | None":
        """Return the rendezvous of the pods; None for a single pod.

        The variables of the first launcher found are used, in this order: torchrun's PET_*, which the training operator
        and our manifests set for both engines; Trainer's JAX runtime; a JAXJob; GKE for TPU slices; WORLD_SIZE and RANK
        counted in pods, which older launchers set.

        Raises:
            InputError: A variable is missing, is not a number or contradicts another.
        """
        readers = {
            "PET_NNODES": _torchrun,
            "JAX_NUM_PROCESSES JAX_PROCESS_ID": _trainjob,
            "COORDINATOR_ADDRESS PROCESS_ID NUM_PROCESSES": _jaxjob,
            "TPU_WORKER_ID TPU_WORKER_HOSTNAMES TPU_PROCESS_ADDRESSES MEGASCALE_COORDINATOR_ADDRESS": _tpu,
        }
        for names, reader in readers.items():
            if any(name in environ for name in names.split()):
                rendezvous = _check_rendezvous(reader(environ))
                _check_against_tpu(rendezvous, environ)
                return rendezvous
        if env.WORLD_SIZE in environ and env.RANK in environ and env.LOCAL_RANK not in environ:
            return _check_rendezvous(_legacy_jaxjob(environ))
        return None


def _torchrun(environment: Environ) -> Rendezvous:
    """Read torchrun's variables; with several slices PET_NODE_RANK counts within the slice of `env.SLICE`."""
    nodes = env.number("PET_NNODES", environment["PET_NNODES"].rpartition(":")[2])
    slices = 1
    if endpoint := environment.get("PET_RDZV_ENDPOINT"):
        address, colon, port = endpoint.rpartition(":")
        address, port = (address, port) if colon else (endpoint, str(C10D_PORT))
        return Rendezvous(nodes, 0 if nodes == 1 else None, address, env.number("PET_RDZV_ENDPOINT", port))
    node_rank = _read_number(environment, "PET_NODE_RANK") if "PET_NODE_RANK" in environment else None
    if node_rank is not None and env.SLICE in environment:
        each = _read_number(_variable_group(environment, "several slices", env.SLICE, env.SLICE_NODES), env.SLICE_NODES)
        node_rank += _read_number(environment, env.SLICE) * each
        if each < 1 or nodes % each:
            raise InputError(f"does not divide the {nodes} pods of PET_NNODES", field=env.SLICE_NODES, got=each)
        slices = nodes // each
    address, port = environment.get("PET_MASTER_ADDR", ""), environment.get("PET_MASTER_PORT", "0")
    return Rendezvous(nodes, 0 if nodes == 1 else node_rank, address, env.number("PET_MASTER_PORT", port), slices)


def _trainjob(environment: Environ) -> Rendezvous:
    """Read the variables of Trainer v2's jax runtime (kubeflow/trainer, pkg/runtime/framework/plugins/jax/jax.go)."""
    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS")
    group = _variable_group(environment, "Trainer's JAX runtime", *names)
    address, port = _check_address("JAX_COORDINATOR_ADDRESS", group["JAX_COORDINATOR_ADDRESS"])
    return Rendezvous(_read_number(group, names[0]), _read_number(group, names[1]), address, port)


def _jaxjob(environment: Environ) -> Rendezvous:
    """Read the variables of JAXJob v1 (kubeflow/training-operator, pkg/controller.v1/jax/envvar.go).

    JAX itself does not read them.
    """
    names = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")
    group = _variable_group(environment, "a JAXJob", *names)
    address, port = group["COORDINATOR_ADDRESS"], _read_number(group, "COORDINATOR_PORT")
    return Rendezvous(_read_number(group, "NUM_PROCESSES"), _read_number(group, "PROCESS_ID"), address, port)


def _tpu(environment: Environ) -> Rendezvous:
    """Read the variables of GKE's webhook for TPU slices, as JAX 0.10.2 does (jax/_src/clusters/cloud_tpu_cluster.py).

    TPU_WORKER_ID counts within a slice. With several slices MEGASCALE_COORDINATOR_ADDRESS has the first host; its port
    is for libtpu.
    """
    hosts_of = "TPU_PROCESS_ADDRESSES" if "TPU_PROCESS_ADDRESSES" in environment else "TPU_WORKER_HOSTNAMES"
    group = _variable_group(environment, "a TPU slice", "TPU_WORKER_ID", hosts_of)
    hosts = [host.strip() for host in group[hosts_of].split(",")]
    worker, address = _read_number(group, "TPU_WORKER_ID"), hosts[0].partition(":")[0]
    if not 0 <= worker < len(hosts):
        raise InputError(f"{hosts_of} names {len(hosts)} hosts: {group[hosts_of]}", field="TPU_WORKER_ID", got=worker)
    slices = slice_id = 0
    multislice = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
    if any(name in environment for name in multislice):
        group = _variable_group(environment, "several TPU slices", *multislice)
        slices, slice_id = _read_number(group, multislice[1]), _read_number(group, multislice[2])
        address = group[multislice[0]].partition(":")[0]
        if not 0 <= slice_id < slices:
            raise InputError(f"not a slice of {multislice[1]}={slices}", field=multislice[2], got=slice_id)
    nodes = len(hosts) * max(1, slices)
    return Rendezvous(nodes, slice_id * len(hosts) + worker, address if nodes > 1 else "", TPU_PORT, max(1, slices))


def _legacy_jaxjob(environment: Environ) -> Rendezvous:
    address, port = environment.get(env.MASTER_ADDR, ""), env.read_number(env.MASTER_PORT, environment) or 0
    nodes, node_rank = _read_number(environment, env.WORLD_SIZE), _read_number(environment, env.RANK)
    return Rendezvous(nodes, node_rank, address, port)


def _check_rendezvous(rendezvous: Rendezvous) -> Rendezvous:
    nodes, node_rank = rendezvous.nodes, rendezvous.node_rank
    if nodes < 1 or (node_rank is not None and not 0 <= node_rank < nodes):
        raise InputError(
            f"not a node of {nodes}",
            field="node rank",
            got=node_rank,
            hint="Check the variables of the launcher (PET_NODE_RANK and PET_NNODES, or those of its kind).",
        )
    return rendezvous


def _check_against_tpu(rendezvous: Rendezvous, environment: Environ) -> None:
    """Check that the launcher numbers the hosts of a slice as libtpu does, by TPU_WORKER_ID."""
    if "TPU_WORKER_ID" not in environment or rendezvous.node_rank is None:
        return
    tpu = _tpu(environment)
    if (tpu.nodes, tpu.node_rank) != (rendezvous.nodes, rendezvous.node_rank):
        raise InputError(
            f"{rendezvous.node_rank} of {rendezvous.nodes} by the launcher, but {tpu.node_rank} of {tpu.nodes} by the "
            "variables of the TPU slice (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES)",
            field="node rank",
            got=(rendezvous.node_rank, rendezvous.nodes),
            hint="A slice needs one pod for each host, with the same numbers: use launch.backend=jobset",
        )


def _variable_group(environment: Environ, launcher: str, *names: str) -> dict[str, str]:
    """Return the variables of one launcher; raises InputError if some are missing."""
    missing = [name for name in names if not environment.get(name)]
    if missing:
        present = ", ".join(name for name in names if name not in missing)
        raise InputError(
            f"missing from the environment of {launcher}" + (f", which has {present}" if present else ""),
            field=", ".join(missing),
            hint="Start the pods with their launcher, or unset the variables of another launcher.",
        )
    return {name: environment[name] for name in names}


def _check_address(name: str, text: str) -> tuple[str, int]:
    address, colon, port = text.rpartition(":")
    if not colon or not address:
        raise InputError("not a host and a port, such as first-pod:29500", field=name, got=text)
    return address, env.number(name, port)


def _read_number(environment: Environ, name: str) -> int:
    return env.number(name, environment[name])


def _print_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def log_rendezvous_progress(
    rendezvous: Rendezvous,
    has_joined: Callable[[], bool],
    log_line: Callable[[str], None] = _print_stderr,
    *,
    first_seconds: float = FIRST_LOG_SECONDS,
    every_seconds: float = LOG_EVERY_SECONDS,
) -> Iterator[None]:
    """While the block runs, log what this pod waits for, until `has_joined` returns True (its ranks have started)."""
    finished = threading.Event()

    def log_progress() -> None:
        seconds = first_seconds
        while not finished.wait(seconds) and not has_joined():
            text = describe_missing_pods(rendezvous)  # may take a while: name servers that do not answer
            if not finished.is_set() and not has_joined():
                log_line(text)
            seconds = every_seconds

    if rendezvous.nodes > 1:
        threading.Thread(target=log_progress, name="joining", daemon=True).start()
    try:
        yield
    finally:
        finished.set()


def describe_missing_pods(rendezvous: Rendezvous) -> str:
    """Return the reason why the pods have not joined, as far as this pod can see."""
    others = f"the other {rendezvous.nodes - 1} pods" if rendezvous.nodes > 2 else "the other pod"
    if rendezvous.is_leader or not rendezvous.address:
        return f"waiting for {others} of this job"
    endpoint = f"{rendezvous.address}:{rendezvous.port}"
    try:
        addresses = socket.getaddrinfo(rendezvous.address, rendezvous.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return (
            f"waiting: the name of the first pod, {rendezvous.address}, does not resolve ({error.strerror or error}). "
            "It resolves once that pod runs; if it runs, check the job's headless service and the cluster's DNS"
        )
    address = addresses[0][4]
    try:
        socket.create_connection((str(address[0]), rendezvous.port), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        return (
            f"waiting: the first pod does not answer at {endpoint} ({error.strerror or error}). It has not started "
            "yet, has exited, or a network policy blocks the connection"
        )
    return f"waiting for {others} of this job; the first pod answers at {endpoint}"
