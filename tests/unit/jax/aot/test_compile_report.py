"""`podscale tpu compile` without a TPU compiler: topologies, bounds, cached results, failures, the sweep."""

import gzip
import importlib.util
import json
from dataclasses import replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import podscale
from podscale.cli import main
from podscale.config import RunConfig
from podscale.errors import ABSENT, InputError, PodscaleError
from podscale.hardware import TPU_CHIPS, TPU_KINDS, find_topology
from podscale.jax.aot import batch_search
from podscale.jax.aot import request as jax_request
from podscale.jax.aot.batch_search import (
    FitResult,
    allowed_batches,
    find_largest_batch,
    largest_known_batch,
    with_batch,
)
from podscale.jax.aot.compile_report import (
    DeviceWork,
    StepBounds,
    build_report,
    compute_bounds,
    estimate_step_seconds,
    format_compile_report,
    format_sweep_report,
    step_rates,
)
from podscale.jax.aot.request import CompileRequest, CompileResult, compile_aot
from podscale.jax.out_of_memory import OutOfMemory, parse_out_of_memory
from tests.support.golden import assert_golden
from tests.support.outcomes import assert_error
from tests.support.refusals import refused

PAGE = Path(__file__).with_suffix(".txt")
GIB = 2**30
V5E = find_topology("v5e:4x4")


def document(**values: Any) -> RunConfig:
    train = {"global_batch": 2048, "precision": "bf16", **values}
    return RunConfig.model_validate({"train": train, "model": {"name": "resnet18"}})


REQUEST = CompileRequest(document(), V5E, classes=1000, steps=100)
FOUND: dict[str, Any] = {
    "mesh": {"slice": 1, "column": 4, "row": 4, "group_column": 1, "group_row": 1, "height": 1, "width": 1},
    "fits": True,
    "memory": {"needed": 3 * GIB, "arguments": GIB, "outputs": GIB, "aliased": GIB, "temporaries": 2 * GIB, "code": 0},
    "flops": 1.97e12,
    "bytes": 8.19e9,
    "optimal_seconds": -60.9,
    "trace_seconds": 1.0,
    "compile_seconds": 200.0,
    "cpu_seconds": 150.0,
}
TEXT = """  %a = f32[1048576]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  %copy.1 = f32[8]{0} copy(%a), backend_config={"window_config":{"estimated_cycles":"940000"}}
  %fusion = f32[8]{0} fusion(%copy.1), backend_config={"window_config":{"estimated_cycles":"2820000"}}
"""
VERSIONS = {"jax": "1", "jaxlib": "2", "libtpu": "3"}


# topologies


@pytest.mark.parametrize(
    ("name", "slices", "chips", "devices", "gib"),
    [
        ("v3:32x32", 1, 1024, 2048, 16),
        ("v4:16x16x16", 1, 4096, 4096, 32),
        ("v5e:16x16", 2, 512, 512, 16),
        ("tpu-v5e-4x4", 1, 16, 16, 16),
        ("v5p:8x8x16", 1, 1024, 1024, 96),
        (" V6E:1x1 ", 1, 1, 1, 32),
        ("tpu7x-2x2x1", 1, 4, 8, 96),
    ],
)
def test_a_topology_has_the_devices_that_the_compiler_describes(
    name: str, slices: int, chips: int, devices: int, gib: int
) -> None:
    report = find_topology(name, slices)
    assert (report.chip_count, report.device_count, report.device_hbm_bytes) == (chips, devices, gib * GIB)
    assert 0.9 * report.device_hbm_bytes < report.device_available_bytes < report.device_hbm_bytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v5e:3x3", "It has 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"),
        ("v4:4x4x6", "multiples of 4 up to 4096 chips"),
        ("v7x:2x2x1", "; tpu7x: 1x1x1, 2x2x1"),
        ("4x4", "v5e:4x4"),
        ("v3:16x8", "It has 2x2, 4x4, 4x8, 8x8, 8x16, 16x16, 16x32, 32x32"),
    ],
)
def test_the_error_of_an_unknown_topology_lists_the_known_ones(name: str, expected: str) -> None:
    with refused(expected, field="--topology", got=name):
        find_topology(name)


