"""Preflight checks on a real file system and real sockets."""

import json
import re
import shutil
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from podscale.config import RunConfig, data_fingerprint, engine_support, loads
from podscale.config.preflight import find_problems, host, preflight, software
from podscale.errors import InputError, InputErrors
from podscale.util import host_info
from podscale.util.formatting import format_bytes
from tests.support.refusals import refused


def document(workspace: Path, *changes: str) -> RunConfig:
    base = [f"run.workspace={workspace}", "launch.processes=1", "input.image_size=32"]
    return loads("", overrides=[*base, *changes])


def only(config: RunConfig, host: str = "here") -> InputError:
    problems = find_problems(config, host)  # type: ignore[arg-type]
    assert len(problems) == 1, problems
    with pytest.raises(InputError) as caught:
        preflight(config, host)  # type: ignore[arg-type]
    assert str(caught.value) == str(problems[0])
    return problems[0]


def about(error: InputError) -> tuple[str, object]:
    return error.field, error.got


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


def test_all_problems_are_reported_at_once(tmp_path):
    (tmp_path / "file").touch()
    changes = ["data.source=/no/such/folder", "launch.nodes=2", "telemetry.required=true"]
    config = document(tmp_path / "file" / "below", *changes, "telemetry.address=203.0.113.1")
    with refused(kind=InputErrors) as refusal:
        preflight(config, "here")
    errors = refusal.error.errors  # type: ignore[attr-defined]
    assert list(map(about, errors)) == [
        ("data.source", "/no/such/folder"),
        ("run.workspace", config.run.workspace),
        ("launch.nodes", 2),
        ("telemetry.address", "203.0.113.1"),
    ]
    assert refusal.text.splitlines()[1:] == [f"  - {error}" for error in errors]


def test_a_missing_or_empty_source_is_a_problem(tmp_path):
    photos = tmp_path / "photos"
    missing = only(document(tmp_path, f"data.source={photos}"))
    assert about(missing) == ("data.source", str(photos))
    assert str(tmp_path) in missing.problem  # the nearest folder that exists
    photos.mkdir()
    empty = only(document(tmp_path, f"data.source={photos}"))
    assert about(empty) == ("data.source", str(photos))
    assert "train/ and val/" in empty.hint
    (tmp_path / "photos" / "cat").mkdir()
    assert find_problems(document(tmp_path, f"data.source={tmp_path}/photos"), "here") == []
    assert find_problems(document(tmp_path, "data.source=s3://bucket/photos"), "here") == []


def test_a_source_that_was_deleted_after_sharding_is_no_problem(tmp_path):
    config = document(tmp_path, f"data.source={tmp_path}/gone")
    assert only(config).field == "data.source"
    complete_shard_set(config, 1000, 100)
    assert find_problems(config, "here") == []


def test_a_workspace_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    assert about(only(document(tmp_path / "file"))) == ("run.workspace", str(tmp_path / "file"))
    bucket = "gs://bucket/runs"
    assert about(only(document(Path("placeholder"), f"run.workspace={bucket}"))) == ("run.workspace", bucket)


def mounted(directory: Path, *options: str) -> bool:
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(directory)]
    return shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize(("options", "expected"), [(["size=8m"], "8.0 MiB"), (["ro"], "disk cannot")])
def test_full_and_read_only_disks(tmp_path, options, expected):
    target = tmp_path / "disk"
    if not mounted(target, *options):
        pytest.skip("mounting a tmpfs needs root")
    try:
        error = only(document(target))
        assert about(error) == ("run.workspace", str(target))
        assert expected in error.problem
    finally:
        subprocess.run(["umount", str(target)], check=True)


def test_the_needed_disk_space_is_that_of_the_source(tmp_path):
    source = tmp_path / "photos" / "cat"
    source.mkdir(parents=True)
    with (source / "huge.jpg").open("wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).total + 2**30)
    config = document(tmp_path, f"data.source={tmp_path}/photos")
    assert about(only(config)) == ("run.workspace", str(tmp_path))
    complete_shard_set(config, 1000, 100)
    assert find_problems(config, "here") == []


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        served = document(tmp_path, f"telemetry.port={port}", "telemetry.required=true")
        assert about(only(served)) == ("telemetry.port", port)
        assert (
            find_problems(document(tmp_path, f"telemetry.port={port}"), "here") == []
        )  # the run would continue without metrics
        unserved = document(tmp_path, f"telemetry.port={port}", "telemetry.required=true", "telemetry.enabled=false")
        assert find_problems(unserved, "here") == []
    assert find_problems(document(tmp_path, f"telemetry.port={port}", "telemetry.required=true"), "here") == []


def test_ranks_and_the_global_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 3)
    error = only(document(tmp_path, "launch.processes=0"))
    assert about(error) == ("train.global_batch", 256)
    assert "= 3 x 1" in error.problem
    error = only(document(tmp_path, "launch.processes=4"))
    assert (*about(error), error.hint) == ("launch.processes", 4, "Set launch.processes=3")
    assert find_problems(document(tmp_path, "launch.processes=2"), "here") == []


