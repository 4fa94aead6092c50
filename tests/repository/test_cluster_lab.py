"""Parts of tests/cluster/lab that need neither root nor a cluster."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client import ApiException

from tests.cluster.cluster import kubeconfig
from tests.cluster.lab import __main__ as lab
from tests.cluster.lab import archives, commands, machine, network, node, places, processes, programs, provisioner
from tests.cluster.lab.errors import LabError, Unavailable


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tests away from a cluster that runs on this machine."""
    monkeypatch.setattr(places, "STATE", tmp_path / "state")
    monkeypatch.setattr(places, "RUN", tmp_path / "run")
    monkeypatch.setattr(places, "VOLUMES", tmp_path / "volumes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_every_program_is_pinned_by_checksum() -> None:
    found = programs.sources()
    assert {"kubernetes", "etcd", "training-operator", "helm"} <= {entry.name for entry in programs.chosen("core")}
    assert programs.chosen("full") == found
    for entry in found:
        pinned_here = entry.directory and (entry.folder / "go.mod").exists()
        assert entry.sum.startswith("h1:") or pinned_here, entry.name
    names = [name for entry in found for name in entry.programs]
    assert len(names) == len(set(names))


def test_a_single_operator_includes_its_requirements() -> None:
    core = programs.chosen("core")
    assert [entry.name for entry in programs.chosen("core", ["trainer"]) if entry not in core] == ["jobset", "trainer"]
    with pytest.raises(LabError, match=r"kueu: .*kubernetes, "):
        programs.chosen("core", ["kueu"])


def test_own_modules_require_the_version_that_is_listed() -> None:
    for entry in programs.sources():
        if entry.directory and entry.name != "pause":
            assert f" {entry.version}" in (entry.folder / "go.mod").read_text(), entry.name


def test_a_program_is_built_again_when_its_pin_changes() -> None:
    entry = programs.source("coredns")
    places.bin_dir().mkdir(parents=True)
    (places.bin_dir() / "coredns.pin").write_text(entry.pin())
    assert entry.built()
    (places.bin_dir() / "coredns.pin").write_text("another")
    assert not entry.built()


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ("dial tcp: lookup proxy: no such host", Unavailable),
        ("go.mod requires go >= 1.25.0 (running go 1.19.8; GOTOOLCHAIN=local)", Unavailable),
        ("main.go:3: syntax error", LabError),
    ],
)
def test_an_unreachable_module_is_unavailable_and_not_a_failure(output: str, kind: type[LabError]) -> None:
    assert type(programs._failure(programs.source("helm"), output)) is kind


def test_an_archive_is_an_image_whose_digests_hold_and_whose_bytes_repeat(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"#!/bin/sh\n")
    for name in ("one.tar", "two.tar"):
        os.utime(program, (time.time(), len(name)))
        archives.write(
            tmp_path / name,
            "localhost/x:1",
            archives.executable(program, "bin/run", "run"),
            Entrypoint=["/run"],
            User="1:1",
        )
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    with tarfile.open(tmp_path / "one.tar") as archive:

        def read(name: str) -> bytes:
            member = archive.extractfile(name)
            assert member is not None
            return member.read()

        (manifest,) = json.loads(read("manifest.json"))
        config = json.loads(read(manifest["Config"]))
        (layer,) = manifest["Layers"]
        assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(read(layer)).hexdigest()}"]
        assert (config["config"]["Entrypoint"], config["config"]["User"]) == (["/run"], "1:1")
        member = archive.extractfile(layer)
        with tarfile.open(fileobj=member) as content:
            assert {entry.name: oct(entry.mode) for entry in content} == {
                "tmp": "0o1777",
                "bin/run": "0o755",
                "run": "0o644",
            }


def test_a_process_is_started_once_found_again_and_stopped() -> None:
    processes.start("sleeper", "sleep", "60")
    record = places.STATE / "processes" / "sleeper"
    first = record.read_text()
    processes.start("sleeper", "sleep", "60")
    assert record.read_text() == first
    assert processes.alive("sleeper")
    processes.stop("sleeper")
    assert not processes.alive("sleeper")
    assert not record.exists()


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    processes.start("deaf", sys.executable, "-c", script)
    commands.wait_for("its handler", 20, lambda: "deaf" in processes.log_of("deaf").read_text())
    processes.stop("deaf", timeout_seconds=0.3)
    assert not processes.alive("deaf")


def test_another_process_with_a_reused_id_is_left_alone() -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        record = places.STATE / "processes" / "reused"
        record.parent.mkdir(parents=True)
        record.write_text(f"{other.pid} 1")
        assert not processes.alive("reused")
        processes.stop("reused")
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()