def test_every_tpu_of_a_cluster_can_be_compiled_for() -> None:
    kinds = [chip.kind for chip in TPU_CHIPS]
    assert [kind for kind in kinds if kind is not None] == list(TPU_KINDS)
    for kind in TPU_KINDS:
        for sides in kind.smallest_topologies:
            assert find_topology(f"{kind.name}-{sides}").chip.kind is kind
    with refused(field="--slices", got=0):
        find_topology("v5e:4x4", 0)


# bounds and estimates


def test_bounds_are_work_over_peaks_of_a_device() -> None:
    work = DeviceWork(flops=61.5e12, bytes=450e9, bytes_sent=166e9, bytes_between_slices=0)
    assert compute_bounds(work, find_topology("v3:4x4"), "bf16") == StepBounds(1.0, 1.0, 1.0, 0.0), "half a chip each"
    two = compute_bounds(DeviceWork(0, 0, 0, bytes_between_slices=3.125e9), find_topology("v5e:4x4", 2), "bf16")
    assert (two.network, two.binding, two.seconds) == (1.0, "network", 1.0)
    assert compute_bounds(work, find_topology("v3:4x4"), "fp32").compute == 6.0, "an exact product takes six of bf16"


def test_the_cost_model_is_used_unless_it_is_impossible() -> None:
    bounds = StepBounds(compute=0.010, memory=0.050, links=0.001, network=0.0)
    assert bounds.binding == "memory"
    assert estimate_step_seconds(0.040, bounds) == (0.040, "cost model"), (
        "below the memory bound, which may be too high"
    )
    for nonsense in (-60.9, 0.0, 0.009, None):
        assert estimate_step_seconds(nonsense, bounds) == (0.050, "roofline")
    largest_text = step_rates(0.5, 1000, DeviceWork(flops=49.25e12, bytes=0, bytes_sent=0, bytes_between_slices=0), V5E)
    assert largest_text == {"images_per_second": 2000.0, "peak_share": pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (24.60G) "
            "exceeds available HBM (15.75G).",
            OutOfMemory(round(24.6 * GIB), round(15.75 * GIB)),
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.56G "
            "of 15.48G hbm. Exceeded hbm capacity by 2.08G.",
            OutOfMemory(round(17.56 * GIB), round(15.48 * GIB)),
        ),
        ("INTERNAL: Mosaic failed to compile", None),
    ],
)
def test_the_compilers_out_of_memory_messages_are_parsed(message: str, expected: OutOfMemory | None) -> None:
    assert parse_out_of_memory(message) == expected


# reports


def test_report_of_a_step_that_fits() -> None:
    report = build_report(REQUEST, CompileResult(FOUND, TEXT, VERSIONS))
    assert (report["memory"]["available"], report["memory"]["free"]) == (15.75 * GIB, 12.75 * GIB)
    assert report["bound_seconds"]["compute"] == pytest.approx(0.010)
    assert (report["step_seconds"], report["step_source"]) == (pytest.approx(0.010), "roofline")
    assert report["images_per_second"] == pytest.approx(204_800)
    assert report["collectives"][0]["bytes"] == 4 * 2**20
    assert json.loads(json.dumps(report)) == report
    request = replace(REQUEST, topology=find_topology("v3:4x4"))
    v3 = build_report(request, CompileResult(FOUND, TEXT, VERSIONS))
    assert (v3["cycles"], v3["cycle_seconds"], report["cycle_seconds"]) == (3_760_000, pytest.approx(0.004), None)
    assert v3["copy_cycles"] == 940_000
    v3["largest"] = largest_known_batch(request, {64: needing(3)})
    assert_golden(PAGE, "\n".join([*format_compile_report(v3), ""]))