def test_nccl_needs_gpus(tmp_path, monkeypatch):
    config = document(tmp_path, "train.all_reduce.backend=nccl", "launch.processes=2")
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 0)
    assert about(only(config)) == ("train.all_reduce.backend", "nccl")
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 2)
    assert find_problems(config, "here") == []


def test_a_cuda_graph_needs_a_gpu(tmp_path, monkeypatch):
    config = document(tmp_path, "train.cuda_graph=true", "launch.processes=1")
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 0)
    error = only(config)
    assert (*about(error), error.hint) == ("train.cuda_graph", True, "Set train.cuda_graph=false")
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 1)
    assert find_problems(config, "here") == []


@pytest.mark.parametrize(
    ("changes", "field", "hint"),
    [
        (["train.cuda_graph=true", "train.all_reduce.algorithm=ddp"], "train.cuda_graph", "all_reduce.algorithm"),
        (["train.cuda_graph=true", "train.compile=reduce-overhead"], "train.compile", "train.cuda_graph=false"),
        (["train.stem_compute=space_to_depth", "model.stem=small"], "train.stem_compute", "plain"),
    ],
)
def test_step_options_that_exclude_each_other(changes, field, hint):
    with refused(hint, field=field):
        loads("", overrides=changes)


def test_several_nodes_are_for_pods(tmp_path):
    config = document(tmp_path, "launch.nodes=2")
    assert about(only(config)) == ("launch.nodes", 2)
    assert find_problems(config, "pod") == []


def test_a_data_set_too_small_for_the_run_is_a_problem(tmp_path):
    config = document(tmp_path, "launch.processes=4", "train.global_batch=64")
    complete_shard_set(config, 60, 20)
    error = only(config)
    assert (*about(error), error.hint) == ("train.global_batch", 64, "Set train.global_batch to 60 or less.")
    grown = document(
        tmp_path, "launch.processes=4", "train.phases=[{start: 2, global_batch: 64}]", "train.global_batch=8"
    )
    assert about(only(grown)) == ("train.phases.0.global_batch", 64)
    few = document(tmp_path / "few", "launch.processes=4", "train.global_batch=8")
    complete_shard_set(few, 60, 3)
    error = only(few)
    assert about(error) == ("launch.processes", 4)
    assert [int(number) for number in re.findall(r"\d+", str(error))] == [4, 60, 3, 4, 3]
    pods = document(tmp_path, "launch.processes=4", "launch.nodes=2", "train.global_batch=8")
    (error,) = host.host_problems(pods, {"train": 60, "validation": 6}, in_pod=True)
    assert re.findall(r"\d+", error.hint)[:1] == ["3"], "processes of each of two nodes"


def test_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(host_info, "memory_info", lambda: host_info.MemoryInfo(0, 0, 64 * 2**20))
    error = only(document(tmp_path, "input.image_size=224", "input.workers=4"))
    assert error.field == "/dev/shm"
    assert "64.0 MiB" in error.problem
    assert find_problems(document(tmp_path, "input.loader=synthetic", "input.image_size=224"), "here") == []


def test_what_a_cluster_needs():
    problems = find_problems(loads("", overrides=["data.source=photos"]), "cluster")
    assert [problem.field for problem in problems] == ["run.workspace", "data.source", "launch.processes"]
    good = ["run.workspace=/workspace", "data.source=gs://bucket/photos", "launch.processes=8"]
    assert find_problems(loads("", overrides=good), "cluster") == []


def test_byte_counts_are_formatted():
    assert [format_bytes(n) for n in (0, 1023, 1536, 200 * 2**20, 2**50)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "200 MiB", "1024 TiB",
    ]  # fmt: skip


def test_trackers_that_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    absent = {"wandb": None, "mlflow": None}
    monkeypatch.setattr(software, "find_spec", lambda name: absent[name] if name in absent else find_spec(name))
    config = document(tmp_path, "telemetry.trackers=[wandb]")
    error = only(config)
    assert about(error) == ("telemetry.trackers", "wandb")
    assert "`pip install 'podscale[wandb]'`" in error.hint
    assert "`pip install 'podscale[mlflow]'`" in only(document(tmp_path, "telemetry.trackers=[mlflow]")).hint
    monkeypatch.setenv("PODSCALE_IMAGE", "podscale-base")
    hint = only(config).hint
    assert "podscale-base" in hint
    assert "pip" not in hint
    assert find_problems(document(tmp_path, "telemetry.trackers=[tensorboard]"), "here") == []
    assert find_problems(config, "containers") == []


