"""How the pods of a job meet, from what the launcher of each pod says in its environment.

Every kind of launcher has variables of its own, which belong together: one that is set without the others means that
somebody set it by hand or that the wrong launcher is at work, and is an error that names what is missing.

What a pod waits for until its ranks have met those of the others, said in its log.

torchrun looks for the first pod again and again, for 15 minutes and without a word. Pods of one job may come minutes
apart, so to wait is right; to be silent about it is not.
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
"""Where torchrun's c10d rendezvous is when its endpoint names no port."""
TPU_PORT = 29500
"""Where the pods of a TPU slice meet: GKE names their hosts and no port."""

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Rendezvous:
    """How the pods of a job meet. node_rank is None where only the rendezvous decides it (elastic c10d).

    slices: TPU slices, or groups of pods, of which each has as many consecutive nodes.
    """

    nodes: int = 1
    node_rank: int | None = 0
    address: str = ""
    port: int = 0
    slices: int = 1

    @property
    def is_leader(self) -> bool | None:
        """Whether rank 0 runs in this pod; None where that is not known before the pods have met."""
        return None if self.node_rank is None else self.node_rank == 0

    @property
    def slice(self) -> int:
        """The slice of this pod."""
        return (self.node_rank or 0) // (self.nodes // self.slices)


def read_rendezvous_env(environ: Environ) -> Rendezvous | None:
    """The meeting place of the pods; None if this one is alone.

    From torchrun's PET_* variables, as the training operator and our manifests set them for either engine; else from
    those of Trainer's JAX runtime, of a JAXJob, of GKE for TPU slices; else from WORLD_SIZE and RANK counted in pods,
    which older launchers set. Raises InputError for variables that are half set, no numbers or no numbers of a world.
    """
    readers = {
        "PET_NNODES": _torchrun,
        "JAX_NUM_PROCESSES JAX_PROCESS_ID": _trainjob,
        "COORDINATOR_ADDRESS PROCESS_ID NUM_PROCESSES": _jaxjob,
        "TPU_WORKER_ID TPU_WORKER_HOSTNAMES TPU_PROCESS_ADDRESSES MEGASCALE_COORDINATOR_ADDRESS": _tpu,
    }
    for names, read in readers.items():
        if any(name in environ for name in names.split()):
            found = _check_rendezvous(read(environ))
            _check_against_tpu(found, environ)
            return found
    if "WORLD_SIZE" in environ and "RANK" in environ and "LOCAL_RANK" not in environ:
        return _check_rendezvous(_read_legacy_jaxjob(environ))
    return None


def _torchrun(environment: Environ) -> Rendezvous:
    """Where the pods are those of several slices, PET_NODE_RANK counts within the one that `env.SLICE` names."""
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
    """Trainer v2, jax runtime (kubeflow/trainer, pkg/runtime/framework/plugins/jax/jax.go): one slice, by TrainJob."""
    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS")
    found = _variable_group(environment, "Trainer's JAX runtime", *names)
    address, port = _check_address("JAX_COORDINATOR_ADDRESS", found["JAX_COORDINATOR_ADDRESS"])
    return Rendezvous(_read_number(found, names[0]), _read_number(found, names[1]), address, port)


def _jaxjob(environment: Environ) -> Rendezvous:
    """JAXJob v1 (kubeflow/training-operator, pkg/controller.v1/jax/envvar.go). JAX itself reads none of these."""
    names = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")
    found = _variable_group(environment, "a JAXJob", *names)
    address, port = found["COORDINATOR_ADDRESS"], _read_number(found, "COORDINATOR_PORT")
    return Rendezvous(_read_number(found, "NUM_PROCESSES"), _read_number(found, "PROCESS_ID"), address, port)


def _tpu(environment: Environ) -> Rendezvous:
    """GKE's webhook for pods on TPU slices, as JAX 0.10.2 reads it (jax/_src/clusters/cloud_tpu_cluster.py).

    TPU_WORKER_ID counts within a slice. Of several slices MEGASCALE_COORDINATOR_ADDRESS is the first host, with a port
    that is not for us.
    """
    hosts_of = "TPU_PROCESS_ADDRESSES" if "TPU_PROCESS_ADDRESSES" in environment else "TPU_WORKER_HOSTNAMES"
    found = _variable_group(environment, "a TPU slice", "TPU_WORKER_ID", hosts_of)
    hosts = [host.strip() for host in found[hosts_of].split(",")]
    worker, address = _read_number(found, "TPU_WORKER_ID"), hosts[0].partition(":")[0]
    if not 0 <= worker < len(hosts):
        raise InputError(f"{hosts_of} names {len(hosts)} hosts: {found[hosts_of]}", field="TPU_WORKER_ID", got=worker)
    slices = slice_ = 0
    multislice = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
    if any(name in environment for name in multislice):
        found = _variable_group(environment, "several TPU slices", *multislice)
        slices, slice_ = _read_number(found, multislice[1]), _read_number(found, multislice[2])
        address = found[multislice[0]].partition(":")[0]
        if not 0 <= slice_ < slices:
            raise InputError(f"not a slice of {multislice[1]}={slices}", field=multislice[2], got=slice_)
    nodes = len(hosts) * max(1, slices)
    return Rendezvous(nodes, slice_ * len(hosts) + worker, address if nodes > 1 else "", TPU_PORT, max(1, slices))


