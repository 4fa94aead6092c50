"""Checks of the Containerfiles without a build."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILES = sorted((ROOT / "images").glob("*.Containerfile"))
SCRIPTS = sorted((ROOT / "images").glob("**/*.sh"))


def test_there_is_one_for_each_image():
    assert {path.stem for path in CONTAINERFILES} == {"base", "gpu", "gpu-jax", "tools", "tpu"}


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.stem)
def test_hadolint_finds_nothing(path):
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed; it is in the development set")
    ended = subprocess.run([linter, path], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.stem)
def test_what_all_have_in_common(path):
    """A replaceable base image, hashes for every package, user 65532, all labels, no build tools."""
    text = path.read_text()
    stages = re.findall(r"^FROM (\S+)", text, flags=re.M)
    assert stages == ["${BASE_IMAGE}", "system", "system"]
    last = text.rpartition("\nFROM ")[2]
    assert "USER 65532:65532" in last
    assert f'org.opencontainers.image.title="podscale-{path.stem}"' in last
    assert {"version", "revision", "created", "licenses"} <= set(re.findall(r"image\.(\w+)=", last))
    assert "RUN" not in last, "a package manager runs in the last stage"
    requirements = ROOT / re.findall(r"ARG REQUIREMENTS=(\S+)", text)[0]
    packages = re.split(r"\n(?=\S)", requirements.read_text().strip())
    assert all("--hash=sha256:" in package for package in packages)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_shell(path):
    shell = "bash" if path.read_text().startswith("#!/bin/bash") else "dash"
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert subprocess.run([shell, "-n", path], check=False).returncode == 0


def test_the_launcher_needs_no_framework():
    names = re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements/tools.txt").read_text(), flags=re.M)
    assert "kubernetes" in names
    assert "kfp" in names
    assert not {"torch", "jax", "scikit-learn", "scipy"} & set(names)


def test_no_version_differs_between_sets():
    """Images have the same versions as the tested environment."""
    pattern = re.compile(r"^([a-z0-9-]+(?:\[[a-z]+\])?==\S+(?: ;[^\\]*)?)", flags=re.M)
    tested = set(pattern.findall((ROOT / "requirements/run.txt").read_text()))
    for name in ("base", "tools"):
        assert set(pattern.findall((ROOT / f"requirements/{name}.txt").read_text())) <= tested


def test_the_build_context_holds_no_secrets_and_no_history():
    """The list names the included files; all others are excluded."""
    lines = (ROOT / ".containerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert not {"!.git", "!runs", "!.", "!**"} & set(rules)
    assert (ROOT / ".dockerignore").read_text() == "\n".join(lines) + "\n", "the two files must be identical: copy one"
