"""Workers of a pod: counts, rendezvous, commands and environments, without starting anything."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from podscale.config import load
from podscale.distributed.startup_clock import StartupClock
from podscale.distributed.worker_env import RankEnv, WorkerEnv
from podscale.launch.environment_file import describe_environment
from podscale.launch.fork_launcher import build_rank_env
from podscale.launch.rendezvous import Rendezvous
from podscale.launch.worker_spec import WorkerSpec, build_worker_spec
from podscale.util import env
from tests.support.refusals import refused


def worker_spec(*options: str, gpus: int = 0, cores: int = 8, **variables: str) -> WorkerSpec:
    return build_worker_spec(load(None, options), "train", "shards", variables, gpus=gpus, cores=cores)


@pytest.mark.parametrize(
    ("options", "gpus", "variables", "processes"),
    [
        ((), 0, {}, 1),
        ((), 4, {}, 4),
        (("launch.processes=2",), 4, {}, 2),
        (("launch.processes=2",), 0, {"PET_NPROC_PER_NODE": "8"}, 8),
        ((), 4, {"PET_NPROC_PER_NODE": "auto"}, 4),
        (("launch.processes=2",), 4, {"PET_NPROC_PER_NODE": "gpu"}, 2),
    ],
)
def test_processes(options: tuple[str, ...], gpus: int, variables: dict[str, str], processes: int) -> None:
    assert worker_spec(*options, gpus=gpus, **variables).processes_per_node == processes


def test_threads_share_the_cores() -> None:
    assert worker_spec("launch.processes=3", "train.global_batch=255").threads_per_process == 2
    assert worker_spec("launch.processes=16").threads_per_process == 1
    assert worker_spec("launch.threads=5").threads_per_process == 5


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "29500"},
            Rendezvous(2, 1, "m", 29500),
        ),
        ({"PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "m:29500"}, Rendezvous(4, None, "m", 29500)),
        ({"PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "m"}, Rendezvous(4, None, "m", 29400)),
        ({"PET_NNODES": "1:1", "PET_RDZV_ENDPOINT": "m:29500"}, Rendezvous(1, 0, "m", 29500)),
        ({"WORLD_SIZE": "3", "RANK": "2", "MASTER_ADDR": "m", "MASTER_PORT": "1"}, Rendezvous(3, 2, "m", 1)),
        # inside a rank that torchrun started, WORLD_SIZE counts ranks: no rendezvous of pods
        ({"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "0"}, None),
    ],
)
def test_rendezvous_of_pods(variables: dict[str, str], expected: Rendezvous | None) -> None:
    assert Rendezvous.read(variables) == expected


@pytest.mark.parametrize(
    ("variables", "field", "got"),
    [
        ({"PET_NNODES": "two"}, "PET_NNODES", "two"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "2"}, "node rank", 2),
        ({"PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE", "many"),
    ],
)
def test_nonsense_of_a_launcher_is_an_input_error(variables: dict[str, str], field: str, got: object) -> None:
    with refused(field=field, got=got):
        worker_spec(**variables)


def test_several_nodes_need_a_launcher() -> None:
    with refused("PET_NNODES", field="launch.nodes", got=2):
        worker_spec("launch.nodes=2")


def test_one_rank_alone_needs_no_torchrun() -> None:
    command = worker_spec().command(Path("/r"))
    assert command == ["-m", "podscale.launch.worker_main", "podscale.pytorch.worker"]
    variables = environment(worker_spec())
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("0", "1")


def test_ranks_of_a_pod_share_a_decoded_cache() -> None:
    cached = ("input.loader=native", "input.decoded_cache_bytes=1000")
    assert worker_spec(*cached, "launch.processes=1").shared_cache_bytes == 0
    assert worker_spec("launch.processes=4").shared_cache_bytes == 0
    spec = worker_spec(*cached, "launch.processes=4")
    assert spec.shared_cache_bytes == 4000
    stale = {env.DECODED_CACHE: "/proc/1/fd/3"}
    assert spec.environment(worker_env(spec), stale, "/proc/2/fd/4")[env.DECODED_CACHE] == "/proc/2/fd/4"
    assert spec.environment(worker_env(spec), stale)[env.DECODED_CACHE] == ""


def environment(spec: WorkerSpec) -> dict[str, str]:
    return spec.environment(worker_env(spec), {"HOME": "/h"})


def worker_env(spec: WorkerSpec) -> WorkerEnv:
    return WorkerEnv(
        spec.config,
        spec.stage,
        spec.shard_set,
        Path("/r"),
        log_directory=Path("/l"),
        lease=Path("/x/.lease"),
        fence_number=7,
        startup=StartupClock(1234.5678, {"supervisor": 0.1}),
    )


@pytest.mark.parametrize("engine", ["pytorch", "jax"])
def test_the_fork_launcher_starts_several_ranks(engine: str) -> None:
    ranks = worker_spec("launch.processes=4", f"train.engine={engine}")
    command = ranks.command(Path("/r"))
    assert command[:2] == ["-m", "podscale.launch.fork_launcher"]
    assert {"--processes=4", "--nodes=1", "--node-rank=0", "--address=127.0.0.1", "--port=0"} <= set(command)
    assert command[-2:] == [f"--preload=podscale.{engine}.worker", f"podscale.{engine}.worker"]
    assert "RANK" not in environment(ranks)
    other = replace(ranks, worker_module="other").command(Path("/r"))
    assert other[-1] == "other"
    assert not any(option.startswith("--preload") for option in other), "it may do at its import what a rank does"


def test_the_fork_launcher_starts_several_pods_of_jax() -> None:
    assert worker_spec("train.engine=jax").command(Path("/r"))[-1] == "podscale.jax.worker"
    jobset = {"PET_NNODES": "8", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "1"}
    slices = {"PODSCALE_SLICE": "1", "PODSCALE_SLICE_NODES": "4"}
    command = worker_spec("launch.nodes=8", "train.engine=jax", **jobset, **slices).command(Path("/r"))
    assert {"--nodes=8", "--node-rank=6", "--slices=2", "--address=m", "--port=1"} <= set(command)


def test_a_rank_environment_of_a_pod() -> None:
    rank_env = build_rank_env(Rendezvous(8, 6, "m", 1, slices=2), 2, 1, 1)
    assert rank_env == RankEnv(13, 16, 1, 2, "m", 1, slice_id=1, slice_count=2, node=6)
    assert build_rank_env(Rendezvous(1, 0, "127.0.0.1"), 2, 0, 4711) == RankEnv(0, 2, 0, 2, "127.0.0.1", 4711)
    assert RankEnv.read(environment(worker_spec("train.engine=jax"))) == RankEnv()


def test_the_contract_of_a_rank() -> None:
    ranks = worker_spec("launch.processes=2", "launch.grace_seconds=45.5", "run.id=r1")
    variables = environment(ranks)
    assert variables["HOME"] == "/h"
    assert json.loads(variables["PODSCALE_CONFIG"])["run"]["id"] == "r1"
    expected = {
        "PODSCALE_STAGE": "train",
        "PODSCALE_SHARD_SET": "shards",
        "PODSCALE_RANK_DIR": "/r",
        "PODSCALE_LOG_DIR": "/l",
        "PODSCALE_FENCE": "7",
        "OMP_NUM_THREADS": "4",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "51",
    }
    assert {name: variables[name] for name in expected} == expected


def test_torchrun_starts_ranks_across_nodes_and_restarts_them() -> None:
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "1"}
    command = worker_spec("launch.max_restarts=3", **variables).command(Path("/r"))
    rendezvous = {"--nnodes=2", "--node-rank=0", "--master-addr=m", "--master-port=1"}
    assert command[:2] == ["-m", "podscale.pytorch.torchrun"]
    assert {"--nproc-per-node=1", "--log-dir=/r/torchrun", "--max-restarts=3", *rendezvous} <= set(command)
    assert command[-3:] == ["-m", "podscale.launch.worker_main", "podscale.pytorch.worker"]


def test_the_environment_is_described_without_importing_it() -> None:
    described = describe_environment(worker_spec("launch.processes=2"))
    assert described["packages"]["numpy"].count(".") >= 1
    assert described["cores"] >= 1
    assert described["memory_bytes"] > 2**20
    assert described["processes"] == 2
    json.dumps(described, allow_nan=False)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PROCESS_ID": "1", "NUM_PROCESSES": "2"}, Rendezvous(2, 1, "first", 6666)),
        ({"PROCESS_ID": "0", "NUM_PROCESSES": "1"}, Rendezvous(1, 0, "first", 6666)),
    ],
)
def test_rendezvous_of_a_jaxjob(variables: dict[str, str], expected: Rendezvous) -> None:
    coordinator = {"COORDINATOR_ADDRESS": "first", "COORDINATOR_PORT": "6666"}
    assert Rendezvous.read({**coordinator, **variables}) == expected


def test_the_rank_of_a_pod_counts_the_slices_before_its_own() -> None:
    pod = {"PET_NNODES": "8", "PET_NODE_RANK": "3", "PODSCALE_SLICE": "1", "PODSCALE_SLICE_NODES": "4"}
    rendezvous = Rendezvous.read(pod)
    assert rendezvous is not None
    assert rendezvous.node_rank == 7
