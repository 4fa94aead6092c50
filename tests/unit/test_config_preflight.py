"""What can be known before anything is started, asked of a real file system and real sockets."""

import json
import re
import shutil
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from podscale import devices
from podscale.config import RunConfig, data_fingerprint, loads
from podscale.config import preflight as preflighting
from podscale.config.preflight import find_problems, preflight
from podscale.errors import InputError
from podscale.text import human_bytes


def document(workspace: Path, *changes: str) -> RunConfig:
    base = [f"run.workspace={workspace}", "launch.processes=1", "input.image_size=32"]
    return loads("", overrides=[*base, *changes])


def only(config: RunConfig, place: str = "here") -> str:
    problems = find_problems(config, place)  # type: ignore[arg-type]
    assert len(problems) == 1, problems
    with pytest.raises(InputError) as caught:
        preflight(config, place)  # type: ignore[arg-type]
    assert str(caught.value) == problems[0]
    return problems[0]


def complete_shard_set(config: RunConfig, train: int, validation: int) -> None:
    directory = Path(config.run.workspace) / "datasets" / data_fingerprint(config.data)
    directory.mkdir(parents=True)
    splits = {"train": {"count": train}, "validation": {"count": validation}}
    (directory / "manifest.json").write_text(json.dumps({"splits": splits}))


def test_a_run_that_can_start_has_no_problems_and_leaves_no_trace(tmp_path):
    config = document(tmp_path / "not" / "there" / "yet")
    assert find_problems(config, "here") == []
    preflight(config, "here")
    assert list(tmp_path.iterdir()) == []


def test_every_problem_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    changes = ["data.source=/no/such/folder", "launch.nodes=2", "telemetry.required=true"]
    config = document(tmp_path / "file" / "below", *changes, "telemetry.address=203.0.113.1")
    with pytest.raises(InputError) as caught:
        preflight(config, "here")
    told = str(caught.value)
    assert "4 things to change" in told
    for part in ("data.source /no/such/folder", "run.workspace", "launch.nodes 2", "telemetry.address"):
        assert part in told


def test_the_source(tmp_path):
    assert "does not exist (nearest existing folder: " in only(document(tmp_path, f"data.source={tmp_path}/photos"))
    (tmp_path / "photos").mkdir()
    assert "the folder is empty" in only(document(tmp_path, f"data.source={tmp_path}/photos"))
    (tmp_path / "photos" / "cat").mkdir()
    assert find_problems(document(tmp_path, f"data.source={tmp_path}/photos"), "here") == []
    assert find_problems(document(tmp_path, "data.source=s3://bucket/photos"), "here") == []


def test_a_source_that_was_deleted_after_sharding_is_no_problem(tmp_path):
    config = document(tmp_path, f"data.source={tmp_path}/gone")
    assert "does not exist" in only(config)
    complete_shard_set(config, 1000, 100)
    assert find_problems(config, "here") == []


def test_a_workspace_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    assert "is a file" in only(document(tmp_path / "file"))
    assert "mount the bucket" in only(document(Path("placeholder"), "run.workspace=gs://bucket/runs"))


def mounted(directory: Path, *options: str) -> bool:
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(directory)]
    return shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize(("options", "message"), [(["size=8m"], "free, about"), (["ro"], "cannot be written")])
def test_full_and_read_only_disks(tmp_path, options, message):
    target = tmp_path / "disk"
    if not mounted(target, *options):
        pytest.skip("mounting a tmpfs needs root")
    try:
        told = only(document(target))
        assert message in told
        assert "choose another run.workspace" in told
    finally:
        subprocess.run(["umount", str(target)], check=True)


def test_space_is_that_of_the_source(tmp_path):
    source = tmp_path / "photos" / "cat"
    source.mkdir(parents=True)
    with (source / "huge.jpg").open("wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).total + 2**30)
    config = document(tmp_path, f"data.source={tmp_path}/photos")
    assert "free, about" in only(config)
    complete_shard_set(config, 1000, 100)
    assert find_problems(config, "here") == []


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"telemetry.port {port}: another program listens there" in only(
            document(tmp_path, f"telemetry.port={port}", "telemetry.required=true")
        )
        assert find_problems(document(tmp_path, f"telemetry.port={port}"), "here") == []  # it would go on without
        unserved = document(tmp_path, f"telemetry.port={port}", "telemetry.required=true", "telemetry.enabled=false")
        assert find_problems(unserved, "here") == []
    assert find_problems(document(tmp_path, f"telemetry.port={port}", "telemetry.required=true"), "here") == []


def test_ranks_and_the_global_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "visible_gpus", lambda: 3)
    told = only(document(tmp_path, "launch.processes=0"))
    assert "train.global_batch 256 is not divisible by ranks x accumulation = 3 x 1" in told
    assert "only 3 GPUs are visible" in only(document(tmp_path, "launch.processes=4"))
    assert find_problems(document(tmp_path, "launch.processes=2"), "here") == []


