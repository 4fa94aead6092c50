"""The built images: their content, and training under the restrictions of pods."""

import json
import re
from pathlib import Path

import pytest

from podscale.version import VERSION
from tests.support.commands import SMALL_DIGITS
from tests.support.containers import HARDENED, Engine

pytestmark = pytest.mark.timeout(900)
SUBNET = "10.231.77"
"""Name of the network that the test of two containers creates and removes."""
FRAMEWORKS = {
    "base": {"torch", "torchvision"},
    "gpu": {"torch", "torchvision", "nvidia.dali"},
    "tpu": {"jax"},
    "gpu-jax": {"jax"},
    "tools": set(),
}
MEGABYTES = {"base": 1350, "gpu": 5600, "tpu": 1450, "gpu-jax": 4500, "tools": 450}
"""Largest allowed size of an image, MB; docs/how-to/images.md lists the measured sizes."""


def test_doctor_finds_nothing_missing(engine: Engine, image: str):
    ended = engine.inside(image, "podscale doctor --json", "--user=65532:65532")
    verdicts = {result["subject"]: result["verdict"] for result in json.loads(ended.stdout)}
    assert "missing" not in verdicts.values()
    assert verdicts["kfp"] == "ok"


def test_only_its_own_framework_is_inside(engine: Engine, image: str, name: str):
    modules = sorted(set().union(*FRAMEWORKS.values()))
    ended = engine.inside(image, f'for m in {" ".join(modules)}; do python3 -c "import $m" && echo $m; done; true')
    assert set(ended.stdout.split()) == FRAMEWORKS[name]


def test_the_native_decoder_is_inside(engine: Engine, image: str, name: str):
    """Without it, training reads images at less than half the speed. Launchers decode none."""
    script = "from podscale.data import native; print(native.is_available(), native.kernels()[-1:])"
    ended = engine.inside(image, f"python3 -c '{script}'; cat /opt/podscale/share/podscale/sbom.spdx.json")
    answer, _, document = ended.stdout.partition("\n")
    assert answer == ("False []" if name == "tools" else "True ['portable']")
    assert ("pkg:cargo/pyo3@" in document) == (name != "tools")


def test_kfp_can_run_components(engine: Engine, image: str):
    """The backend starts `sh -c ... python3 -m kfp.dsl.executor_main`."""
    assert "--component_module_path" in engine.inside(image, "python3 -m kfp.dsl.executor_main --help").stdout


def test_nothing_inside_builds_installs_or_raises_privileges(engine: Engine, image: str):
    tools = "gcc cc g++ c++ clang ld make pip pip3 curl wget git"
    programs = engine.inside(image, f"for tool in {tools}; do command -v $tool; done; true").stdout
    assert programs.split() == []
    privileged = engine.inside(image, "find / -xdev -type f -perm /6000 2>/dev/null; true").stdout
    assert privileged.split() == []
    unwanted = "find / -xdev ( -path '*/.cache/pip*' -o -name '*.whl' -o -path '/var/lib/apt/lists/*' -o -name '*.a' )"
    assert (
        engine.inside(image, f"{unwanted} 2>/dev/null; true".replace("( ", r"\( ").replace(" )", r" \)")).stdout == ""
    )


def test_nothing_is_writable_but_tmp(engine: Engine, image: str):
    """The user owns no files, so the image does not depend on a read-only root file system."""
    owned = engine(
        "run", "--rm", "--network=none", image, "sh", "-c", "find / -xdev -writable -not -type l -print; true"
    ).stdout
    elsewhere = {
        line for line in owned.split() if not line.startswith(("/proc", "/dev", "/sys", "/tmp", "/var/tmp", "/run"))
    }
    assert elsewhere == set()


def test_labels_user_and_environment(engine: Engine, image: str, name: str):
    config = engine.inspect(image)["Config"]
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert labels["title"] == f"podscale-{name}"
    assert labels["version"] == VERSION
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", labels["revision"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", labels["created"])
    assert config["User"] == "65532:65532"
    assert config["Cmd"] == ["podscale", "--help"]
    assert not config.get("Entrypoint")
    variables = dict(entry.split("=", 1) for entry in config["Env"])
    assert variables["PODSCALE_COMMIT"] == labels["revision"]
    assert variables["HOME"] == "/tmp"


