"""A choice that a run makes by measurements at its start, such as that of an all-reduce algorithm.

It is stored in the run directory and kept when the run resumes: another choice would add or round otherwise, and the
resumed run would not be bit-identical to an uninterrupted one.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podscale.pytorch.world import World
from podscale.util.files import write_json


def _no_report(facts: dict[str, str], *, kept: bool) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class StoredChoice:
    """File of a choice.

    Args:
        fence: called on rank 0 before it reads and writes the file.
        report: called on every rank with the facts of a choice; `kept` is True if an earlier launch made it.
    """

    path: Path
    fence: Callable[[], None] | None = None
    report: Callable[..., None] = _no_report

    def keep(self, world: World, key: list[Any], measure: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
        """Return the record of the choice, and whether an earlier launch stored it under the same key.

        Otherwise it is rank 0's result of `measure`, which every rank calls. Every rank must call this at the same
        time.

        Args:
            key: what the choice depends on, as JSON.
        """
        if world.is_rank0 and self.fence is not None:
            self.fence()
        stored = world.broadcast(self._read(key) if world.is_rank0 else None)
        if stored is not None:
            return stored, True
        record: dict[str, Any] = world.broadcast({"key": key, **measure()})
        if world.is_rank0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, record)
        return record, False

    def _read(self, key: list[Any]) -> dict[str, Any] | None:
        """Return the stored record of this key; None if there is none or it cannot be read."""
        try:
            record: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return record if record.get("key") == json.loads(json.dumps(key)) else None
