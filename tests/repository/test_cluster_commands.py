"""Cluster commands of the READMEs: images and namespace are those that `make images` builds and the commands install.

tests/cluster/test_tutorial.py runs them on a cluster.
"""

import itertools
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import helm
from tests.support.readme_commands import MANIFESTS_COMMANDS, README_COMMANDS
from tests.support.tutorials import ROOT

BUILD = ROOT / "images" / "build.sh"


def build(folder: Path, *names: str, **variables: str) -> list[str]:
    """Return the engine's commands of a build with an engine that only records them."""
    log = folder / "calls"
    engine = folder / "podman"
    engine.write_text(f'#!/bin/sh\necho "$*" >> {log}\n', encoding="utf-8")
    engine.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("TAG", "REGISTRY", "ARCHIVES", "PUSH")}
    subprocess.run([BUILD, *names], check=True, capture_output=True, env={**kept, "ENGINE": str(engine), **variables})
    return log.read_text(encoding="utf-8").splitlines()


def made_images(folder: Path) -> set[str]:
    """Return the images that the command of README makes and pushes."""
    match = re.search(r'`make images IMAGES="([^"]+)" REGISTRY=REGISTRY PUSH=yes`', (ROOT / "README.md").read_text())
    assert match is not None
    calls = build(folder, *match[1].split(), REGISTRY="registry.example", PUSH="yes")
    return {call.split()[1] for call in calls if call.startswith("push ")}


def option_values(line: str, option: str) -> list[str]:
    words = shlex.split(line.replace("\\\n", " "), comments=True)
    return [value for name, value in itertools.pairwise(words) if name == option]


def readme_defaults() -> tuple[dict[str, Any], str]:
    """Return podscale-defaults as README's first command installs it, and the namespace."""
    command = README_COMMANDS.read().partition("\npodscale")[0].replace("REGISTRY", "registry.example")
    settings = [word for value in option_values(command, "--set") for word in ("--set", value)]
    (profile,), (namespace,) = option_values(command, "-f"), option_values(command, "--namespace")
    arguments = ("template", "podscale", helm.CHART, "--kube-version", helm.KUBERNETES, "--namespace", namespace)
    done = helm.run(*arguments, "-f", ROOT / profile, *settings)
    assert done.returncode == 0, done.stderr
    return helm.defaults([item for item in yaml.safe_load_all(done.stdout) if item]), namespace


def test_readme_installs_the_images_that_it_builds(tmp_path: Path) -> None:
    launch = readme_defaults()[0]["launch"]
    assert {launch["image"], launch["launcher_image"]} == made_images(tmp_path)


def test_every_command_of_readme_names_the_namespace_of_the_release() -> None:
    commands = README_COMMANDS.read()
    _, namespace = readme_defaults()
    assert "--create-namespace" in commands
    lines = [line for line in commands.splitlines() if line.startswith("podscale ")]
    assert len(lines) == 2
    for line in lines:
        assert option_values(line, "--namespace") == [namespace]


@pytest.mark.parametrize("overlay", ["cpu", "gpu-l4", "gpu-h100", "tpu-v5e", "tpu-v6e"])
def test_the_command_for_overlays_names_the_images_that_are_built(overlay: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "manifests", tmp_path / "manifests")
    command = (
        MANIFESTS_COMMANDS.read()
        .splitlines()[0]
        .replace("REGISTRY", "registry.example")
        .replace("/cpu/", f"/{overlay}/")
    )
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    defaults = yaml.safe_load((tmp_path / "manifests" / "overlays" / overlay / "defaults.yaml").read_text())["launch"]
    names = ("base", "gpu", "tpu", "tools")
    built = build(tmp_path, *names, REGISTRY="registry.example")
    tags = {call.split("--tag ")[1].split()[0] for call in built if call.startswith("build ")}
    assert {defaults["image"], defaults["launcher_image"]} <= tags
    assert not [call for call in built if call.startswith("push ")]
