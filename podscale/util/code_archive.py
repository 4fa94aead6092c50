"""Archive of a user's code: a deterministic tar of a folder, named by its SHA-256.

The same files give the same bytes on every machine: members are sorted, and have no owner, no time and one mode. Files
that `.podscaleignore` names (the patterns of .gitignore) are left out, and so are those of `IGNORED`.
"""

import base64
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
"""Maximal size of the files of an archive, bytes."""
MAX_BUNDLE_BYTES = 64 * 2**10
"""Maximal length of an archive as text in the document of pods, which is an environment variable."""
_BLOCK_BYTES = 64 * 2**10
"""Bytes that are compressed at a time."""
_DAMAGED = "not an archive of Podscale"
FIELD = "launch.code"
"""Option of the run document, for errors."""


@dataclass(frozen=True)
class CodeArchive:
    """Bytes of a deterministic tar."""

    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def files(self) -> dict[str, str]:
        """Return the SHA-256 of each file by its name. Raises InputError if the archive is damaged."""
        return {name: hashlib.sha256(data).hexdigest() for name, data in self._members()}

    def module_names(self) -> set[str]:
        """Return the names of its modules and packages at the top."""
        return {name.partition("/")[0].removesuffix(".py") for name in self.files() if name.endswith(".py")}

    def unpack(self, folder: Path) -> None:
        """Write the files below a new folder, read-only and for this user alone."""
        for name, data in self._members():
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()) or path.exists():
                raise InputError(_DAMAGED, field=FIELD, got=name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o400)
        for parent, _, _ in os.walk(folder):
            Path(parent).chmod(0o500)

    def _members(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of each file."""
        try:
            with tarfile.open(fileobj=io.BytesIO(self.data)) as tar:
                for member in tar:
                    file = tar.extractfile(member) if member.isfile() else None
                    if file is None:
                        raise InputError(_DAMAGED, field=FIELD, got=member.name)
                    yield member.name, file.read()
        except tarfile.TarError as error:
            raise InputError(f"{_DAMAGED} ({error})", field=FIELD) from error

    def to_text(self) -> str | None:
        """Return the archive as compressed text of MAX_BUNDLE_BYTES at most; None if it would be longer.

        The text is without the `$` and `{{` that Kubernetes and Argo would replace.
        """
        compressor, compressed = lzma.LZMACompressor(preset=9), b""
        for start in range(0, len(self.data), _BLOCK_BYTES):
            compressed += compressor.compress(self.data[start : start + _BLOCK_BYTES])
            if len(compressed) > MAX_BUNDLE_BYTES:  # 16 MiB would take 9 s, for each stage
                return None
        text = base64.b64encode(compressed + compressor.flush()).decode("ascii")
        return text if len(text) <= MAX_BUNDLE_BYTES else None

    @classmethod
    def from_text(cls, text: str) -> "CodeArchive":
        """Return the archive of `to_text`; raises InputError for other text."""
        try:
            data = base64.b64decode(text, validate=True)
            return cls(lzma.LZMADecompressor().decompress(data, 2 * MAX_ARCHIVE_BYTES))
        except (ValueError, lzma.LZMAError) as error:
            raise InputError("not the archive of a folder", field="launch.code_bundle") from error


def pack_code(folder: Path) -> CodeArchive:
    """Pack a folder; raises InputError if there is none, if it is too large or if a file cannot be read.

    A package (a folder with `__init__.py`) keeps its name; the files of another folder are at the top.
    """
    if not folder.is_dir():
        raise InputError("there is no such folder", field=FIELD, got=str(folder))
    top = f"{folder.resolve().name}/" if (folder / "__init__.py").exists() else ""
    try:
        files = _read_files(folder)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise InputError(problem, field=FIELD, got=str(error.filename or folder)) from error
    if not any(files.values()):
        raise InputError("it has no files", field=FIELD, got=str(folder))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(f"{top}{name}")
            member.size, member.mode = len(files[name]), 0o444
            try:
                tar.addfile(member, io.BytesIO(files[name]))
            except ValueError as error:
                problem = f"a name that no archive holds: {error}"
                raise InputError(problem, field=FIELD, got=str(folder / name)) from error
    return CodeArchive(out.getvalue())


def changed_files(before: CodeArchive, now: CodeArchive) -> list[str]:
    """Return the names of files that were added, removed or changed, with the kind of change."""
    old, new = before.files(), now.files()
    kinds = {name: "removed" if name not in new else "added" if name not in old else "changed" for name in old | new}
    return [f"{name}: {kinds[name]}" for name in sorted(kinds) if old.get(name) != new.get(name)]


def _read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file of an archive by its name; raises InputError before it reads too many bytes."""
    files, size = dict[str, bytes](), 0
    for path in _included(folder):
        size += (folder / path).stat().st_size
        if size > MAX_ARCHIVE_BYTES:
            raise InputError(
                f"more than {format_bytes(MAX_ARCHIVE_BYTES)} of files",
                field=FIELD,
                got=str(folder),
                hint=f"Name files that are no code in {folder / IGNORE_FILE}",
            )
        files[path.as_posix()] = (folder / path).read_bytes()
    return files


def _included(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that no pattern leaves out, relative to it; links are followed to files only."""
    from pathspec import GitIgnoreSpec  # used only by runs with launch.code

    lines = (folder / IGNORE_FILE).read_text(encoding="utf-8").splitlines() if (folder / IGNORE_FILE).exists() else []
    spec = GitIgnoreSpec.from_lines([*lines, *IGNORED])
    for parent, folders, names in os.walk(folder, onerror=_raise):
        relative = Path(parent).relative_to(folder)
        folders[:] = [name for name in folders if not spec.match_file(f"{(relative / name).as_posix()}/")]
        found = (relative / name for name in names if not spec.match_file((relative / name).as_posix()))
        yield from (path for path in found if (folder / path).is_file())  # no pipe, and no link to nothing


def _raise(error: OSError) -> None:
    raise error
