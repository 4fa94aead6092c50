"""The paragraph at the end of a test run: what was not run, and the command that installs what is missing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.skipped_tests import COMMAND, GROUPS, describe_skipped

ROOT = Path(__file__).resolve().parents[2]
DEBIAN_REASON = re.compile(r'''(?:pytest\.skip\(|reason=|": )f?"([^"\n]*Debian[^"\n]*)"''')


def test_reasons_are_grouped_and_counted() -> None:
    prometheus = "prometheus is not on the PATH; Debian and Ubuntu have it in the package prometheus"
    chromium = "no Chromium is installed (Debian: apt-get install chromium)"
    assert describe_skipped([chromium, *[prometheus] * 3, "no CUDA device", "wds2idx needs GNU tar"]) == (
        "Not run: 6 tests. `make test-programs` installs what 4 tests of them need: Prometheus 3 (package prometheus); "
        "Chromium 1 (package chromium). The others need a GPU 1 (make bench-gpu); other things, named above 1."
    )
    assert describe_skipped([]) == ""
    assert describe_skipped(["no CUDA device"]) == "Not run: 1 test. They need a GPU 1 (make bench-gpu)."


def test_every_package_is_one_that_the_command_installs() -> None:
    script = (ROOT / "tools" / "test_programs.sh").read_text(encoding="utf-8")
    (packages,) = re.findall(r"\|\| set -- (.*)", script)
    assert set(packages.split()) == {group.package for group in GROUPS if group.package}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\n{COMMAND.removeprefix('make ')}: " in makefile


def test_every_reason_that_names_debian_has_its_package() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    reasons = {reason for text in texts for reason in DEBIAN_REASON.findall(text)}
    assert len(reasons) >= 5
    for reason in reasons:
        assert f"`{COMMAND}`" in describe_skipped([reason]), reason


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_without_programs_ends_with_the_paragraph(workers: str) -> None:
    files = ["tests/system/train/test_monitor.py", "tests/system/report/test_report_browser.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"-n{workers}", *files]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.rstrip().splitlines()[-1]
    (skipped,) = re.findall(r"(\d+) skipped", done.stdout)
    assert last.startswith(
        f"Not run: {skipped} tests. `make test-programs` installs what {skipped} tests of them need: "
    )
    assert "(package prometheus)" in last
    assert "(package chromium)" in last


def test_the_command_installs_what_is_missing_and_only_that(tmp_path: Path) -> None:
    """With a stand-in for apt-get, and a PATH on which promtool alone is there."""
    for name in ("bash", "id", "mktemp", "rm", "tail"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    for name, body in (("promtool", ""), ("apt-get", f'echo "$@" >>{tmp_path}/calls'), ("id", "echo 0")):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).write_text(f"#!{tmp_path}/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = [str(tmp_path / "bash"), str(ROOT / "tools" / "test_programs.sh")]
    done = subprocess.run(
        [*script, "prometheus", "chromium"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "installed chromium\n"), done.stderr
    assert (tmp_path / "calls").read_text().splitlines()[-1].split()[-1] == "chromium"
    (tmp_path / "apt-get").unlink()
    done = subprocess.run([*script, "podman"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for name in ("apt-get", "podman"):
        assert name in done.stderr
