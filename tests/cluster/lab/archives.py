"""Container images without a registry or container engine: docker-archives from files on this machine."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

EPOCH = "1970-01-01T00:00:00Z"
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def write(target: Path, name: str, fill: Callable[[tarfile.TarFile], None], **config: object) -> None:
    """Write an image with one layer, packed by `fill`; `config` is the image configuration (Entrypoint, User)."""
    layer = target.with_suffix(".layer")
    try:
        with tarfile.open(layer, "w", format=tarfile.GNU_FORMAT) as tar:
            fill(tar)
        digest = _sha256(layer)
        document = {
            "architecture": "amd64",
            "os": "linux",
            "created": EPOCH,
            "config": {"Env": [PATH], **config},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created": EPOCH, "created_by": "tests/cluster/lab"}],
        }
        configuration = json.dumps(document).encode()
        config_name = f"{hashlib.sha256(configuration).hexdigest()}.json"
        manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}.tar"]}]
        with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive:
            _add_bytes(archive, "manifest.json", json.dumps(manifest).encode())
            _add_bytes(archive, config_name, configuration)
            archive.add(layer, f"{digest}.tar", filter=_plain)
    finally:
        layer.unlink(missing_ok=True)


def executable(path: Path, *names: str) -> Callable[[tarfile.TarFile], None]:
    """Return a layer with one static program under all these names, and a world-writable /tmp."""

    def fill(tar: tarfile.TarFile) -> None:
        scratch = tarfile.TarInfo("tmp")
        scratch.type, scratch.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(scratch)
        tar.add(path, names[0], filter=_plain)
        for name in names[1:]:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"/{names[0]}"
            tar.addfile(link)

    return fill


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755
    return entry
