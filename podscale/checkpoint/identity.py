"""Which run a checkpoint belongs to, and why another run may not continue it."""

from dataclasses import dataclass
from typing import Any

from podscale.config.identity import differences


@dataclass(frozen=True)
class RunIdentity:
    """What must agree between a checkpoint and the run that continues it.

    result: the `result` options of the run document as {dotted name: JSON value} (`config.result_values`).
    classes_sha256: hash of the class map of the shard set.
    data_fingerprint: fingerprint of the shard set's plan.
    """

    result: dict[str, Any]
    classes_sha256: str
    data_fingerprint: str

    def conflicts(self, saved: "RunIdentity") -> list[str]:
        """One line for each thing in which `saved` belongs to another run than this; empty where it may continue."""
        lines = [str(difference) for difference in differences(saved.result, self.result)]
        if saved.classes_sha256 != self.classes_sha256:
            lines.append(
                f"class map: was {saved.classes_sha256[:12]}, is {self.classes_sha256[:12]} (the shard set has other "
                "classes or another order of them)"
            )
        if saved.data_fingerprint != self.data_fingerprint:
            lines.append(f"data fingerprint: was {saved.data_fingerprint}, is {self.data_fingerprint}")
        return lines
