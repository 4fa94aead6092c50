"""From run document to job: counts, resources, the pods' document, and the messages of refused documents."""

import re

import pytest

from podscale.config import RunConfig, TrainSection, loads
from podscale.config.fields import result_field
from podscale.errors import InputError, InputErrors
from podscale.kubernetes.job_spec import METRICS_PORT, build_job_spec, job_identity
from podscale.kubernetes.pod_resources import Amount
from podscale.pipelines import presets
from tests.support.refusals import refused
from tests.support.rendering import TWO, document, spec

EIGHT = ("launch.hardware=nvidia-h100-80gb x8", "launch.processes=8", "launch.nodes=2")


def test_pods_get_a_document_of_their_own() -> None:
    made = spec(*TWO, "launch.backend=pytorchjob", "telemetry.port=9400")
    inside = loads(made.document)
    assert inside.launch.backend == "local"
    assert (inside.telemetry.address, inside.telemetry.port) == ("0.0.0.0", METRICS_PORT)
    assert (inside.launch.nodes, inside.launch.processes) == (2, 1)
    assert inside.train == document("digits").train


def test_processes_default_to_one_for_each_accelerator() -> None:
    assert spec("launch.hardware=nvidia-l4 x4", "launch.processes=0").processes_per_node == 4
    assert spec("launch.hardware=nvidia-l4 x4", "launch.processes=2").processes_per_node == 2
    assert spec("launch.processes=0").processes_per_node == 1
    counted = spec(
        "launch.processes=0", "launch.resources.accelerator=nvidia.com/gpu", "launch.resources.accelerators=2"
    )
    assert (counted.processes_per_node, counted.hardware.resource, counted.hardware.node_selector) == (
        2,
        "nvidia.com/gpu",
        {},
    )


def test_a_process_of_jax_alone_on_a_machine_drives_all_of_its_gpus() -> None:
    machine = ("launch.hardware=nvidia-l4 x4", "train.all_reduce.row=4", "train.all_reduce.algorithm=torus2d")
    assert spec(*machine, "train.engine=jax", "launch.processes=1").processes_per_node == 1
    for changes in (("train.engine=jax", "launch.processes=2"), ("launch.processes=1",)):
        with refused(field="train.all_reduce.row", got=4):
            spec(*machine, *changes)


def test_names_and_stages() -> None:
    assert spec().name == "digits"
    for stage in ("shard", "evaluate", "report"):
        assert spec(stage=stage).name == f"digits-{stage}"
    assert spec("launch.shard_pods=3", stage="shard").nodes == 3
    assert spec(*TWO, stage="evaluate").nodes == 1
    assert spec("launch.shard_pods=3", stage="shard").command[-2:] == ("--of", "3")
    assert spec(stage="shard").command == ("podscale", "shard")


def test_the_identity_covers_exactly_what_changes_the_results() -> None:
    same = {spec(*changes).identity for changes in [(), TWO, ("launch.hardware=nvidia-l4", "launch.processes=1")]}
    assert len(same) == 1
    others = [
        spec("train.epochs=3").identity,
        spec(stage="evaluate").identity,
        build_job_spec(document("digits"), "train", "/workspace/other").identity,
    ]
    assert len({*same, *others}) == 4
    assert re.fullmatch(r"[0-9a-f]{64}", spec().identity)


def test_an_option_that_comes_later_keeps_the_identity_of_a_job() -> None:
    class NewerSection(TrainSection):
        later: int = result_field(3, "Option of a newer version.")

    class NewerConfig(RunConfig):
        train: NewerSection = NewerSection()

    def identity(config: RunConfig) -> str:
        return job_identity(config, "train", "/workspace/shards")

    assert identity(NewerConfig()) == identity(RunConfig())
    assert identity(NewerConfig.model_validate({"train": {"later": 4}})) != identity(RunConfig())