def test_nccl_needs_gpus(tmp_path, monkeypatch):
    config = document(tmp_path, "train.all_reduce.backend=nccl", "launch.processes=2")
    monkeypatch.setattr(devices, "visible_gpus", lambda: 0)
    assert "NCCL joins GPUs, and none is visible here" in only(config)
    monkeypatch.setattr(devices, "visible_gpus", lambda: 2)
    assert find_problems(config, "here") == []


def test_a_cuda_graph_needs_a_gpu(tmp_path, monkeypatch):
    config = document(tmp_path, "train.cuda_graph=true", "launch.processes=1")
    monkeypatch.setattr(devices, "visible_gpus", lambda: 0)
    assert "no NVIDIA GPU here to record a graph for; set train.cuda_graph=false" in only(config)
    monkeypatch.setattr(devices, "visible_gpus", lambda: 1)
    assert find_problems(config, "here") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.cuda_graph=true", "train.all_reduce.algorithm=ddp"], "DistributedDataParallel cannot be part"),
        (["train.cuda_graph=true", "train.compile=reduce-overhead"], "records CUDA graphs of its own"),
        (["train.stem_compute=space_to_depth", "model.stem=small"], "no stride to fold"),
    ],
)
def test_ways_of_an_update_that_exclude_each_other(changes, message):
    with pytest.raises(InputError, match=message):
        loads("", overrides=changes)


def test_several_nodes_are_for_pods(tmp_path):
    config = document(tmp_path, "launch.nodes=2")
    assert "this is one machine" in only(config)
    assert find_problems(config, "pod") == []


def test_data_smaller_than_the_run_wants(tmp_path):
    config = document(tmp_path, "launch.processes=4", "train.global_batch=64")
    complete_shard_set(config, 60, 20)
    assert "train.global_batch 64 is larger than the training split of 60 images" in only(config)
    few = document(tmp_path / "few", "launch.processes=4", "train.global_batch=8")
    complete_shard_set(few, 60, 3)
    assert "4 ranks, but only 60 training and 3 validation images: lower launch.processes to 3" in only(few)


def test_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "memory", lambda: devices.Memory(0, 0, 64 * 2**20))
    told = only(document(tmp_path, "input.image_size=224", "input.workers=4"))
    assert "/dev/shm has 64.0 MiB free" in told
    assert find_problems(document(tmp_path, "input.loader=synthetic", "input.image_size=224"), "here") == []


def test_what_a_cluster_needs():
    problems = find_problems(loads("", overrides=["data.source=photos"]), "cluster")
    assert [problem.split()[0] for problem in problems] == ["run.workspace", "data.source", "launch.processes"]
    good = ["run.workspace=/workspace", "data.source=gs://bucket/photos", "launch.processes=8"]
    assert find_problems(loads("", overrides=good), "cluster") == []


def test_bytes_for_people():
    assert [human_bytes(n) for n in (0, 1023, 1536, 200 * 2**20, 2**50)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "200 MiB", "1024 TiB",
    ]  # fmt: skip


def test_trackers_that_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    absent = {"wandb": None, "mlflow": None}
    monkeypatch.setattr(preflighting, "find_spec", lambda name: absent[name] if name in absent else find_spec(name))
    config = document(tmp_path, "telemetry.trackers=[wandb]")
    assert only(config) == (
        "telemetry.trackers names wandb, which is not installed: pip install 'podscale[wandb]', or remove it"
    )
    assert "pip install 'podscale[mlflow]'" in only(document(tmp_path, "telemetry.trackers=[mlflow]"))
    monkeypatch.setenv("PODSCALE_IMAGE", "podscale-base")
    assert "this is podscale-base, choose one of your own on top of it that adds wandb, or remove it" in only(config)
    assert find_problems(document(tmp_path, "telemetry.trackers=[tensorboard]"), "here") == []
    assert find_problems(config, "containers") == []


def test_a_folder_that_wandb_left_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    if find_spec("wandb").origin is not None:
        pytest.skip("the package itself is installed")
    assert "names wandb, which is not installed" in only(document(tmp_path, "telemetry.trackers=[wandb]"))


def test_mlflow_is_somewhere(tmp_path, monkeypatch):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "mlflow.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert "set telemetry.mlflow.tracking_uri or MLFLOW_TRACKING_URI" in only(
        document(tmp_path, "telemetry.trackers=[mlflow]")
    )
    given = document(tmp_path, "telemetry.trackers=[mlflow]", "telemetry.mlflow.tracking_uri=https://mlflow.example")
    assert find_problems(given, "here") == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    assert find_problems(document(tmp_path, "telemetry.trackers=[mlflow]"), "here") == []


@pytest.mark.parametrize(
    "change",
    [
        "train.cuda_graph=true",
        "train.compile=default",
        "train.channels_last=false",
        "train.deterministic=true",
        "train.precision=fp16",
        "train.precision=bf16-pure",
        "train.optimizer.name=shampoo",
        "train.all_reduce.algorithm=auto",
        "train.all_reduce.algorithm=ring",
        "train.all_reduce.wire_column=bf16",
        "train.all_reduce.overlap=false",
        "train.all_reduce.backend=nccl",
        "train.loss=binary_cross_entropy",
        "train.mix={mixup: 0.2}",
        "train.ema.decay=0.999",
        "model.stochastic_depth=0.1",
        "input.loader=dali",
        "input.loader=nvjpeg",
    ],
)
def test_what_only_pytorch_has_is_refused_with_jax(change):
    loads("", overrides=[change])
    name = change.partition("=")[0]
    with pytest.raises(InputError, match=rf"{re.escape(name)}: the JAX engine .*; set {re.escape(name)}="):
        loads("", overrides=["train.engine=jax", change])


