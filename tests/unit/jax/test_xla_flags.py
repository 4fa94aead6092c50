"""Flags of XLA's compilers: the user's win, and the installed XLA accepts those for GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from podscale.hardware import TPU_CHIPS, TpuChip
from podscale.jax.gpu_checks import device_kind
from podscale.jax.xla_flags import DEFAULT_GPU_FLAGS, VARIABLES, XLA_FLAGS, xla_environment
from podscale.version import installed


def flags_of(text: str) -> dict[str, str]:
    return dict(argument.lstrip("-").split("=") for argument in text.split())


def test_each_platform_gets_its_own_flags() -> None:
    assert xla_environment("cpu", {}) == {}
    for platform, variable in VARIABLES.items():
        found = xla_environment(platform, {})
        assert list(found) == [variable]
        assert flags_of(found[variable]) == {f.name: f.value for f in XLA_FLAGS if f.platform == platform}


@pytest.mark.parametrize("chip", TPU_CHIPS, ids=lambda chip: chip.name)
def test_flags_that_a_generation_cannot_compile_are_left_out(chip: TpuChip) -> None:
    """Messages that are fused with a convolution exceed the vector memory of v2 to v4: seen with libtpu 0.0.42.1."""
    found = flags_of(xla_environment("tpu", {}, chip.name)["LIBTPU_INIT_ARGS"])
    assert ("xla_tpu_enable_async_collective_fusion" in found) == (chip.name not in ("v2", "v3", "v4"))
    assert "xla_tpu_enable_latency_hiding_scheduler" in found


def test_flags_of_the_user_take_precedence() -> None:
    given = "--xla_tpu_enable_latency_hiding_scheduler=false --xla_other=3"
    found = flags_of(xla_environment("tpu", {"LIBTPU_INIT_ARGS": given})["LIBTPU_INIT_ARGS"])
    assert found["xla_tpu_enable_latency_hiding_scheduler"] == "false"
    assert found["xla_other"] == "3"
    assert len(found) == 1 + sum(flag.platform == "tpu" for flag in XLA_FLAGS)
    everything = xla_environment("cuda", {})
    assert xla_environment("cuda", everything) == everything


@pytest.mark.parametrize(
    ("platforms", "kind"), [("gpu", "cuda"), ("cuda,cpu", "cuda"), ("tpu,cpu", "tpu"), ("cpu", "cpu")]
)
def test_jaxs_names_of_platforms_are_known(monkeypatch: pytest.MonkeyPatch, platforms: str, kind: str) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert device_kind() == kind


@pytest.mark.parametrize("known", [True, False])
def test_the_installed_xla_accepts_the_flags_for_gpus(known: bool) -> None:
    """Every XLA parses the flags of all platforms, and ends the process at one that it does not know."""
    flags = xla_environment("cuda", {})["XLA_FLAGS"] + ("" if known else " --xla_gpu_no_such_flag=true")
    ended = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode == 0) == known, ended.stderr


OPTIONS = "from jaxlib import xla_client; print(xla_client.CompileOptions().SerializeAsString().hex())"
"""Program that prints all options of XLA's compilers, as XLA_FLAGS set them."""


def compile_options(flags: str) -> str:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", OPTIONS], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.skipif(installed("jaxlib") != "0.10.2", reason="the defaults are those of jaxlib 0.10.2")
def test_flags_that_are_left_out_have_the_stated_defaults() -> None:
    """In the installed XLA: given as flags, the defaults change no option, and another value changes one."""
    given = [f"--{name}={flags.default}" for flags in DEFAULT_GPU_FLAGS for name in flags.names]
    plain = compile_options("")
    assert compile_options(" ".join(given)) == plain
    assert compile_options("--xla_gpu_enable_command_buffer=FUSION") != plain
    set_names = {flag.name for flag in XLA_FLAGS}
    assert not set_names & {name for flags in DEFAULT_GPU_FLAGS for name in flags.names}


def test_the_page_has_the_flags_that_are_left_out() -> None:
    """Column by column: names, default, purpose and reason."""
    text = (Path(__file__).resolve().parents[3] / "docs/explanation/jax.md").read_text(encoding="utf-8")
    table = text.partition("| flag | default | what it does | why it is left |\n|---|---|---|---|\n")[2]
    rows = [
        f"| {', '.join(f'`{name}`' for name in flags.names)} | `{flags.default}` | {flags.purpose} | {flags.reason} |"
        for flags in DEFAULT_GPU_FLAGS
    ]
    assert table.partition("\n\n")[0].splitlines() == rows