@pytest.mark.parametrize(
    ("package", "change", "key", "extra"),
    [
        ("timm", "model.name=timm:resnet18", "model.name", "timm"),
        ("timm", "train.start_from=timm:resnet18.a1_in1k", "train.start_from.weights", "timm"),
        ("huggingface_hub", f"train.start_from=hf://a/b@{'0' * 40}", "train.start_from.weights", "hub"),
    ],
)
def test_libraries_of_models_and_weights_are_needed(tmp_path, monkeypatch, package, change, key, extra):
    monkeypatch.setattr(software, "find_spec", lambda name: None if name == package else find_spec(name))
    error = only(document(tmp_path, change))
    assert error.field == key
    assert f"`pip install 'podscale[{extra}]'`" in error.hint


def test_packages_of_the_export_stage_are_needed_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(software, "_is_installed", lambda name: name != "onnxscript")
    error = only(document(tmp_path, "export.formats=[torchscript, onnx-int8]"))
    assert error.field == "export.formats"
    assert "onnxscript" in error.problem
    assert "podscale[torch,export]" in error.hint
    monkeypatch.setenv("PODSCALE_IMAGE", "podscale-gpu")
    error = only(document(tmp_path, "export.formats=[torchscript, onnx-int8]"))
    assert "podscale-gpu" in error.hint
    assert "pip" not in error.hint
    assert find_problems(document(tmp_path, "export.formats=[torchscript]"), "here") == []


def test_a_folder_that_wandb_left_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    if find_spec("wandb").origin is not None:
        pytest.skip("the package itself is installed")
    assert about(only(document(tmp_path, "telemetry.trackers=[wandb]"))) == ("telemetry.trackers", "wandb")


def test_mlflow_needs_a_tracking_uri(tmp_path, monkeypatch):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "mlflow.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    error = only(document(tmp_path, "telemetry.trackers=[mlflow]"))
    assert about(error) == ("telemetry.trackers", "mlflow")
    assert "telemetry.mlflow.tracking_uri" in error.hint
    assert "MLFLOW_TRACKING_URI" in error.hint
    config = document(tmp_path, "telemetry.trackers=[mlflow]", "telemetry.mlflow.tracking_uri=https://mlflow.example")
    assert find_problems(config, "here") == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    assert find_problems(document(tmp_path, "telemetry.trackers=[mlflow]"), "here") == []


