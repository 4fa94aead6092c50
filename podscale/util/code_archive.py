"""Archive of a user's code: a deterministic tar of a folder, named by its SHA-256.

The same files give the same bytes on every machine: members are sorted, and have no owner, no time and one mode. Files
that `.podscaleignore` names (the patterns of .gitignore) are left out, and so are those of `IGNORED`.
"""

import base64
import binascii
import hashlib
import io
import lzma
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from podscale.errors import InputError
from podscale.util.formatting import format_bytes

IGNORE_FILE = ".podscaleignore"
IGNORED = (".git/", "__pycache__/", "*.pyc", ".venv/", ".ipynb_checkpoints/", IGNORE_FILE)
"""Patterns of files that are never part of an archive."""
MAX_ARCHIVE_BYTES = 16 * 2**20
MAX_BUNDLE_BYTES = 64 * 2**10
"""Maximal length of an archive as text in the document of pods, which is an environment variable."""
FIELD = "launch.code"


@dataclass(frozen=True)
class CodeArchive:
    """Bytes of a tar; `files` are the SHA-256 of its files by name."""

    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def files(self) -> dict[str, str]:
        """Return the SHA-256 of each file by its name."""
        with tarfile.open(fileobj=io.BytesIO(self.data)) as tar:
            return {member.name: hashlib.sha256(_read(tar, member)).hexdigest() for member in tar.getmembers()}

    def unpack(self, folder: Path) -> None:
        """Write the files below a new folder, read-only."""
        with tarfile.open(fileobj=io.BytesIO(self.data)) as tar:
            for member in tar.getmembers():
                path = folder / member.name
                if not path.resolve().is_relative_to(folder.resolve()) or not member.isfile():
                    raise InputError("not an archive of Podscale", field=FIELD, got=member.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_read(tar, member))
                path.chmod(0o444)
        for parent, _, _ in os.walk(folder):
            Path(parent).chmod(0o555)

    def to_text(self) -> str:
        """Return the archive as compressed text."""
        return base64.b85encode(lzma.compress(self.data, preset=9)).decode("ascii")

    @classmethod
    def from_text(cls, text: str) -> "CodeArchive":
        """Return the archive of `to_text`; raises InputError for other text."""
        try:
            return cls(lzma.LZMADecompressor().decompress(base64.b85decode(text), 2 * MAX_ARCHIVE_BYTES))
        except (ValueError, binascii.Error, lzma.LZMAError) as error:
            raise InputError("not the archive of a folder", field="launch.code_bundle") from error


def pack_code(folder: Path) -> CodeArchive:
    """Pack a folder; raises InputError if there is none, or if it is too large.

    A package (a folder with `__init__.py`) keeps its name; the files of another folder are at the top.
    """
    if not folder.is_dir():
        raise InputError("there is no such folder", field=FIELD, got=str(folder))
    top = f"{folder.resolve().name}/" if (folder / "__init__.py").exists() else ""
    out, size = io.BytesIO(), 0
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(_included(folder), key=lambda path: path.as_posix()):
            data = (folder / path).read_bytes()
            size += len(data)
            if size > MAX_ARCHIVE_BYTES:
                raise InputError(
                    f"more than {format_bytes(MAX_ARCHIVE_BYTES)} of files",
                    field=FIELD,
                    got=str(folder),
                    hint=f"Name files that are no code in {folder / IGNORE_FILE}",
                )
            member = tarfile.TarInfo(f"{top}{path.as_posix()}")
            member.size, member.mode = len(data), 0o444
            tar.addfile(member, io.BytesIO(data))
    if not size:
        raise InputError("it has no files", field=FIELD, got=str(folder))
    return CodeArchive(out.getvalue())


def changed_files(before: CodeArchive, now: CodeArchive) -> list[str]:
    """Return the names of files that were added, removed or changed, with the kind of change."""
    old, new = before.files(), now.files()
    kinds = {name: "removed" if name not in new else "added" if name not in old else "changed" for name in old | new}
    return [f"{name}: {kinds[name]}" for name in sorted(kinds) if old.get(name) != new.get(name)]


def _included(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that no pattern leaves out, relative to it; links are followed to files only."""
    from pathspec import GitIgnoreSpec  # used only by runs with launch.code

    lines = (folder / IGNORE_FILE).read_text(encoding="utf-8").splitlines() if (folder / IGNORE_FILE).exists() else []
    spec = GitIgnoreSpec.from_lines([*lines, *IGNORED])
    for parent, folders, names in os.walk(folder):
        relative = Path(parent).relative_to(folder)
        folders[:] = [name for name in folders if not spec.match_file(f"{(relative / name).as_posix()}/")]
        yield from (relative / name for name in names if not spec.match_file((relative / name).as_posix()))


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read() if file is not None else b""
