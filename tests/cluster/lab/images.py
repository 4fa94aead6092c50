"""Images of the cluster, and loading of local images into it."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.cluster.lab import archives, machine, node, places, programs
from tests.cluster.lab.commands import attempt, run, wait_for
from tests.cluster.lab.errors import LabError, Unavailable
from tests.support import podman

OURS = ("base", "tools", "tpu")
BASE_IMAGE = "localhost/debian:bookworm-slim"
TAG = "dev"
IN_PODS = (
    "training-operator",
    "jobset",
    "trainer-controller-manager",
    "kueue",
    "prometheus",
    "prometheus-operator",
    "prometheus-config-reloader",
)
"""Programs that run in pods."""


def of_program(name: str) -> str:
    """Return the name of the local image with this program."""
    return f"localhost/{name}:{programs.source_of(name).version}"


def make(entries: Iterable[programs.Source], say: Callable[[str], None]) -> list[Path]:
    """Write the archives that are missing or older than their program; return all archives of these programs."""
    places.image_dir().mkdir(parents=True, exist_ok=True)
    names = [name for entry in entries for name in entry.programs if name in IN_PODS]
    return [_pause(), *(_program(name, say) for name in names)]


def build_ours(names: Sequence[str], say: Callable[[str], None]) -> None:
    """Build images under test with podman, on a Debian base that needs no registry, and load them into the cluster.

    Args:
        names: some of OURS; empty for all of them.
    """
    names = names or OURS
    if unknown := set(names) - set(OURS):
        raise LabError(f"{', '.join(sorted(unknown))}: unknown image. Choose from {', '.join(OURS)}.")
    machine.require(machine.BUILDING, say)
    engine = {"CONTAINERS_CONF": str(podman.write(places.cache())), "BUILDAH_RUNTIME": "runc"}
    base = os.environ.get("BASE_IMAGE", BASE_IMAGE)
    if base == BASE_IMAGE and attempt("podman", "image", "exists", base, **engine).returncode:
        say(f"making {base} with debootstrap")
        run("nice", "sh", "images/debian.sh", base, cwd=places.ROOT, **engine)
    say(f"building {', '.join(names)} upon {base}")
    archives = places.image_dir() / "built"
    options = {"ENGINE": "podman", "BASE_IMAGE": base, "TAG": TAG, "ARCHIVES": str(archives)}
    run("nice", "bash", "images/build.sh", *names, cwd=places.ROOT, **engine, **options)
    for name in names:
        archive = archives / f"podscale-{name}.tar"
        load(archive)
        archive.unlink()  # one GiB, and podman keeps the layers anyway
    built = [_name(name) for name in names]
    wait_for("the node to report its images", 120, lambda: node.reports(built))
    say("the cluster has " + ", ".join(built))


def remove_ours() -> list[str]:
    """Remove the images of `build_ours` from podman, except images in use; return the names of the removed ones."""
    if shutil.which("podman") is None:
        return []
    names = [BASE_IMAGE, *map(_name, OURS)]
    there = [name for name in names if attempt("podman", "image", "exists", name).returncode == 0]
    return [name for name in reversed(there) if attempt("podman", "rmi", name).returncode == 0]


def load(archive: Path) -> None:
    """Load an archive into the cluster, unless it is already loaded."""
    mark = places.STATE / "imported" / archive.name
    stamp = f"{archive.stat().st_mtime_ns} {archive.stat().st_size}"
    if mark.exists() and mark.read_text() == stamp:
        return
    _import(archive)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(stamp)


def load_image(name: str) -> None:
    """Load an image from podman, docker or a docker-archive into the cluster."""
    if Path(name).is_file():
        load(Path(name).resolve())
        return
    engine = shutil.which("podman") or shutil.which("docker")
    if engine is None:
        raise Unavailable(f"neither podman nor docker is here to take the image {name} from")
    with tempfile.TemporaryDirectory(dir=places.STATE) as scratch:
        archive = Path(scratch) / "image.tar"
        run(engine, "save", "--output", archive, name)
        _import(archive)


def listing() -> list[str]:
    """Return the names of the images in the cluster."""
    return [name for name in _digests() if not name.startswith("sha256:")]


def _import(archive: Path) -> None:
    """Import an archive, and remove images whose names it has taken over."""
    done = node.ctr("images", "import", archive)
    if done.returncode:
        raise LabError(f"{archive} could not be imported: {done.stderr[-1000:]}")
    digests = _digests()
    named = {digest for name, digest in digests.items() if not name.startswith("sha256:")}
    for name in (name for name, digest in digests.items() if digest not in named):
        node.ctr("images", "remove", name)


def _digests() -> dict[str, str]:
    """Return digests by name; containerd's CRI plugin has a second name for each image, by its content."""
    rows = [line.split() for line in node.ctr("images", "ls").stdout.splitlines()[1:]]
    return {row[0]: row[2] for row in rows}


def _name(name: str) -> str:
    return f"localhost/podscale-{name}:{TAG}"


def _pause() -> Path:
    binary, target = places.bin_dir() / "pause", places.image_dir() / "pause.tar"
    if _older(target, binary):
        archives.write(target, "localhost/pause:1", archives.executable(binary, "pause"), Entrypoint=["/pause"])
    return target


def _program(name: str, say: Callable[[str], None]) -> Path:
    binary, target = places.bin_dir() / name, places.image_dir() / f"{name}.tar"
    if _older(target, binary):
        say(f"image of {name}")
        # Manifests start operators as /manager, and Prometheus' operator starts its helper by name.
        layer = archives.executable(binary, f"bin/{name}", "manager")
        archives.write(target, of_program(name), layer, Entrypoint=["/manager"], User="65532:65532")
    return target


def _older(target: Path, source: Path) -> bool:
    return not target.exists() or target.stat().st_mtime < source.stat().st_mtime
