"""Results of `podscale doctor` on this machine, with advice if something is missing."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from podscale.cli import doctor, main
from podscale.data import native
from podscale.hardware import TPU_CHIPS
from podscale.util import host_info
from podscale.util.terminal import CheckResult


def by_subject(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.subject: result for result in results}


def test_every_result_that_is_not_fine_says_what_to_do(tmp_path):
    results = doctor.check_machine(tmp_path)
    assert len(by_subject(results)) == len(results)
    for result in results:
        assert result.found
        assert (result.verdict == "ok") == (result.advice == ""), result


def test_json_and_exit_code(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_check_engine", lambda: iter(()))
    assert main(["doctor", "--workspace", str(tmp_path), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert {"subject", "verdict", "found", "advice"} == set(results[0])
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert main(["doctor", "--workspace", str(tmp_path / "new")]) == 2
    assert "missing" in capsys.readouterr().out


def test_what_is_missing_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "installed", lambda package: None)
    monkeypatch.setattr(host_info, "memory_info", lambda: host_info.MemoryInfo(2**30, 2**29, 2**20))
    checks = by_subject(doctor.check_machine(tmp_path))
    assert checks["PyTorch"].verdict == "missing"
    assert "pip install 'podscale[torch]'" in checks["PyTorch"].advice
    assert checks["kfp"].verdict == "missing"
    assert checks["DALI"].verdict == "note"
    assert checks["/dev/shm"].verdict == "note"
    assert "512 MiB free of 1.0 GiB" in checks["memory"].found


def test_the_native_decoder_and_the_cost_of_its_absence(monkeypatch, tmp_path):
    check = by_subject(doctor.check_machine(tmp_path))["native decoder"]
    assert check.verdict == ("ok" if native.kernels()[:1] not in ([], ["portable"]) else "note")
    monkeypatch.setattr(native, "_native", SimpleNamespace(kernels=lambda: ["portable"]))
    monkeypatch.setattr(native, "pillow_order", lambda: "rows first")
    assert "neither AVX2" in by_subject(doctor.check_machine(tmp_path))["native decoder"].found
    monkeypatch.setattr(native, "pillow_order", lambda: None)
    assert "Pillow" in by_subject(doctor.check_machine(tmp_path))["native decoder"].found
    monkeypatch.setattr(native, "_native", None)
    check = by_subject(doctor.check_machine(tmp_path))["native decoder"]
    assert check.verdict == "note"
    assert "cargo" in check.advice


def test_an_image_without_an_engine_misses_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "installed", lambda package: None if package == "torch" else "1.0")
    assert by_subject(doctor.check_machine(tmp_path))["PyTorch"].verdict == "missing"
    monkeypatch.setenv("PODSCALE_IMAGE", "podscale-tools")
    checks = by_subject(doctor.check_machine(tmp_path))
    assert checks["PyTorch"].verdict == "note"
    assert "launch.image" in checks["PyTorch"].advice
    assert "in podscale-tools" in checks["podscale"].found
    monkeypatch.setenv("PODSCALE_IMAGE", "podscale-base")
    assert by_subject(doctor.check_machine(tmp_path))["PyTorch"].verdict == "missing"


def test_the_image_for_gpus_says_where_they_come_from(monkeypatch, tmp_path):
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 0)
    assert "--gpus all" not in by_subject(doctor.check_machine(tmp_path))["GPUs"].advice
    monkeypatch.setenv("PODSCALE_IMAGE", "podscale-gpu")
    check = by_subject(doctor.check_machine(tmp_path))["GPUs"]
    assert (check.verdict, check.found.split(";")[0]) == ("note", "none")
    assert "driver" in check.advice
    assert "--gpus all" in check.advice


def test_tpus_are_counted_as_the_bus_names_them(tmp_path):
    devices_of_google = {"00:05": "0x0063", "00:06": "0x0063", "00:04": "0x0042"}  # two chips and a network card
    for address, device in devices_of_google.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text("0x1ae0\n")
        (tmp_path / address / "device").write_text(f"{device}\n")
    (tmp_path / "00:01").mkdir()
    (tmp_path / "00:01" / "vendor").write_text("0x8086\n")
    assert host_info.tpu_chips(tmp_path) == ["v5e", "v5e"]
    assert host_info.tpu_chips(tmp_path / "none") == []
    assert {chip.name for chip in TPU_CHIPS if chip.devices == 2} == {*host_info.TWO_DEVICE_CHIPS, "v2"}


@pytest.mark.parametrize(("chip", "devices"), [("v3", 8), ("tpu7x", 8), ("v4", 4), ("v5e", 4)])
def test_a_chip_with_two_devices_counts_twice(chip, devices, monkeypatch):
    monkeypatch.setattr(host_info, "tpu_chips", lambda: [chip] * 4)
    assert host_info.tpu_device_count() == devices


def test_jax_devices_are_reported(monkeypatch, tmp_path):
    versions = {}
    monkeypatch.setattr(doctor, "installed", versions.get)
    monkeypatch.setattr(host_info, "tpu_chips", list)
    assert not {"TPUs", "JAX"} & set(by_subject(doctor.check_machine(tmp_path)))
    monkeypatch.setattr(host_info, "tpu_chips", lambda: ["v5e"] * 4)
    checks = by_subject(doctor.check_machine(tmp_path))
    assert checks["TPUs"].found == "4 chips of v5e"
    assert (checks["JAX"].verdict, checks["JAX"].advice[:11]) == ("missing", "pip install")

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    versions |= {"jax": "1.0", "libtpu": "2.0"}
    checks = by_subject(doctor.check_machine(tmp_path))
    assert checks["JAX"].verdict == "missing"
    for name in ("libtpu 2.0", "cpu"):
        assert name in checks["JAX"].found
    monkeypatch.setattr(host_info, "tpu_chips", list)
    checks = by_subject(doctor.check_machine(tmp_path))
    assert (checks["TPUs"].verdict, checks["JAX"].verdict) == ("note", "ok")
    assert " x cpu " in checks["JAX"].found


def test_a_metrics_port_in_use(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(doctor, "METRICS_PORT", server.getsockname()[1])
        assert [result.verdict for result in doctor._check_network()] == ["ok", "note"]


def test_the_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_check_engine", lambda: iter(()))
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    assert f"{host_info.cpu_count()} cores" in capsys.readouterr().out
    assert list(Path().iterdir()) == []


def gpu_host(monkeypatch, *, driver: str, usable: bool) -> dict[str, CheckResult]:
    """Return the results of the engine's checks on a machine with two GPUs."""
    from podscale.pytorch import software

    found = software.Capabilities("2.15.0", "13.2", ["NVIDIA H100"] * 2 if usable else [], True, "2.29")
    monkeypatch.setattr(software, "probe", lambda: found)
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 2)
    monkeypatch.setattr(host_info, "nvidia_driver", lambda: driver)
    return by_subject(list(doctor._check_engine()))


def test_a_driver_older_than_cuda_is_reported(monkeypatch):
    assert gpu_host(monkeypatch, driver="580.65.06", usable=True)["NVIDIA driver"].verdict == "ok"
    old = gpu_host(monkeypatch, driver="570.172.08", usable=False)
    assert old["NVIDIA driver"].verdict == "missing"
    assert "580" in old["NVIDIA driver"].found
    compatible = gpu_host(monkeypatch, driver="570.172.08", usable=True)  # by CUDA's compatibility package
    assert compatible["NVIDIA driver"].verdict == "note"


def test_a_gpu_host_needs_what_triton_compiles_with(monkeypatch):
    monkeypatch.setattr(host_info, "missing_for_triton", lambda: ["a C compiler", "/usr/include/Python.h"])
    check = gpu_host(monkeypatch, driver="580.65.06", usable=True)["Triton"]
    assert check.verdict == "missing"
    assert "Python.h" in check.found
    monkeypatch.setattr(host_info, "missing_for_triton", list)
    assert gpu_host(monkeypatch, driver="580.65.06", usable=True)["Triton"].verdict == "ok"