def test_resources_default_to_the_share_of_the_hardware() -> None:
    asked = spec(*EIGHT, preset="mlperf-8xh100").resources
    assert (asked.cpus, asked.memory_gib, asked.accelerators) == (96, 512, 8)
    share = spec(*EIGHT, "launch.resources.cpus=0", "launch.resources.memory_gib=0", preset="mlperf-8xh100").resources
    assert 150 < share.cpus < 208
    assert 1400 < share.memory_gib < 1872
    assert share.request == Amount(share.cpus, share.memory_gib)
    unknown = ("launch.resources.accelerator=example.com/gpu", "launch.resources.accelerators=2", "launch.processes=2")
    assert spec(*unknown).resources.request == Amount(0, 0), "no request on accelerators without a known machine"


def test_resources_on_cpus_grow_with_the_processes() -> None:
    one, four = (spec(f"launch.processes={count}").resources for count in (1, 4))
    assert (four.request.cpus, four.request.memory_gib) == (4 * one.request.cpus, 4 * one.request.memory_gib)
    assert four.cpus == 4 * one.cpus
    cached = spec("launch.processes=1", "input.decoded_cache_bytes=7516192768").resources
    assert cached.request.memory_gib == one.request.memory_gib + 8  # 7 and its page table
    assert cached.memory_gib == one.memory_gib + 8
    workers = spec("launch.shard_workers=16", stage="shard").resources
    assert workers.cpus == 4 * spec("launch.shard_workers=4", stage="shard").resources.cpus


def test_shared_memory_holds_the_batches_in_flight() -> None:
    needed = 8 * (2 + 12) * 204 * 3 * 224**2 / 2**30  # processes x (prefetch + workers) x images of a rank x bytes
    assert spec(*EIGHT, preset="mlperf-8xh100").resources.shm_gib >= 2 * needed
    assert spec("launch.resources.shm_gib=5").resources.shm_gib == 5


def test_remote_shards_are_kept_on_the_nodes_disk() -> None:
    made = build_job_spec(document("digits", "input.cache_bytes=21474836480"), "train", "gs://bucket/shards")
    assert made.cache_path == "/cache"
    assert made.resources.cache_gib == 20
    assert loads(made.document).input.cache_dir == "/cache"
    assert spec().cache_path is None
    assert spec("run.workspace=file:///workspace").cache_path is None
    assert spec("launch.cluster.local_ssd=true").cache_path == "/cache"


def test_tpu_slices_determine_the_number_of_pods() -> None:
    tpu = ("launch.processes=1", "train.global_batch=512")
    assert spec("launch.hardware=tpu-v5e-4x4", *tpu).nodes == 4
    slices = spec("launch.hardware=tpu-v5e-4x4", "launch.cluster.slices=2", *tpu)
    assert (slices.nodes, slices.slices, slices.security_mode) == (8, 2, "privileged")
    assert spec("launch.hardware=tpu-v5e-4x4", *tpu, stage="evaluate").nodes == 4
    assert spec("launch.hardware=tpu-v5e-4x4", *tpu, stage="report").nodes == 1


def test_gpudirect_is_used_if_required_or_allowed() -> None:
    assert spec(*EIGHT, preset="mlperf-8xh100").gpudirect is None
    assert spec(*EIGHT, "launch.cluster.network=gpudirect", preset="mlperf-8xh100").gpudirect == "tcpx"
    assert spec(*EIGHT, "launch.cluster.security=privileged", preset="mlperf-8xh100").gpudirect == "tcpx"
    plain = spec(*EIGHT, "launch.cluster.security=privileged", "launch.cluster.network=plain", preset="mlperf-8xh100")
    assert plain.gpudirect is None


