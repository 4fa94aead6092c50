"""Build a wheel with the native decoder for each kind of machine: `python -m tools.native_wheels`, or `make wheels`.

They go into dist/, beside what `make dist` writes, and into its SHA256SUMS. zig links for the glibc of manylinux_2_28,
so no container and no compiler for ARM is needed. Downloads the crates of native/Cargo.lock.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.distribution import DIST, ROOT, run, source_date_epoch, write_checksums

MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"
"""Version of the oldest glibc that the wheels run with: Debian 10, RHEL 8 and later."""


def target(machine: str) -> str:
    """Return Rust's name of a kind of machine."""
    return f"{machine}-unknown-linux-gnu"


def missing_targets() -> list[str]:
    """Return the targets for which Rust has no library here: all of them without Rust."""
    if shutil.which("rustc") is None:
        return [*map(target, MACHINES)]
    command = ["rustc", "--print", "target-libdir", "--target"]
    folders = {
        name: subprocess.run([*command, name], capture_output=True, text=True, check=True).stdout.strip()
        for name in map(target, MACHINES)
    }
    return [name for name, folder in folders.items() if not Path(folder).is_dir()]


def build(folder: Path, root: Path = ROOT) -> list[Path]:
    """Build a wheel for each kind of machine into a folder, with the platform tag of the libraries that it needs."""
    programs = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",  # cargo-zigbuild finds zig, auditwheel patchelf
        "SOURCE_DATE_EPOCH": source_date_epoch(root),
        "CARGO": str(programs / "cargo-zigbuild"),
    }
    with tempfile.TemporaryDirectory(prefix="podscale-wheels-") as scratch:
        run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", scratch, root)
        source = next(Path(scratch).glob("*.tar.gz"))
        return [_build_one(machine, source, Path(scratch) / machine, folder, environment) for machine in MACHINES]


def _build_one(machine: str, source: Path, scratch: Path, folder: Path, environment: dict[str, str]) -> Path:
    """Build the wheel of one kind of machine."""
    built, checked = scratch / "built", scratch / "checked"
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(built)]
    of_machine = {"CARGO_BUILD_TARGET": f"{target(machine)}.{GLIBC}", "_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
    run(sys.executable, "-m", "pip", "wheel", *options, source, environment=environment | of_machine)
    repair = ["auditwheel", "repair", "--plat", "auto", "--only-plat", "--wheel-dir", str(checked)]
    run(sys.executable, "-m", *repair, next(built.glob("*.whl")), environment=environment)
    wheel = next(checked.glob("*.whl"))
    folder.mkdir(parents=True, exist_ok=True)
    return wheel.replace(folder / wheel.name)


def main() -> None:
    if missing := missing_targets():
        sys.exit(f"Rust has no library for {' and '.join(missing)}. Run: rustup target add {' '.join(missing)}")
    for wheel in build(DIST):
        print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e3:,.0f} kB")
    write_checksums(DIST)


if __name__ == "__main__":
    main()