def test_report_of_a_step_that_does_not_fit() -> None:
    short = {**FOUND, "fits": False, "memory": {"needed": 18 * GIB, "available": 15 * GIB}}
    report = build_report(REQUEST, CompileResult(short, "", VERSIONS))
    assert (report["memory"]["over"], "step_seconds" in report) == (3 * GIB, False)
    (line,) = lines_of(report, "memory")
    for number in ("NOT FIT", "18.0 GiB", "15.0 GiB", "16.0 GiB", "3.0 GiB"):
        assert number in line
    fits = build_report(with_batch(REQUEST, 64), CompileResult(FOUND, TEXT, VERSIONS))
    table = format_sweep_report([report, fits], 64)
    assert [line.split()[:2] for line in table[1:3]] == [["64", "1,024"], ["128", "2,048"]]
    assert "64 images a device" in table[-1]
    shared = {**fits, "topology": {**fits["topology"], "mesh": {**FOUND["mesh"], "height": 2}}}
    assert "1 image for each 2 devices" in format_sweep_report([shared], 1)[-1]


def lines_of(report: dict[str, Any], name: str) -> list[str]:
    """Return the lines of a row of the printed report: none if it is not there."""
    lines = "\n".join(format_compile_report(report)).splitlines()
    start = next((number for number, line in enumerate(lines) if line.split(" ")[0] == name), len(lines))
    rest = takewhile(lambda line: line.startswith(" "), lines[start + 1 :])
    return [*lines[start : start + 1], *rest]


# the largest batch, without a sweep


def needing(gib: float, available: float | None = None) -> dict[str, Any]:
    """Return a result of the compiler: with the parts of the memory if it fits, else with the available memory."""
    if available is None:
        return {"fits": True, "memory": {"needed": gib * GIB, "arguments": 1 * GIB, "temporaries": (gib - 1) * GIB}}
    return {"fits": False, "memory": {"needed": gib * GIB, "available": available * GIB}}


@pytest.mark.parametrize(
    ("results", "batch", "basis", "images", "of"),
    [
        ({128: needing(3)}, 944, "proportion", 944, [128]),  # 2 GiB for 128, 14.75 of the 15.75 GiB for 944
        ({16: needing(15.5)}, 16, "proportion", 16, [16]),
        ({128: needing(18, 15)}, 104, "proportion", 106, [128]),
        ({4: needing(40, 8)}, 0, "proportion", 0, [4]),
        ({16: needing(2), 128: needing(3), 256: needing(4)}, 1760, "line", 1760, [128, 256]),
        ({96: needing(14), 128: needing(15, 15)}, 120, "line", 127, [96, 128]),  # the compiler rounds its numbers
        ({64: needing(2), 128: needing(3), 512: needing(18, 15)}, 432, "line", 435, [128, 512]),
        ({128: needing(18, 15), 256: needing(30, 15)}, 96, "line", 96, [128, 256]),
        ({1: needing(3), 2: needing(3)}, 8, "proportion", 14, [2]),  # rows of a tile are padded
        ({96: needing(14), 128: needing(15.5, 15)}, 112, "line", 117, [96, 128]),
        ({96: needing(14), 104: needing(15.5, 15)}, 96, "compiled", 96, [96, 104]),
        ({100: needing(14), 104: needing(15.5, 15)}, 100, "compiled", 100, [100, 104]),
        ({4096: needing(3)}, 4096, "compiled", 4096, [4096]),
        ({1: needing(17, 15), 128: needing(170, 15)}, 0, "compiled", 0, [1]),
        ({96: needing(15.2), 128: needing(15.3, 15.0)}, 96, "line", 96, [96, 128]),  # by the line, not even 96
    ],
)
def test_the_largest_batch_by_known_results(
    results: dict[int, Any], batch: int, basis: str, images: int, of: list[int]
) -> None:
    want = {"batch": batch, "global_batch": 16 * batch, "basis": basis, "images": images, "of": of}
    assert largest_known_batch(REQUEST, results) == want


def test_an_estimate_is_a_batch_that_the_document_allows() -> None:
    """Batch-norm statistics over 256 images allow 1,024 images for each rank, but not 944."""
    spans = RunConfig.model_validate({"train": {"global_batch": 2048}, "model": {"batch_norm": {"span": 256}}})
    report = largest_known_batch(replace(REQUEST, config=spans), {128: needing(3)})
    assert (report["batch"], report["images"]) == (768, 944)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4000), st.floats(0, 8), st.floats(0.001, 2))