def _read_legacy_jaxjob(environment: Environ) -> Rendezvous:
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "0")
    nodes, node_rank = _read_number(environment, "WORLD_SIZE"), _read_number(environment, "RANK")
    return Rendezvous(nodes, node_rank, address, env.number("MASTER_PORT", port))


def _check_rendezvous(found: Rendezvous) -> Rendezvous:
    if found.nodes < 1 or (found.node_rank is not None and not 0 <= found.node_rank < found.nodes):
        raise InputError(
            f"not a node of {found.nodes}",
            field="node rank",
            got=found.node_rank,
            hint="Check the variables of the launcher (PET_NODE_RANK and PET_NNODES, or those of its kind).",
        )
    return found


def _check_against_tpu(found: Rendezvous, environment: Environ) -> None:
    """The TPU library numbers the hosts of a slice by TPU_WORKER_ID: whoever else numbers them must do it alike."""
    if "TPU_WORKER_ID" not in environment or found.node_rank is None:
        return
    tpu = _tpu(environment)
    if (tpu.nodes, tpu.node_rank) != (found.nodes, found.node_rank):
        raise InputError(
            f"the launcher says {found.node_rank} of {found.nodes}, and the variables of the TPU slice say "
            f"{tpu.node_rank} of {tpu.nodes} (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES)",
            field="node rank",
            got=(found.node_rank, found.nodes),
            hint="The pods of a slice must be as many as its hosts and numbered alike: use launch.backend=jobset",
        )


def _variable_group(environment: Environ, launcher: str, *names: str) -> dict[str, str]:
    """Return the variables of one launcher, which sets all or none of them."""
    missing = [name for name in names if not environment.get(name)]
    if missing:
        there = ", ".join(name for name in names if name not in missing)
        raise InputError(
            f"missing from the environment of {launcher}" + (f", which has {there}" if there else ""),
            field=", ".join(missing),
            hint="Start the pods by their launcher, or unset what is left over from another.",
        )
    return {name: environment[name] for name in names}


def _check_address(name: str, text: str) -> tuple[str, int]:
    address, colon, port = text.rpartition(":")
    if not colon or not address:
        raise InputError("not a host and a port, such as first-pod:29500", field=name, got=text)
    return address, env.number(name, port)


def _read_number(environment: Environ, name: str) -> int:
    return env.number(name, environment[name])


FIRST_LOG_SECONDS = 20.0
"""Until the first word: what starts with its peers has met them by then."""
LOG_EVERY_SECONDS = 60.0
CONNECT_TIMEOUT_SECONDS = 5.0


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
    """Tells what the pod waits for, after `first` seconds and every `again` seconds, until it has met the others."""
    over = threading.Event()

    def narrate() -> None:
        seconds = first_seconds
        while not over.wait(seconds) and not has_joined():
            text = describe_missing_pods(rendezvous)  # may take a while: name servers that do not answer
            if not over.is_set() and not has_joined():
                log_line(text)
            seconds = every_seconds

    if rendezvous.nodes > 1:
        threading.Thread(target=narrate, name="joining", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def describe_missing_pods(rendezvous: Rendezvous) -> str:
    """Why the pods have not met, as far as it can be seen from here."""
    others = f"the other {rendezvous.nodes - 1} pods" if rendezvous.nodes > 2 else "the other pod"
    if rendezvous.is_leader or not rendezvous.address:
        return f"waiting for {others} of this job"
    place = f"{rendezvous.address}:{rendezvous.port}"
    try:
        found = socket.getaddrinfo(rendezvous.address, rendezvous.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return (
            f"waiting: the name of the first pod, {rendezvous.address}, does not resolve ({error.strerror or error}). It "
            "does once that pod runs; if it runs, look at the job's headless service and at the cluster's DNS"
        )
    address = found[0][4]
    try:
        socket.create_connection((str(address[0]), rendezvous.port), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        return (
            f"waiting: nobody answers for the first pod at {place} ({error.strerror or error}). It has not started yet "
            "or has ended, or a network policy keeps this pod from it"
        )
    return f"waiting for {others} of this job; the first pod answers at {place}"
