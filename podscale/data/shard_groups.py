"""Check of the groups of shards of `input.order: blocked`: equal numbers for all hosts. No NumPy, for launchers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podscale.config.batch_phases import batch_phases
from podscale.errors import InputError
from podscale.util.formatting import join_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from podscale.config.run_config import RunConfig


def check_shard_groups(config: RunConfig, hosts: int, shards: int | None = None) -> None:
    """Raise InputError if the hosts cannot have equal numbers of groups; the hint has the numbers that fit."""
    number, batches = config.input.groups, [phase.global_batch for phase in batch_phases(config.train)]
    if config.input.order == "global" or number % hosts == 0:
        return
    most = min(batches) if shards is None else min(*batches, shards)
    fitting = [groups for groups in range(hosts, most + 1, hosts) if not any(batch % groups for batch in batches)]
    listed = join_words([str(batch) for batch in batches])
    none = f"Change launch.nodes or the batch: no multiple of {hosts} up to {most} divides train.global_batch {listed}."
    raise InputError(
        f"not a multiple of the {hosts} hosts (launch.nodes)",
        field="input.groups",
        got=number,
        hint=format_choices(fitting) if fitting else none,
    )


def format_choices(numbers: Sequence[int]) -> str:
    return f"Choose {join_words([str(number) for number in numbers], 'or')}."