@pytest.mark.parametrize(
    ("changes", "field", "got", "says"),
    [
        (("run.workspace=.",), "run.workspace", ".", "/workspace"),
        (("launch.cluster.workspace_claim=null",), "run.workspace", "/workspace", "launch.cluster.workspace_claim"),
        (
            (
                "launch.cluster.workspace_claim=null",
                "launch.cluster.volumes=[{path: /workspace, claim: c, read_only: true}]",
            ),
            "run.workspace",
            "/workspace",
            "read-only",
        ),
        (
            ("launch.cluster.volumes=[{path: /workspace, claim: other}]",),
            "launch.cluster.volumes",
            "/workspace",
            "workspace_claim",
        ),
        (("run.workspace=gs://bucket",), ..., ..., "run.workspace"),
        (("launch.hardware=nvidia-l4", "launch.resources.cpus=12"), "launch.resources.cpus", 12, "0; 10"),
        (
            ("launch.hardware=nvidia-l4", "launch.resources.memory_gib=64"),
            "launch.resources.memory_gib",
            64,
            "0; 40",
        ),
        (("launch.hardware=nvidia-l4",), "launch.processes", 2, "nvidia-l4 x1"),
        (("launch.hardware=tpu-v5e-4x4",), "launch.processes", 2, "TPU"),
        (
            ("launch.hardware=tpu-v5e-4x4", "launch.processes=1", "launch.nodes=2"),
            "launch.nodes",
            2,
            "1 x tpu-v5e-4x4; 4 machines",
        ),
        (("launch.cluster.slices=2",), "launch.cluster.slices", 2, ""),
        (("launch.resources.memory_gib=1",), "launch.resources.memory_gib", 1, "takes 2"),
        (
            ("launch.resources.memory_gib=8", "input.decoded_cache_bytes=7516192768"),
            "launch.resources.memory_gib",
            8,
            "2 processes; 14.1 ",
        ),
        (("launch.cluster.network=gpudirect",), "launch.cluster.network", "gpudirect", "launch.hardware"),
        (("launch.cluster.volumes=[{path: /n, nfs: 'host:/export'}]",), "launch.cluster.volumes", "/n", "NFS"),
        (("launch.nodes=3", "launch.processes=1"), "train.global_batch", 64, "3 x 1"),
        (
            ("launch.nodes=4", "launch.processes=1", "input.order=blocked", "input.groups=2"),
            ...,
            ...,
            "input.groups; 4, 8, 16, 32; 64",
        ),
        (
            ("launch.nodes=4", "launch.processes=1", "launch.cluster.min_nodes=2"),
            "train.global_batch",
            64,
            "3 of launch.nodes=4",
        ),
        (("launch.hardware=nvidia-h10",), ..., ..., "nvidia-h100-80gb"),
    ],
)
def test_an_invalid_job_is_refused_before_anything_is_submitted(
    changes: tuple[str, ...], field: object, got: object, says: str
) -> None:
    with pytest.raises(InputError) as caught:
        spec(*changes)
    errors = caught.value.errors if isinstance(caught.value, InputErrors) else [caught.value]
    (error,) = [error for error in errors if field in (..., error.field)]
    assert got in (..., error.got)
    assert all(part in str(error) for part in says.split("; ")), str(error)


def test_all_problems_are_reported_at_once() -> None:
    with refused("\n  - ", kind=InputErrors) as refusal:
        spec("launch.hardware=nvidia-l4", preset="mlperf-8xh100")
    keys = {"launch.resources.cpus", "launch.resources.memory_gib", "launch.processes"}
    assert isinstance(refusal.error, InputErrors)
    assert {error.field for error in refusal.error.errors} == keys
    assert refusal.text.count("\n  - ") == 3


def test_files_that_pods_read_must_be_on_a_volume() -> None:
    with refused("launch.cluster.volumes", field="data.source", got="/data/ILSVRC2012"):
        spec(preset="goyal2017-8k", stage="shard")
    assert spec("launch.cluster.volumes=[{path: /data, bucket: b}]", preset="goyal2017-8k", stage="shard").nodes == 1
    with refused("launch.cluster.volumes", field="shard set", got="/shards"):
        build_job_spec(document("digits"), "train", "/shards")
    with refused(field="shard set", got="file:///shards"):
        build_job_spec(document("digits"), "train", "file:///shards")
    with refused(field="data.source", got="file:///images"):
        spec("data.source=file:///images", stage="shard")
    assert build_job_spec(document("digits"), "train", "s3://bucket/shards").nodes == 1
    assert build_job_spec(document("digits", "run.workspace=."), "train", mounted=False).nodes == 1


def test_a_document_that_no_variable_can_hold_is_refused() -> None:
    classes = ", ".join(f"{number:0>40}x" for number in range(4000))
    with refused("data.classes", field="run document"):
        spec(f"data.classes=[{classes}]")


@pytest.mark.parametrize("name", presets.preset_names())
def test_every_preset_is_a_job(name: str) -> None:
    launch = document(name).launch
    assert spec(preset=name).world_size == launch.nodes * max(1, launch.processes)