def test_down_stops_every_process_that_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "require_root", lambda: None)
    monkeypatch.setattr(network, "down", lambda: None)
    started = ("etcd", "kubelet", "kwok", "what somebody adds later")
    for name in started:
        processes.start(name, "sleep", "60")
    pids = [int((places.STATE / "processes" / name).read_text().split()[0]) for name in started]
    lab.down()
    assert not places.STATE.exists()
    assert [pid for pid in pids if processes._start_time(pid)] == []


def test_clean_removes_the_images_of_podman_too_and_lists_the_caches_of_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = tmp_path / "calls"
    scripts = {
        "podman": f"""echo "$*" >> {calls}; [ "$3" != localhost/podscale-tools:dev ]""",
        "go": f"""printf '%s\\n' {tmp_path} {tmp_path}/absent""",
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    places.bin_dir().mkdir(parents=True)
    lab.clean()
    assert not places.cache().exists()
    removed = [line.removeprefix("rmi ") for line in calls.read_text().splitlines() if line.startswith("rmi")]
    ours = ["localhost/podscale-tpu:dev", "localhost/podscale-base:dev"]
    assert removed == [*ours, "localhost/debian:bookworm-slim"]
    output = capsys.readouterr().out
    assert "podman's localhost/podscale-base:dev" in output
    assert f"\t{tmp_path}\n" in output


def test_a_cluster_that_is_not_ours_is_tested_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    monkeypatch.setattr(places, "KUBECONFIG", own)
    monkeypatch.delenv("PODSCALE_TEST_CLUSTER", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(other))
    assert kubeconfig() is None
    own.touch()
    assert kubeconfig() == own
    monkeypatch.setenv("PODSCALE_TEST_CLUSTER", "1")
    assert kubeconfig() == other
    monkeypatch.delenv("KUBECONFIG")
    assert kubeconfig() == own


def test_configuration_is_written_only_when_it_differs() -> None:
    node.configure()
    written = places.STATE / "kube-proxy.yaml"
    assert f"bindAddress: {places.NODE_IP}" in written.read_text()
    os.utime(written, (1, 1))
    node.configure()
    assert written.stat().st_mtime == 1


def test_only_chains_of_kubernetes_and_its_network_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ":KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n-A POSTROUTING -j CNI-55d0\n"
    others = "*nat\n:NETAVARK-1D8721 - [0:0]\n-A POSTROUTING -s 10.88.0.0/16 -j NETAVARK-1D8721\nCOMMIT\n"
    restored: list[str] = []

    def attempt(program: str, stdin: str = "") -> Any:
        if program == "iptables-restore":
            restored.append(stdin)
        return SimpleNamespace(stdout=others.replace("COMMIT\n", ours + "COMMIT\n"))

    monkeypatch.setattr(network, "attempt", attempt)
    network._drop_chains("iptables")
    assert restored == [others]


class Volumes:
    """API double that records the provisioner's requests."""

    def __init__(self) -> None:
        self.made: dict[str, dict[str, Any]] = {}

    def create_persistent_volume(self, volume: dict[str, Any]) -> None:
        if volume["metadata"]["name"] in self.made:
            raise ApiException(status=409)
        self.made[volume["metadata"]["name"]] = volume

    def delete_persistent_volume(self, name: str) -> None:
        del self.made[name]


def claim(storage_class: str = "standard", phase: str = "Pending") -> Any:
    spec = SimpleNamespace(
        storage_class_name=storage_class,
        volume_name=None,
        access_modes=["ReadWriteMany"],
        resources=SimpleNamespace(requests={"storage": "1Gi"}),
    )
    metadata = SimpleNamespace(name="workspace", namespace="here", uid="123")
    return SimpleNamespace(spec=spec, metadata=metadata, status=SimpleNamespace(phase=phase))


def test_a_claim_gets_one_directory_that_every_user_may_write() -> None:
    api = Volumes()
    for _ in range(2):  # a watch may report the same event twice
        provisioner.provide(api, claim())
    (volume,) = api.made.values()
    assert volume["spec"]["claimRef"]["uid"] == "123"
    assert Path(volume["spec"]["hostPath"]["path"]).stat().st_mode & 0o777 == 0o777
    provisioner.provide(api, claim(storage_class="another"))
    provisioner.provide(api, claim(phase="Bound"))
    assert len(api.made) == 1


def test_a_released_volume_goes_with_its_files_and_others_stay() -> None:
    api = Volumes()
    provisioner.provide(api, claim())
    (name,) = api.made

    def volume(phase: str, owner: str = provisioner.PROVISIONER) -> Any:
        metadata = SimpleNamespace(name=name, annotations={"pv.kubernetes.io/provisioned-by": owner})
        return SimpleNamespace(metadata=metadata, status=SimpleNamespace(phase=phase))

    provisioner.reclaim(api, volume("Bound"))
    provisioner.reclaim(api, volume("Released", owner="somebody else"))
    assert (places.VOLUMES / name).exists()
    provisioner.reclaim(api, volume("Released"))
    assert not (places.VOLUMES / name).exists()
    assert api.made == {}
