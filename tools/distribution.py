"""Build what a release publishes: `python -m tools.distribution [--release]`, or `make dist` and `make release`.

Into dist/: the wheel, the source distribution, the chart if Helm is installed, an SBOM (CycloneDX) of the locked
dependencies, and SHA256SUMS. Builds of one commit are equal to the bit. Downloads nothing.
"""

import argparse
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import yaml

from podscale.version import RELEASE

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
LOCKED = ROOT / "requirements" / "run.txt"
"""Requirements that the SBOM lists: those of every run, with PyTorch, GPUs and a cluster."""
CHECKSUMS = "SHA256SUMS"


def version_problems(root: Path = ROOT) -> list[str]:
    """Return the places whose version differs from RELEASE: the chart and the changelog."""
    chart = yaml.safe_load((root / "charts" / "podscale" / "Chart.yaml").read_text(encoding="utf-8"))
    problems = [
        f"charts/podscale/Chart.yaml: {key} is not {RELEASE} (got {chart[key]})"
        for key in ("version", "appVersion")
        if chart[key] != RELEASE
    ]
    sections = re.findall(r"^## \[([^]]+)\]", _changelog(root), re.MULTILINE)
    newest = next((name for name in sections if name != "Unreleased"), "none")
    if newest != RELEASE:
        problems.append(f"CHANGELOG.md: its newest release is not {RELEASE} (got {newest})")
    return problems


def release_problems(root: Path = ROOT) -> list[str]:
    """Return the reasons why HEAD is not a release: files differ, no tag, or no date in the changelog."""
    problems = []
    if changed := _git(root, "status", "--porcelain"):
        problems.append(f"files differ from the commit (got {len(changed.splitlines())}). Commit them first.")
    tags = _git(root, "tag", "--points-at", "HEAD").split()
    if f"v{RELEASE}" not in tags:
        problems.append(f"HEAD has no tag v{RELEASE} (got {', '.join(tags) or 'no tag'}). Run `git tag -s v{RELEASE}`.")
    if not re.search(rf"^## \[{re.escape(RELEASE)}\] - \d{{4}}-\d\d-\d\d$", _changelog(root), re.MULTILINE):
        problems.append(f"CHANGELOG.md: the section of {RELEASE} has no date. Write `## [{RELEASE}] - YYYY-MM-DD`.")
    return problems


def build(folder: Path, root: Path = ROOT) -> list[Path]:
    """Build everything into an empty folder, and check the descriptions of the packages; return the files."""
    epoch = source_date_epoch(root)
    # One wheel for all machines: the native decoder is built from the source distribution, where cargo is.
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch, "PODSCALE_NATIVE": "0"}
    # The build tools are installed from pinned files, so none are downloaded.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, root, environment=environment)
    set_times(next(folder.glob("*.tar.gz")), int(epoch))
    wheel = next(folder.glob("*.whl"))
    run(sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir())
    write_sbom(folder / f"podscale-{wheel_version(wheel)}.cdx.json", wheel_version(wheel), environment, root)
    if helm := shutil.which("helm"):
        run(helm, "package", root / "charts" / "podscale", "--destination", folder)
    else:
        print("helm: not installed, so the chart is not packaged", file=sys.stderr)
    return [*sorted(folder.iterdir()), write_checksums(folder)]


def source_date_epoch(root: Path = ROOT) -> str:
    """Return the time of the commit, seconds since 1970; 1980 in a folder without git."""
    return _git(root, "log", "-1", "--format=%ct") or "315532800"


def write_checksums(folder: Path) -> Path:
    """Write the checksums of all files of a folder."""
    files = sorted(path for path in folder.iterdir() if path.name != CHECKSUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
    return folder / CHECKSUMS


def set_times(archive: Path, epoch: int) -> None:
    """Write a source distribution again, with one time and owner for all files, sorted by name."""
    part = archive.with_suffix(".part")
    with (
        tarfile.open(archive) as source,
        part.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            member.mtime, member.pax_headers = epoch, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            target.addfile(member, source.extractfile(member) if member.isfile() else None)
    part.replace(archive)


def wheel_version(wheel: Path) -> str:
    """Return the version in a wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return str(message_from_bytes(archive.read(name))["Version"])


def write_sbom(path: Path, version: str, environment: dict[str, str], root: Path = ROOT) -> None:
    """Write the SBOM of a version: Podscale and its locked dependencies, with their hashes."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text)["project"]["dynamic"] == ["version"]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as project:
        project.write(text.replace('dynamic = ["version"]', f'version = "{version}"'))
        project.flush()
        command = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", "--output-reproducible"]
        run(*command, "--pyproject", project.name, "--output-file", path, LOCKED, environment=environment)


def _changelog(root: Path) -> str:
    return (root / "CHANGELOG.md").read_text(encoding="utf-8")


def _git(root: Path, *arguments: str) -> str:
    """Return the output of a git command; "" in a folder without git."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def run(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    """Run a command; print its output only if it fails."""
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}\nfailed: {' '.join(map(str, command))}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the wheel, the source distribution, the chart and the SBOM.")
    parser.add_argument("--release", action="store_true", help="refuse a commit that is not a release")
    options = parser.parse_args()
    problems = version_problems() + (release_problems() if options.release else [])
    if problems:
        sys.exit("\n".join(problems))
    with tempfile.TemporaryDirectory() as work:
        files = build(Path(work))
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        for path in files:
            shutil.copy(path, DIST)
    for path in files:
        print(f"dist/{path.name}: {(DIST / path.name).stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
