"""What a build tells while it works, for metrics: counts so far, finished shards, phases."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

BuildPhase = Literal["plan", "pack", "merge", "other"]


class PackProgress(NamedTuple):
    """Images gone through (rejects are among them), their bytes as written, rejects, and bytes as read."""

    images: int = 0
    bytes_written: int = 0
    rejects: int = 0
    bytes_read: int = 0


class BuildObserver(Protocol):
    """Hears of a build, on the thread that builds, some ten times a second at most."""

    def phase_started(self, name: BuildPhase) -> None:
        """From now on time belongs to this phase."""
        ...

    def images_planned(self, split: str, images: int) -> None:
        """How many images this build is to pack."""
        ...

    def images_packed(self, split: str, so_far: PackProgress) -> None:
        """How far the packers are."""
        ...

    def shard_finished(self, split: str, rejects: Mapping[str, int]) -> None:
        """A shard is done; the images it had to leave out, by reason."""
        ...


class NullObserver:
    """The watch of whoever does not want one."""

    def phase_started(self, name: BuildPhase) -> None:
        pass

    def images_planned(self, split: str, images: int) -> None:
        pass

    def images_packed(self, split: str, so_far: PackProgress) -> None:
        pass

    def shard_finished(self, split: str, rejects: Mapping[str, int]) -> None:
        pass


NULL_OBSERVER = NullObserver()