def test_two_batches_determine_the_largest_if_memory_is_linear(limit: int, fixed: float, each: float) -> None:
    """One batch underestimates if it fits and overestimates if not. No estimate contradicts a compiled result."""
    memory = fixed + each * (limit + 0.5)
    small = replace(REQUEST, topology=replace(V5E, chip=replace(V5E.chip, available_gib=memory)))

    def result(batch: int) -> dict[str, Any]:
        needed, temporaries = (fixed + each * batch) * GIB, (fixed / 2 + each * batch) * GIB
        if needed <= memory * GIB:
            return {"fits": True, "memory": {"needed": needed, "temporaries": temporaries}}
        return {"fits": False, "memory": {"needed": needed, "available": memory * GIB}}

    report = largest_known_batch(small, {batch: result(batch) for batch in (64, 128)})
    assert (report["basis"], report["images"]) == ("line", pytest.approx(limit, abs=1))
    for batch in (8, 1024):
        alone = largest_known_batch(small, {batch: result(batch)})["images"]
        assert min(batch, limit) <= alone + 1
        assert alone <= max(batch, limit)


def test_the_report_states_the_largest_batch_and_its_basis() -> None:
    report = build_report(REQUEST, CompileResult(FOUND, TEXT, VERSIONS))
    short = build_report(
        REQUEST, CompileResult({**FOUND, "fits": False, "memory": needing(18, 15)["memory"]}, "", VERSIONS)
    )
    assert lines_of(report, "largest") == []

    def largest(results: dict[int, Any], own: dict[str, Any] = report) -> list[str]:
        return lines_of({**own, "largest": largest_known_batch(REQUEST, results)}, "largest")

    answer, basis = largest({128: needing(3)})
    for part in ("944 images a device", "15,104", "ESTIMATE", "--sweep batch"):
        assert part in answer
    assert "944 " in basis
    answer, basis = largest({128: needing(3), 256: needing(4)})
    for part in ("1,760 ", " 128 ", " 256;"):
        assert part in basis
    (compiled,) = largest({96: needing(14), 104: needing(15.5, 15)})
    for part in ("96 images a device", "1,536", " 104 "):
        assert part in compiled
    assert "--sweep" not in compiled
    (alone,) = largest({4096: needing(3)})
    assert "4,096 images a device" in alone
    answer, _ = largest({4: needing(40, 8)}, short)
    assert "image a device" not in answer
    assert "ESTIMATE" in answer
    (none,) = largest({1: needing(17, 15)}, short)
    assert "1 image a device" in none
    assert "ESTIMATE" not in none
    shared = {**report, "topology": {**report["topology"], "mesh": {**FOUND["mesh"], "height": 2, "width": 2}}}
    assert "944 images for each 4 devices" in largest({128: needing(3)}, shared)[0]


# cached results, and failures of the child process

CHILD = """import json, os, pathlib, signal, sys, time, gzip
folder = pathlib.Path(sys.argv[1])
job = json.loads((folder / "job.json").read_text())
assert os.environ["JAX_PLATFORMS"] == "cpu" and os.environ["TPU_SKIP_MDS_QUERY"] == "1"
way = job["document"]["run"]["id"]
if way == "crash":
    print("stack of the compiler", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
if way == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if way == "slow":
    time.sleep(600)
if way == "fails":
    sys.exit("INTERNAL: something odd")
if way == "raises":
    import jax
    jax.jit(lambda x: jax.numpy.dot(x, x))(jax.numpy.ones((2, 3)))
(folder / "program.hlo.gz").write_bytes(gzip.compress(b"text of " + job["topology"].encode()))
refusal = {"problem": "no LAMB here", "field": "train.optimizer.name"}
found = {"refused": refusal} if way == "refused" else {"classes": job["classes"]}
(folder / "result.json").write_text(json.dumps(found))
with open(os.environ["COUNT"], "a") as file:
    file.write("x")
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the compiler process by one that behaves as the run's id says. Returns the file that counts its calls."""
    (tmp_path / "ahead_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COUNT", str(tmp_path / "count"))
    monkeypatch.setattr(jax_request, "COMPILER_MODULE", "ahead_child")
    monkeypatch.setattr(jax_request, "compiler_versions", lambda: VERSIONS)
    return tmp_path / "count"


