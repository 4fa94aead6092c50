"""Locations: paths of the local machine, and URLs of stores."""

import posixpath
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Location:
    """Path (`scheme` None) or URL such as gs://bucket/images; `str` returns the parsed text."""

    scheme: str | None
    path: str

    @classmethod
    def parse(cls, text: str) -> "Location":
        scheme, separator, path = text.partition("://")
        return cls(scheme, path) if separator else cls(None, text)

    @property
    def is_remote(self) -> bool:
        """Return True for a URL other than file://."""
        return self.scheme not in (None, "file")

    @property
    def local_path(self) -> Path | None:
        """Path of a local location; None for a remote one."""
        return None if self.is_remote else Path(self.path)

    def join(self, *names: str) -> "Location":
        """Return the location of a file or directory below this one."""
        return replace(self, path=posixpath.join(self.path.rstrip("/") or self.path[:1], *names))

    def __str__(self) -> str:
        return self.path if self.scheme is None else f"{self.scheme}://{self.path}"
