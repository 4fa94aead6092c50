"""New lines of a file that others append to."""

from pathlib import Path


class FileTail:
    """Hands over the whole lines that were appended to a file since the last call; it may not exist yet.

    from_start: also those that stand in it already.
    """

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() and not from_start else 0
        self._rest = b""

    def read_lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return whole