def named(name: str) -> CompileRequest:
    run = REQUEST.config.run.model_copy(update={"id": name})
    return replace(REQUEST, config=REQUEST.config.model_copy(update={"run": run}))


def test_a_result_is_cached(child: Path, tmp_path: Path) -> None:
    first = compile_aot(REQUEST, tmp_path / "kept", 60.0)
    assert (first.analysis, first.text, first.from_cache) == ({"classes": 1000}, "text of v5e:4x4", False)
    again = compile_aot(named("other-run"), tmp_path / "kept", 60.0)
    assert (again.analysis, again.text, again.from_cache) == (first.analysis, first.text, True)
    other = compile_aot(replace(REQUEST, classes=10), tmp_path / "kept", 60.0)
    assert (other.analysis, other.from_cache) == ({"classes": 10}, False)
    assert child.read_text() == "xx"


def test_every_option_that_changes_the_program_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_request, "compiler_versions", lambda: VERSIONS)
    others = [
        replace(REQUEST, classes=10),
        replace(REQUEST, steps=10**6),
        replace(REQUEST, topology=find_topology("v5e:4x4", 2)),
        replace(REQUEST, topology=find_topology("v6e:4x4")),
        *(
            replace(REQUEST, config=document(**change))
            for change in (
                {"global_batch": 4096},
                {"precision": "fp32"},
                {"weight_update": "sharded"},
                {"all_reduce": {"algorithm": "torus2d"}},
                {"optimizer": {"name": "lars"}},
                {"stem_compute": "space_to_depth"},
                {"phases": [{"start": 1, "global_batch": 4096}]},
                {"phases": [{"start": 1, "batch_norm_momentum": 0.5}]},
            )
        ),
    ]
    keys = [one.cache_key for one in [REQUEST, *others]]
    assert len(set(keys)) == len(keys)
    alike = document(epochs=3.0, schedule={"learning_rate": 7.0, "warmup_epochs": 0.0}, target_top1=0.5)
    assert replace(REQUEST, config=alike, steps=1).cache_key == REQUEST.cache_key
    rates = document(phases=[{"start": 1, "schedule": {"learning_rate": 7.0}}])
    assert replace(REQUEST, config=rates).cache_key == REQUEST.cache_key
    flags = jax_request.xla_environment("tpu", {})["LIBTPU_INIT_ARGS"]
    with monkeypatch.context() as changed:
        own = [flags, flags.replace("true", "false")]  # users who set every flag themselves
        keys_of_flags = []
        for value in own:
            changed.setenv("LIBTPU_INIT_ARGS", value)
            keys_of_flags.append(replace(REQUEST).cache_key)
    assert keys_of_flags[0] == REQUEST.cache_key
    assert keys_of_flags[1] not in keys
    monkeypatch.setattr(jax_request, "compiler_versions", lambda: {**VERSIONS, "libtpu": "4"})
    assert replace(REQUEST).cache_key != REQUEST.cache_key
    monkeypatch.setattr(jax_request, "source_hash", lambda: "other")
    assert replace(REQUEST).cache_key not in keys


def test_the_key_covers_the_modules_of_the_step_only() -> None:
    names = {f"{path.parent.name}/{path.name}" for path in jax_request._source_modules()}
    step = {"jax/train_step.py", "jax/mesh.py", "optim/lars.py", "jax/all_reduce.py", "jax/batch_norm.py"}
    assert {*step, "aot/compiler.py", "models/branches.py", "config/ranks.py"} <= names
    assert not {"aot/compile_report.py", "aot/hlo.py", "jax/worker.py", "jax/world.py"} & names