@pytest.mark.parametrize("change", ["train.spatial_partitions=[2, 1]", "train.steps_per_call=4"])
def test_what_only_jax_has_is_refused_with_pytorch(change):
    loads("", overrides=["train.engine=jax", "launch.hardware=tpu-v5e-4x4", change])
    with pytest.raises(InputError, match=r"only the JAX engine .*; set train\.engine=jax"):
        loads("", overrides=[change])


def test_rows_of_devices_are_not_rows_of_processes_on_tpus():
    """A process drives all chips of its machine."""
    tpus = ["train.engine=jax", "launch.hardware=tpu-v5e-4x4", "launch.processes=1", "train.all_reduce.row=4"]
    loads("", overrides=tpus)
    with pytest.raises(InputError, match="rows of 4 ranks do not divide"):
        loads("", overrides=[*tpus, "launch.hardware=null", "train.engine=pytorch"])


@pytest.mark.parametrize(
    "change",
    [
        "train.all_reduce.row=4",
        "model.batch_norm.group=4",
        "train.spatial_partitions=[2, 1]",
        "model.batch_norm.span=64",
    ],
)
def test_a_process_of_jax_may_drive_several_devices(monkeypatch, tmp_path, change):
    """What devices do not divide is told once there are devices; that processes share the batch, before."""
    config = document(tmp_path, "train.engine=jax", "launch.processes=1", "train.global_batch=128", change)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert find_problems(config, "here") == []
    if "span" not in change:
        monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
        assert "do not divide the 1 " in only(config)
    with pytest.raises(InputError, match="128 is not divisible by processes x accumulation = 3 x 1"):
        loads("", overrides=["train.engine=jax", "train.global_batch=128", "launch.processes=3"])


def test_jax_needs_its_library_where_tpus_are(monkeypatch, tmp_path):
    config = document(tmp_path, "train.engine=jax")
    there = {"jax"}
    monkeypatch.setattr(preflighting, "find_spec", lambda name: name if name in there else None)
    assert find_problems(config, "here") == []  # and no torch
    monkeypatch.setattr(devices, "tpu_chips", lambda: ["v5e"] * 4)
    assert "libtpu is not installed" in only(config)
    there.add("libtpu")
    assert find_problems(config, "here") == []
    there.remove("libtpu")
    monkeypatch.setenv("PODSCALE_IMAGE", "podscale-tpu")
    assert "podscale-tpu should hold it, so build that image again (docs/images.md)" in only(config)
    monkeypatch.setenv("PODSCALE_IMAGE", "podscale-base")
    assert "this is podscale-base, choose podscale-tpu" in only(config)
    there.clear()
    assert "the JAX engine needs jax" in only(config)


@pytest.mark.parametrize(
    ("engine", "image", "fitting"),
    [
        ("jax", "podscale-base:latest", "podscale-tpu"),
        ("jax", "localhost:5000/own/podscale-gpu@sha256:00", "podscale-tpu"),
        ("pytorch", "podscale-tpu:dev", "podscale-base or podscale-gpu"),
        ("jax", "registry/podscale-tpu", None),
        ("pytorch", "podscale-base:latest", None),
        ("jax", "registry/their-own-jax", None),
    ],
)
def test_an_image_of_ours_without_the_engine(engine, image, fitting):
    changes = ["run.workspace=/workspace", "data.source=digits", "launch.processes=1"]
    config = loads("", overrides=[*changes, f"train.engine={engine}", f"launch.image={image}"])
    found = [f"launch.image {image}: that image is without the engine of train.engine={engine}; name {fitting}"]
    assert find_problems(config, "cluster") == (found if fitting else [])


def test_tpus_that_are_not_here(monkeypatch, tmp_path):
    config = document(tmp_path, "train.engine=jax", "launch.hardware=tpu-v5e-2x2")
    monkeypatch.setattr(preflighting, "find_spec", lambda name: name)
    assert "launch.hardware tpu-v5e-2x2: this machine has no TPU" in only(config)


def test_the_batch_is_for_devices_not_for_processes(monkeypatch, tmp_path):
    config = document(tmp_path, "train.engine=jax", "train.global_batch=66")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert "66 is not divisible by ranks x accumulation = 4 x 1" in only(config)


def test_a_process_of_jax_alone_on_a_machine_drives_all_of_its_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "visible_gpus", lambda: 4)
    alone = document(tmp_path, "train.engine=jax", "train.global_batch=64", "launch.processes=1")
    each = document(tmp_path, "train.engine=jax", "train.global_batch=64", "launch.processes=4")
    torchs = document(tmp_path, "train.global_batch=64", "launch.processes=1")
    assert [preflighting.devices_here(one) for one in (alone, each, torchs)] == [4, 0, 0]
