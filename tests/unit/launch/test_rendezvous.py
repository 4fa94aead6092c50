"""Rendezvous of pods, from the environment that each kind of launcher sets."""

import socket
import threading

import pytest

from podscale.errors import ABSENT
from podscale.launch import rendezvous
from podscale.launch.rendezvous import Rendezvous
from tests.support.polling import until
from tests.support.refusals import refused

TORCHRUN = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "29500"}
TRAINJOB = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "r-node-0-0.r:29500"}
JAXJOB = {"COORDINATOR_ADDRESS": "r-worker-0", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}
SLICE = {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "h0.r,h1.r,h2.r,h3.r"}
MULTISLICE = {
    **SLICE,
    "MEGASCALE_COORDINATOR_ADDRESS": "s0h0.r:8080",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}
JOBSET_OF_SLICES = {
    "PET_NNODES": "8",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "r-node-0-0.r",
    "PET_MASTER_PORT": "29500",
    "PODSCALE_SLICE": "1",
    "PODSCALE_SLICE_NODES": "4",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TRAINJOB, Rendezvous(2, 1, "r-node-0-0.r", 29500)),
        ({**TRAINJOB, "JAX_COORDINATOR_ADDRESS": "[fd00::1]:29500"}, Rendezvous(2, 1, "[fd00::1]", 29500)),
        (JAXJOB, Rendezvous(2, 1, "r-worker-0", 6666)),
        (SLICE, Rendezvous(4, 2, "h0.r", 29500)),
        ({**SLICE, "TPU_PROCESS_ADDRESSES": "p0:8471,p1:8471,p2:8471"}, Rendezvous(3, 2, "p0", 29500)),
        ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, Rendezvous(1, 0, "", 29500)),
        (MULTISLICE, Rendezvous(8, 6, "s0h0.r", 29500, slices=2)),
        (JOBSET_OF_SLICES, Rendezvous(8, 6, "r-node-0-0.r", 29500, slices=2)),
        # our JobSet on GKE, whose webhook adds variables: both agree, and only ours have the address
        ({**JOBSET_OF_SLICES, **MULTISLICE}, Rendezvous(8, 6, "r-node-0-0.r", 29500, slices=2)),
        ({**TORCHRUN, **JAXJOB}, Rendezvous(2, 1, "m", 29500)),
    ],
)
def test_the_rendezvous_follows_the_variables_of_the_launcher(variables: dict[str, str], expected: Rendezvous) -> None:
    assert Rendezvous.read(variables) == expected


def test_each_slice_has_consecutive_pods() -> None:
    pods = [Rendezvous(8, rank, slices=2) for rank in range(8)]
    assert [pod.slice for pod in pods] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("variables", "left_out", "launcher"),
    [(group, name, launcher) for group, launcher in ((TRAINJOB, "Trainer"), (JAXJOB, "a JAXJob")) for name in group]
    + [(SLICE, name, "a TPU slice") for name in SLICE]
    + [(MULTISLICE, name, "several TPU slices") for name in MULTISLICE if name.startswith("MEGASCALE")]
    + [(JOBSET_OF_SLICES, "PODSCALE_SLICE_NODES", "several slices")],
)
def test_a_half_set_environment_names_what_is_missing(variables: dict[str, str], left_out: str, launcher: str) -> None:
    """JAX_COORDINATOR_ADDRESS and COORDINATOR_PORT alone are allowed, because other programs also set them."""
    half = {name: value for name, value in variables.items() if name != left_out}
    with refused(launcher, field=left_out, got=ABSENT) as refusal:
        Rendezvous.read(half)
    assert refusal.error.exit_code == 2


@pytest.mark.parametrize(
    ("variables", "field", "got", "expected"),
    [
        ({**TRAINJOB, "JAX_PROCESS_ID": "two"}, "JAX_PROCESS_ID", "two", ""),
        ({**TRAINJOB, "JAX_PROCESS_ID": "2"}, "node rank", 2, "of 2"),
        ({**TRAINJOB, "JAX_COORDINATOR_ADDRESS": "first"}, "JAX_COORDINATOR_ADDRESS", "first", ""),
        ({**JAXJOB, "NUM_PROCESSES": "0", "PROCESS_ID": "0"}, "node rank", 0, "of 0"),
        ({**SLICE, "TPU_WORKER_ID": "4"}, "TPU_WORKER_ID", 4, "TPU_WORKER_HOSTNAMES names 4 "),
        ({**MULTISLICE, "MEGASCALE_SLICE_ID": "2"}, "MEGASCALE_SLICE_ID", 2, "MEGASCALE_NUM_SLICES=2"),
        ({**JOBSET_OF_SLICES, "PODSCALE_SLICE_NODES": "3", "PODSCALE_SLICE": "0"}, "PODSCALE_SLICE_NODES", 3, "8 pods"),
        # one process id for each pod of a TrainJob, but two slices: Trainer's numbers differ from those of the TPUs
        ({**TRAINJOB, **SLICE}, "node rank", (1, 2), "2 of 4"),
    ],
)
def test_invalid_variables_are_refused(variables: dict[str, str], field: str, got: object, expected: str) -> None:
    with refused(expected, field=field, got=got):
        Rendezvous.read(variables)


def pod_of(address: str, port: int = 1, nodes: int = 2, node_rank: int | None = 1) -> Rendezvous:
    return Rendezvous(nodes=nodes, node_rank=node_rank, address=address, port=port)


def test_a_name_that_does_not_resolve() -> None:
    message = rendezvous.describe_missing_pods(pod_of("digits-worker-0.invalid"))
    assert "digits-worker-0.invalid" in message
    assert "headless service" in message


def test_a_first_pod_that_does_not_answer() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, and not listening
        port = bound.getsockname()[1]
        message = rendezvous.describe_missing_pods(pod_of("127.0.0.1", port))
    assert f"127.0.0.1:{port}" in message
    assert "network policy" in message


@pytest.mark.parametrize(("nodes", "others"), [(2, "the other pod"), (5, "the other 4 pods")])
def test_missing_pods_are_counted(nodes: int, others: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = rendezvous.describe_missing_pods(pod_of("127.0.0.1", port, nodes))
    assert others in message
    assert message.endswith(f" 127.0.0.1:{port}")
    first = rendezvous.describe_missing_pods(pod_of("0.invalid", nodes=nodes, node_rank=0))
    assert others in first
    assert "127.0.0.1" not in first


def test_progress_is_logged_until_all_pods_have_joined() -> None:
    logged: list[str] = []
    joined = threading.Event()
    with rendezvous.log_rendezvous_progress(
        pod_of("0.invalid", node_rank=0), joined.is_set, logged.append, first_seconds=0.01, every_seconds=0.01
    ):
        until(lambda: len(logged) >= 3)
        joined.set()
        until(lambda: not alive())
    assert set(logged) == {rendezvous.describe_missing_pods(pod_of("0.invalid", node_rank=0))}


def test_a_single_pod_does_not_wait() -> None:
    with rendezvous.log_rendezvous_progress(Rendezvous(), lambda: False, pytest.fail, first_seconds=0, every_seconds=0):
        assert not alive()


def alive() -> bool:
    return any(thread.name == "joining" for thread in threading.enumerate())