def test_the_key_covers_the_constants_that_both_engines_share() -> None:
    root, covered = Path(podscale.__file__).parent, {*jax_request._source_modules()}
    imported = {name for path in covered if root / "jax" in path.parents for name in jax_request._imports(path)}
    paths = {root.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in imported}
    shared = {path for path in paths if path.is_file() and path.parent in (root / "training", root / "models")}
    assert root / "training" / "shampoo.py" in shared
    assert shared - covered == {root / "training" / "step_timer.py"}, "times, which change no program"


def test_a_pattern_of_the_key_that_matches_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_request, "FRAMEWORK_FREE", (*jax_request.FRAMEWORK_FREE, "gone/*.py"))
    with pytest.raises(AssertionError, match="gone"):
        jax_request._source_modules()


@pytest.mark.parametrize(
    ("name", "kind", "field", "got", "printed"),
    [
        ("refused", InputError, "train.optimizer.name", ABSENT, "no LAMB here"),
        ("crash", PodscaleError, "v5e:4x4", "SIGSEGV", "stack of the compiler"),
        ("killed", PodscaleError, "v5e:4x4", "SIGKILL", "memory"),
        ("fails", PodscaleError, "v5e:4x4", ABSENT, "INTERNAL: something odd"),
        ("raises", PodscaleError, "v5e:4x4", ABSENT, "TypeError: dot_general requires contracting"),
    ],
)
def test_a_compiler_that_fails_is_one_clear_error(
    child: Path, tmp_path: Path, name: str, kind: type[PodscaleError], field: str, got: object, printed: str
) -> None:
    for _ in range(2):  # a failure is not cached
        with refused(printed, field=field, got=got, kind=kind):
            compile_aot(named(name), tmp_path / "kept", 60.0)
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_compilation_has_a_time_limit(child: Path, tmp_path: Path) -> None:
    with refused("1 s", "--time-limit", field="v5e:4x4", kind=PodscaleError):
        compile_aot(named("slow"), tmp_path / "kept", 1.0)


def test_a_cache_that_cannot_be_created_is_an_error(child: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(field="--cache", got=str(tmp_path / "file" / "kept")):
        compile_aot(REQUEST, tmp_path / "file" / "kept", 60.0)


# the command line


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed here")
def test_without_the_tpu_compiler_the_message_names_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["tpu", "compile", "digits", "--topology", "v5e:2x2"])
    assert_error(code, capsys.readouterr().err, "podscale[tpu]", "libtpu")


