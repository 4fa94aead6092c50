"""Table source: CSV or JSON lines of path, label and optionally split."""

import csv
import io
import json
from collections.abc import Iterator, Sequence

from podscale.data.sources.base import SPLIT_FOLDERS, SourceItem, decode_name
from podscale.data.sources.storage import Storage, open_storage
from podscale.errors import ABSENT, InputError
from podscale.util.locations import Location

PATH_COLUMNS = ("path", "file", "filename", "image")
LABEL_COLUMNS = ("label", "class")


def is_table_name(name: str) -> bool:
    return name.lower().endswith((".csv", ".jsonl", ".ndjson"))


class TableSource:
    """Source of rows path,label[,split]; paths are relative to the table, absolute, or URLs."""

    def __init__(self, storage: Storage) -> None:
        self._table = storage
        parent = storage.location.rpartition("/")[0]
        self._images = open_storage(parent or ("/" if storage.location.startswith("/") else "."))
        self._other_storages: dict[bytes, Storage] = {}

    def items(self) -> Iterator[SourceItem]:
        for line, (path, label, split) in self._rows():
            if not path or not label:
                raise self._refusal(line, "a row needs a path and a label")
            if split and split.lower().encode() not in SPLIT_FOLDERS:
                raise self._refusal(line, "unknown split", got=split, hint="Use train or val, or leave it empty.")
            name = path.encode("utf-8", "surrogateescape")
            yield SourceItem(name, label, self._size(name), SPLIT_FOLDERS[split.lower().encode()] if split else "")

    def read(self, item: SourceItem) -> bytes:
        storage, path = self._locate(item.name)
        return storage.read(path)

    def _size(self, name: bytes) -> int:
        """Return the size of an image in bytes; 0 if it is missing, which packing rejects as unreadable."""
        try:
            storage, path = self._locate(name)
            return storage.size(path)
        except (OSError, InputError):
            return 0

    def _locate(self, name: bytes) -> tuple[Storage, bytes]:
        if Location.parse(decode_name(name)).scheme is None:
            return self._images, name  # joining keeps an absolute path as it is
        root, _, path = name.rpartition(b"/")
        if root not in self._other_storages:
            self._other_storages[root] = open_storage(root.decode("utf-8", "surrogateescape"))
        return self._other_storages[root], path

    def _rows(self) -> Iterator[tuple[int, tuple[str, str, str]]]:
        try:
            text = self._table.read(b"").decode("utf-8-sig", "surrogateescape")
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror or error}", field=self._table.location) from error
        if self._table.location.lower().endswith(".csv"):
            return self._csv(text)
        return self._json(text)

    def _csv(self, text: str) -> Iterator[tuple[int, tuple[str, str, str]]]:
        reader = csv.reader(io.StringIO(text, newline=""))
        columns: tuple[int, int, int | None] = (0, 1, 2)
        try:
            for number, row in enumerate(row for row in reader if len(row) > 1 or "".join(row).strip()):
                if number == 0 and (header := _header_columns(row)) is not None:
                    columns = header
                    continue
                path, label, split = columns
                if len(row) <= max(path, label):
                    raise self._refusal(reader.line_num, "a row is path,label[,split]", got=row)
                third = row[split].strip() if split is not None and split < len(row) else ""
                yield reader.line_num, (row[path], row[label], third)
        except csv.Error as error:
            hint = "A quotation mark that is not closed takes all later lines into its field."
            raise self._refusal(reader.line_num, f"not a CSV file: {error}", hint=hint) from error

    def _json(self, text: str) -> Iterator[tuple[int, tuple[str, str, str]]]:
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                path = next(str(row[name]) for name in PATH_COLUMNS if name in row)
                label = next(str(row[name]) for name in LABEL_COLUMNS if name in row)
                yield number, (path, label, str(row.get("split") or ""))
            except (ValueError, TypeError, AttributeError, StopIteration, RuntimeError) as error:
                raise self._refusal(number, 'a row is {"path": ..., "label": ...}', got=line) from error

    def _refusal(self, line: int, problem: str, *, got: object = ABSENT, hint: str = "") -> InputError:
        return InputError(problem, field=f"{self._table.location}:{line}", got=got, hint=hint)


def _header_columns(row: Sequence[str]) -> tuple[int, int, int | None] | None:
    """Return the positions of path, label and split if the row is a header, else None."""
    names = [cell.strip().lower() for cell in row]
    path = next((names.index(name) for name in PATH_COLUMNS if name in names), None)
    label = next((names.index(name) for name in LABEL_COLUMNS if name in names), None)
    if path is None or label is None:
        return None
    return path, label, names.index("split") if "split" in names else None