@pytest.mark.parametrize(
    "change",
    [
        "train.cuda_graph=true",
        "train.compile=default",
        "train.fused_kernels=norm",
        "train.fused_kernels=auto",
        "train.channels_last=false",
        "train.deterministic=true",
        "train.precision=fp16",
        "train.precision=bf16-pure",
        "train.all_reduce.algorithm=auto",
        "train.all_reduce.algorithm=ring",
        "train.all_reduce.wire_column=bf16",
        "train.all_reduce.wire_column=int8",
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
    with refused(f"Set {name}=", "train.engine=pytorch", field=name):
        loads("", overrides=["train.engine=jax", change])


@pytest.mark.parametrize("change", ["train.spatial_partitions=[2, 1]", "train.steps_per_call=4"])
def test_what_only_jax_has_is_refused_with_pytorch(change):
    loads("", overrides=["train.engine=jax", "launch.hardware=tpu-v5e-4x4", change])
    with refused("train.engine=jax", field=change.partition("=")[0]):
        loads("", overrides=[change])


def test_rows_of_devices_are_not_rows_of_processes_on_tpus():
    """A process drives all chips of its machine."""
    tpus = ["train.engine=jax", "launch.hardware=tpu-v5e-4x4", "launch.processes=1", "train.all_reduce.row=4"]
    loads("", overrides=tpus)
    with refused(field="train.all_reduce.row", got=4):
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
    """Devices that do not divide the batch are reported once there are devices, processes before."""
    config = document(tmp_path, "train.engine=jax", "launch.processes=1", "train.global_batch=128", change)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert find_problems(config, "here") == []
    if "span" not in change:
        monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
        assert only(config).field == change.partition("=")[0]
    with refused("= 3 x 1", field="train.global_batch", got=128):
        loads("", overrides=["train.engine=jax", "train.global_batch=128", "launch.processes=3"])


def images_in(hint):
    return re.findall("podscale-[a-z-]+", hint)


def test_jax_needs_libtpu_on_a_machine_with_tpus(monkeypatch, tmp_path):
    config = document(tmp_path, "train.engine=jax")
    there = {"jax"}
    monkeypatch.setattr(software, "find_spec", lambda name: name if name in there else None)
    assert find_problems(config, "here") == []  # and no torch
    monkeypatch.setattr(host_info, "tpu_chips", lambda: ["v5e"] * 4)
    assert "libtpu" in only(config).problem
    there.add("libtpu")
    assert find_problems(config, "here") == []
    there.remove("libtpu")
    monkeypatch.setenv("PODSCALE_IMAGE", "podscale-tpu")
    assert images_in(only(config).hint) == ["podscale-tpu"]
    monkeypatch.setenv("PODSCALE_IMAGE", "podscale-base")
    assert images_in(only(config).hint) == ["podscale-base", "podscale-tpu"]
    there.clear()
    error = only(config)
    assert error.field == "train.engine"
    assert "needs jax" in error.problem


@pytest.mark.parametrize(
    ("engine", "image", "suitable"),
    [
        ("jax", "podscale-base:latest", "podscale-tpu or podscale-gpu-jax"),
        ("jax", "localhost:5000/own/podscale-gpu@sha256:00", "podscale-tpu or podscale-gpu-jax"),
        ("pytorch", "podscale-tpu:dev", "podscale-base or podscale-gpu"),
        ("jax", "registry/podscale-tpu", None),
        ("pytorch", "podscale-base:latest", None),
        ("jax", "registry/their-own-jax", None),
    ],
)
def test_an_image_of_ours_without_the_engine(engine, image, suitable):
    changes = ["run.workspace=/workspace", "data.source=digits", "launch.processes=1"]
    config = loads("", overrides=[*changes, f"train.engine={engine}", f"launch.image={image}"])
    problems = [(*about(error), error.hint) for error in find_problems(config, "cluster")]
    assert problems == ([("launch.image", image, f"Set launch.image to {suitable}.")] if suitable else [])


@pytest.mark.parametrize(
    ("engine", "hardware", "image", "suitable"),
    [
        ("pytorch", "nvidia-l4", "podscale-base:1", "podscale-gpu"),
        ("jax", "nvidia-l4", "registry/podscale-tpu:1", "podscale-gpu-jax"),
        ("jax", "tpu-v5e-2x2", "podscale-gpu-jax:1", "podscale-tpu"),
        ("jax", "nvidia-l4", "podscale-gpu-jax:1", None),
        ("pytorch", "nvidia-l4", "podscale-gpu:1", None),
        ("pytorch", "nvidia-l4", "their-own:1", None),
    ],
)
def test_an_image_of_ours_without_the_software_of_the_accelerators(engine, hardware, image, suitable):
    """Training would fail at its start, or run on the CPUs of nodes with accelerators."""
    changes = ["run.workspace=/workspace", "data.source=digits", "launch.processes=1", f"launch.hardware={hardware}"]
    config = loads("", overrides=[*changes, f"train.engine={engine}", f"launch.image={image}"])
    found = [error for error in find_problems(config, "cluster") if error.field == "launch.image"]
    assert [error.hint for error in found] == ([f"Set launch.image to {suitable}."] if suitable else [])
    assert all(hardware[:3] not in error.problem and "launch.hardware" in error.problem for error in found)


def test_jax_needs_its_plugin_on_a_machine_with_gpus(monkeypatch, tmp_path):
    config = document(tmp_path, "train.engine=jax")
    there = {"jax"}
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for module in (software, engine_support):
        monkeypatch.setattr(module, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 2)
    assert "CUDA" in only(config).problem
    there.clear()
    assert "`pip install 'podscale[jax-cuda]'`" in only(config).hint
    there.add("jax")
    monkeypatch.setenv("PODSCALE_IMAGE", "podscale-tpu")
    assert images_in(only(config).hint) == ["podscale-tpu", "podscale-gpu-jax"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert find_problems(config, "here") == []
    monkeypatch.delenv("JAX_PLATFORMS")
    there.add("jax_cuda12_plugin")
    assert find_problems(config, "here") == []


def test_missing_tpus_are_a_problem(monkeypatch, tmp_path):
    config = document(tmp_path, "train.engine=jax", "launch.hardware=tpu-v5e-2x2")
    monkeypatch.setattr(software, "find_spec", lambda name: name)
    assert about(only(config)) == ("launch.hardware", "tpu-v5e-2x2")


def test_the_batch_is_for_devices_not_for_processes(monkeypatch, tmp_path):
    config = document(tmp_path, "train.engine=jax", "train.global_batch=66")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    error = only(config)
    assert about(error) == ("train.global_batch", 66)
    assert "= 4 x 1" in error.problem


def test_a_process_of_jax_alone_on_a_machine_drives_all_of_its_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 4)
    alone = document(tmp_path, "train.engine=jax", "train.global_batch=64", "launch.processes=1")
    each = document(tmp_path, "train.engine=jax", "train.global_batch=64", "launch.processes=4")
    torchs = document(tmp_path, "train.global_batch=64", "launch.processes=1")
    assert [host.local_device_count(one) for one in (alone, each, torchs)] == [4, 0, 0]