@pytest.mark.parametrize(
    ("arguments", "field", "says"),
    [
        ([], "launch.hardware", ["None", "--topology"]),
        (["--set", "launch.hardware=h100"], "launch.hardware", ["h100", "--topology"]),
        (["--topology", "v5e:5x5"], "", ["v5e", "4x4"]),
        (["--topology", "v5e:4x4", "--sweep", "layers"], "--sweep", ["layers", "batch"]),
    ],
)
def test_wrong_options(arguments: list[str], field: str, says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert_error(main(["tpu", "compile", "digits", *arguments]), capsys.readouterr().err, *says, field=field)


def test_the_command_reports_cached_results(
    child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """launch.hardware and launch.cluster.slices replace the options; --json prints the report's values."""
    from podscale.cli.tpu import build_compile_request

    changes = ["launch.hardware=tpu-v5e-4x4", "launch.cluster.slices=2", "launch.backend=jobset"]
    asked = [word for change in changes for word in ("--set", change)]
    arguments = ["tpu", "compile", "digits", *asked, "--cache", str(tmp_path)]
    from podscale import config
    from podscale.pipelines import presets

    request = build_compile_request(config.load(presets.resolve_preset("digits"), changes), find_topology("v5e:4x4", 2))
    mesh = {**FOUND["mesh"], "slice": 2}
    (tmp_path / f"{request.cache_key}.json").write_text(json.dumps({**FOUND, "mesh": mesh}))
    (tmp_path / f"{request.cache_key}.hlo.gz").write_bytes(gzip.compress(TEXT.encode()))
    assert main([*arguments, "--json"]) == 0
    largest_text = json.loads(capsys.readouterr().out)
    assert largest_text["topology"]["name"] == "v5e:4x4 x2"
    assert (largest_text["classes"], largest_text["batch"], largest_text["from_cache"]) == (
        10,
        request.config.train.global_batch // 32,
        True,
    )
    assert main(arguments) == 0
    assert "v5e:4x4 x2: 32 chips, 32 devices" in capsys.readouterr().out
    assert largest_text["largest"]["basis"] == "proportion"
    larger = with_batch(request, 1024)
    memory = {**FOUND["memory"], "needed": 10 * GIB, "temporaries": 9 * GIB}
    (tmp_path / f"{larger.cache_key}.json").write_text(json.dumps({**FOUND, "mesh": mesh, "memory": memory}))
    (tmp_path / f"{larger.cache_key}.hlo.gz").write_bytes(gzip.compress(TEXT.encode()))
    assert main(arguments) == 0
    assert f" {request.batch} and 1024;" in capsys.readouterr().out
    short = {**FOUND, "mesh": mesh, "fits": False, "memory": {"needed": 18 * GIB, "available": 15 * GIB}}
    (tmp_path / f"{request.cache_key}.json").write_text(json.dumps(short))
    (tmp_path / f"{larger.cache_key}.json").unlink()
    code, printed = main([*arguments, "--json"]), capsys.readouterr()
    assert json.loads(printed.out)["memory"]["over"] == 3 * GIB
    assert_error(code, printed.err, "3.0 GiB", "v5e:4x4 x2", field="train.global_batch")
    assert not child.exists(), "nothing was compiled"


def test_of_a_run_by_phases_the_report_has_which_batch_was_compiled(
    child: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest pass; it does not fit, and the error names the option of its phase."""
    from podscale import config
    from podscale.cli.tpu import build_compile_request
    from podscale.pipelines import presets

    phases = "train.phases=[{start: 1, global_batch: 1024}, {start: 2, global_batch: 2048, accumulation: 4}]"
    changes = ["launch.hardware=tpu-v5e-4x4", "launch.backend=jobset", "train.global_batch=256", phases]
    request = build_compile_request(config.load(presets.resolve_preset("digits"), changes), find_topology("v5e:4x4", 1))
    assert request.config.train.global_batch == 1024
    short = {**FOUND, "fits": False, "memory": {"needed": 18 * GIB, "available": 15 * GIB}}
    (tmp_path / f"{request.cache_key}.json").write_text(json.dumps(short))
    (tmp_path / f"{request.cache_key}.hlo.gz").write_bytes(gzip.compress(TEXT.encode()))
    asked = [word for change in changes for word in ("--set", change)]
    arguments = ["tpu", "compile", "digits", *asked, "--cache", str(tmp_path)]
    code, printed = main([*arguments, "--json"]), capsys.readouterr()
    rows = json.loads(printed.out)["phases"]
    assert [(row["epoch"], row["global_batch"], row["accumulation"]) for row in rows] == [
        (0, 256, 1),
        (1, 1024, 1),
        (2, 2048, 4),
    ]
    assert [row["compiled"] for row in rows] == [False, True, False]
    assert_error(code, printed.err, field="train.phases.0.global_batch")
    main(arguments)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("phases "))
    assert all(f"{batch:,}" in line for batch in (256, 1024, 2048))
    assert not child.exists(), "nothing was compiled"


@pytest.mark.parametrize(
    ("preset", "field"),
    [
        ("kumar2019-32k", None),  # its loader and CUDA graph are options of PyTorch only
        ("adya2018-65k", None),
        ("rsb-a2", "train.loss"),
        ("torchvision-v2", "train.ema.decay"),
    ],
)
def test_a_step_that_the_jax_engine_does_not_have_is_not_compiled_as_another(preset: str, field: str | None) -> None:
    from podscale import config
    from podscale.cli.tpu import build_compile_request
    from podscale.pipelines import presets

    document = config.load(presets.resolve_preset(preset), [] if field else ["train.all_reduce.overlap=false"])
    if field is None:
        assert build_compile_request(document, V5E).config.train.engine == "jax"
        return
    with refused(f"{field}=", field=field):
        build_compile_request(document, V5E)


# the sweep


def test_only_batches_that_the_document_allows_are_tried() -> None:
    spans = RunConfig.model_validate({"train": {"global_batch": 2048}, "model": {"batch_norm": {"span": 256}}})
    assert allowed_batches(replace(REQUEST, config=spans))[:8] == [16, 32, 64, 128, 256, 512, 768, 1024]
    assert allowed_batches(REQUEST)[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24]


def test_devices_that_share_images_are_one_rank() -> None:
    shared = replace(REQUEST, config=document(engine="jax", spatial_partitions=(2, 2), global_batch=64))
    assert (shared.ranks, shared.batch) == (4, 16)
    larger = with_batch(shared, 8)
    assert (larger.config.train.global_batch, larger.steps) == (32, 200), "half the batch, twice the steps"


@cache
def allowed_for_the_request() -> list[int]:
    return allowed_batches(REQUEST)


def allowed_for_any(request: CompileRequest) -> list[int]:
    """Stand in for `allowed_batches`, which looks at 519 batches: they are the same for every batch of a request."""
    return allowed_for_the_request()


@mock.patch.object(batch_search, "allowed_batches", allowed_for_any)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 5000), st.floats(0, 8), st.floats(0.001, 2), st.sampled_from([1, 8, 104, 128, 4096]))
def test_a_search_for_the_largest_batch_needs_few_compilations(
    limit: int, fixed: float, each: float, first: int
) -> None:
    """Memory is linear, up to steps of 1 % between which the compiler makes other choices."""
    available = fixed + each * limit
    tried: list[int] = []

    def needed(batch: int) -> float:
        return fixed + each * batch * (1 + 0.01 * (batch % 3))

    def measure(request: CompileRequest) -> FitResult:
        tried.append(request.batch)
        return FitResult(needed(request.batch) <= available, needed(request.batch), available)

    start, allowed = with_batch(REQUEST, first), allowed_for_the_request()
    fitting = [batch for batch in allowed if needed(batch) <= available]
    if not fitting:
        with refused("1 image ", " 16 ranks", field="--sweep", got="batch"):
            find_largest_batch(start, measure)
        return
    report = find_largest_batch(start, measure)
    assert report in fitting
    following = next((batch for batch in allowed if batch > report), None)
    assert following is None or following not in fitting, "the next batch does not fit"
    assert len(tried) == len(set(tried)) <= 14


@pytest.mark.parametrize(("first", "needed", "largest"), [(128, 15.7, 1600), (4096, 40.0, 16), (128, 15.7, 4096)])
def test_a_search_needs_few_compilations_if_memory_is_not_linear(first: int, needed: float, largest: int) -> None:
    """If memory is short, the compiler recomputes and needs nearly all of it for many batches; or it has a floor."""
    tried: list[int] = []

    def measure(request: CompileRequest) -> FitResult:
        batch = request.batch
        tried.append(batch)
        if batch > largest:
            return FitResult(False, 16 + batch * 1e-3, 15.75)
        return FitResult(True, min(batch * 15.7 / 256, needed), 15.75)

    assert find_largest_batch(with_batch(REQUEST, first), measure) == largest
    assert len(tried) == len(set(tried)) <= 16


def test_the_compilers_answer_decides_and_not_the_sizes_in_its_message() -> None:
    """The sizes are rounded: 15.75G needed of 15.75G."""
    fits = {96: 14.0, 104: 14.9}
    report = find_largest_batch(
        with_batch(REQUEST, 96), lambda one: FitResult(one.batch in fits, fits.get(one.batch, 15.75), 15.75)
    )
    assert report == 104


def test_a_sweep_without_an_allowed_batch_is_an_error() -> None:
    ranks = find_topology("v5e:4x4").device_count
    odd = RunConfig.model_validate({"train": {"global_batch": 48}, "model": {"batch_norm": {"group": 3}}})
    with refused(f"4096 images for each of the {ranks} ranks", field="--sweep", got="batch"):
        find_largest_batch(replace(REQUEST, config=odd), lambda request: FitResult(True, 0.0, 1.0))