def test_its_size_is_kept_down(engine: Engine, image: str, name: str):
    assert engine.inspect(image)["Size"] / 1e6 < MEGABYTES[name]


def test_the_list_of_packages_is_true(engine: Engine, image: str):
    """The SBOM names exactly the packages that Python finds in the image."""
    document = json.loads(engine.inside(image, "cat /opt/podscale/share/podscale/sbom.spdx.json").stdout)
    listed = {
        reference["referenceLocator"].removeprefix("pkg:pypi/").partition("@")[0]
        for package in document["packages"]
        for reference in package.get("externalRefs", ())
        if reference["referenceLocator"].startswith("pkg:pypi/")
    }
    script = 'import importlib.metadata as m; print(*{d.metadata["Name"] for d in m.distributions()})'
    installed = engine.inside(image, f"python3 -c '{script}'").stdout.split()
    assert listed == {re.sub(r"[-_.]+", "-", name).lower() for name in installed}
    assert any("pkg:deb/" in json.dumps(package) for package in document["packages"])


def shard(engine: Engine, image: str, workspace: Path) -> None:
    (workspace / "run.yaml").write_text(SMALL_DIGITS)
    engine.inside(image, "cd /workspace && podscale shard run.yaml", f"--volume={workspace}:/workspace")


def test_two_containers_train(engine: Engine, workspace: Path):
    """Two hardened containers, as two pods of a job, in an isolated network, with a rendezvous by PET_* variables.

    They get each other's address, because not every engine has a name server for its networks.
    """
    image, network = engine.image("base"), "podscale-test"
    revision = engine.inspect(image)["Labels"]["org.opencontainers.image.revision"]
    shard(engine, image, workspace)
    names = [f"podscale-test-{rank}" for rank in range(2)]
    addresses = [f"{SUBNET}.{10 + rank}" for rank in range(2)]
    known = [f"--add-host={name}:{address}" for name, address in zip(names, addresses, strict=True)]
    engine("network", "create", "--internal", f"--subnet={SUBNET}.0/24", network)
    try:
        for rank, name in enumerate(names):
            rendezvous = {
                "NNODES": 2,
                "NODE_RANK": rank,
                "NPROC_PER_NODE": 1,
                "MASTER_ADDR": names[0],
                "MASTER_PORT": 29500,
            }
            variables = [f"--env=PET_{key}={value}" for key, value in rendezvous.items()]
            container_options = [f"--name={name}", f"--network={network}", f"--ip={addresses[rank]}", *known]
            options = ["--detach", *container_options, *HARDENED, "--shm-size=256m", *variables]
            command = ["sh", "-c", "cd /workspace && exec podscale train run.yaml --set launch.processes=1"]
            engine("run", *options, f"--volume={workspace}:/workspace", image, *command)
        codes = engine("wait", *names).stdout.split()
        log = engine("logs", names[0], check=False)
        assert codes == ["0", "0"], log.stdout + log.stderr
    finally:
        engine("rm", "--force", *names, check=False)
        engine("network", "rm", "--force", network, check=False)
    run = workspace / "runs" / "small"
    assert (run / "model" / "model.safetensors").stat().st_uid == 65532
    started = json.loads((run / "metrics.jsonl").read_text().partition("\n")[0])
    assert (started["event"], started["ranks"]) == ("start", 2)
    assert json.loads((run / "environment.json").read_text())["commit"] == revision


def test_too_little_shared_memory_is_explained(engine: Engine, workspace: Path):
    """A container has 64 MiB by default; loader processes need more for large batches."""
    image = engine.image("base")
    shard(engine, image, workspace)
    options = [
        "--set input.image_size=224",
        "--set input.prefetch=8",
        "--set launch.processes=1",
        "--set train.global_batch=64",
    ]
    script = f"cd /workspace && podscale train run.yaml {' '.join(options)}"
    ended = engine.inside(image, script, f"--volume={workspace}:/workspace", check=False)
    assert ended.returncode == 2
    assert "/dev/shm" in ended.stderr
    assert "--shm-size" in ended.stderr
    assert "Traceback" not in ended.stderr
