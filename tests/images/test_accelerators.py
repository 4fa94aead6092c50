"""The GPU and TPU images on a machine without accelerators, as far as they can be tested there."""

import json
from pathlib import Path

import pytest

from tests.images.test_images import shard
from tests.support.commands import SMALL_DIGITS
from tests.support.containers import Engine
from tests.support.described_gpus import H100

pytestmark = pytest.mark.timeout(900)
KERNEL = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(values, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + place, 2 * tl.load(values + place, place < count), place < count)

signature = {"values": "*fp32", "count": "i32", "BLOCK": "constexpr"}
for capability in (80, 90, 100):
    made = triton.compile(ASTSource(double, signature, {(2,): 128}), target=GPUTarget("cuda", capability, 32))
    print(capability, made.asm["cubin"][:4] == b"\\x7fELF")
"""
HELPER = """
from pathlib import Path
from triton import backends
from triton.runtime.build import compile_so_from_file
driver = str(Path(backends.__file__).parent / "nvidia" / "driver.c")
print(compile_so_from_file(driver, "cuda_utils", library_dirs=[], libraries=["libcuda.so.1"]))
"""
COMPILE_FOR_A_TPU = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
rows = NamedSharding(Mesh(np.array(chips), ("data",)), P("data"))
images = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16, sharding=rows)
made = jax.jit(lambda x: (x @ x.T).sum()).lower(images).compile()
print(len(chips), chips[0].device_kind, "all-reduce" in made.as_text())
"""
COMPILE_FOR_AN_H100 = f"""
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
description = {H100!r}
chips = topologies.get_topology_desc("an H100", platform="cuda", target_config=description, topology="1x1x2").devices
rows = NamedSharding(Mesh(np.array(chips), ("data",)), P("data"))
images = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16, sharding=rows)
made = jax.jit(lambda x: (x @ x.T).sum()).lower(images).compile()
print(len(chips), "all-reduce" in made.as_text())
"""


def check_results(engine: Engine, image: str) -> dict[str, dict[str, str]]:
    report = json.loads(engine.inside(image, "podscale doctor --json").stdout)
    return {result["subject"]: result for result in report}


def python(engine: Engine, image: str, script: str, *options: str) -> list[str]:
    return engine.inside(
        image, f"cat >/tmp/script.py <<'END'\n{script}\nEND\npython3 /tmp/script.py", *options
    ).stdout.split()


@pytest.mark.parametrize(("name", "says"), [("base", "No CUDA GPUs are available"), ("gpu", "no NVIDIA driver")])
def test_torch_says_that_there_is_no_gpu(engine: Engine, name: str, says: str):
    """PyTorch raises its usual error, also in the slimmed image, in which stubs replace CUDA libraries."""
    script = 'import torch; assert not torch.cuda.is_available(); torch.zeros(1, device="cuda")'
    ended = engine.inside(engine.image(name), f"python3 -c '{script}'", check=False)
    assert ended.returncode == 1
    assert says in ended.stderr


def test_the_image_for_gpus_says_where_they_come_from(engine: Engine):
    checks = check_results(engine, engine.image("gpu"))
    assert {checks[name]["verdict"] for name in ("PyTorch", "DALI", "gloo")} == {"ok"}
    assert "CUDA 1" in checks["PyTorch"]["found"]
    assert (checks["GPUs"]["verdict"], checks["GPUs"]["found"]) == ("note", "none")
    assert "--gpus all" in checks["GPUs"]["advice"]


def test_triton_compiles_kernels_in_the_image_for_gpus(engine: Engine):
    """For three GPU generations, on a read-only root and without a C compiler. Only the device is missing."""
    assert python(engine, engine.image("gpu"), KERNEL) == ["80", "True", "90", "True", "100", "True"]


def test_triton_finds_its_helper_ready_made(engine: Engine):
    (library,) = python(engine, engine.image("gpu"), HELPER)
    assert library.startswith("/tmp/triton/")


def test_dali_feeds_a_training_on_the_cpu(engine: Engine, workspace: Path):
    """From images to a model with the GPU loader, in its CPU pipeline."""
    image = engine.image("gpu")
    shard(engine, image, workspace)
    script = "cd /workspace && podscale train run.yaml --set input.loader=dali --set launch.processes=1"
    engine.inside(image, script, f"--volume={workspace}:/workspace", "--shm-size=256m")
    run = workspace / "runs" / "small"
    environment = json.loads((run / "environment.json").read_text())
    assert "DALI" in json.dumps(environment) or "dali" in json.dumps(environment)
    assert (run / "model" / "model.safetensors").stat().st_uid == 65532


def test_jax_says_that_there_is_no_tpu(engine: Engine):
    image = engine.image("tpu")
    checks = check_results(engine, image)
    assert (checks["TPUs"]["verdict"], checks["JAX"]["verdict"]) == ("note", "ok")
    assert "libtpu" in checks["JAX"]["found"]
    assert checks["PyTorch"]["verdict"] == "note"
    assert "podscale-tpu" in checks["PyTorch"]["found"]
    script = 'import jax, libtpu; print(jax.devices()[0].platform); jax.devices("tpu")'
    ended = engine.inside(image, f"python3 -c '{script}'", check=False)
    assert (ended.returncode, ended.stdout) == (1, "cpu\n")
    assert "tpu" in ended.stderr.rstrip().rpartition("\n")[2]


def test_libtpu_compiles_for_chips_that_are_not_here(engine: Engine):
    """The library loads and its compiler works. Only the chip is missing."""
    variables = ("--env=JAX_PLATFORMS=cpu", "--env=TPU_SKIP_MDS_QUERY=1")
    count, *kind, reduced = python(engine, engine.image("tpu"), COMPILE_FOR_A_TPU, *variables)
    assert (count, reduced) == ("4", "True")
    assert "v5" in " ".join(kind)


def test_jax_compiles_for_gpus_that_are_not_here(engine: Engine):
    image = engine.image("gpu-jax")
    checks = check_results(engine, image)
    assert (checks["GPUs"]["verdict"], checks["JAX"]["verdict"]) == ("note", "ok")
    assert "1 x cpu" in checks["JAX"]["found"]
    assert python(engine, image, COMPILE_FOR_AN_H100, "--env=JAX_PLATFORMS=cpu") == ["2", "True"]


@pytest.mark.parametrize("name", ["tools", "tpu", "gpu-jax"])
def test_an_image_without_an_engine_names_those_with_one(engine: Engine, name: str, workspace: Path):
    (workspace / "run.yaml").write_text(SMALL_DIGITS)
    script = "cd /workspace && podscale train run.yaml"
    ended = engine.inside(engine.image(name), script, f"--volume={workspace}:/workspace", check=False)
    assert ended.returncode == 2
    assert f"podscale-{name}" in ended.stderr
    assert "podscale-gpu" in ended.stderr
    assert "Traceback" not in ended.stderr
