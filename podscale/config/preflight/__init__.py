"""Preflight checks of files, devices, software and ports, before anything is started."""

from collections.abc import Iterable
from typing import Literal

from podscale.config.preflight.cluster import cluster_problems, rank_problems
from podscale.config.preflight.host import host_problems
from podscale.config.preflight.software import software_problems
from podscale.config.preflight.storage import shard_set_counts, storage_problems
from podscale.config.run_config import RunConfig
from podscale.errors import InputError, combine_errors

PreflightTarget = Literal["here", "pack", "containers", "pod", "job", "cluster"]


def preflight(
    document: RunConfig, target: PreflightTarget, shard_set: str | None = None, others: Iterable[InputError] = ()
) -> None:
    """Raise one InputError that lists every problem.

    Args:
        document: the run document.
        target: `here` is this machine, `containers` this machine with an image's software, `pod` one pod of a job.
            `pack` is a machine or pod that packs shards and does not train.
            `cluster` and `job` check the document alone; `job` leaves the ranks to the launcher.
        shard_set: location of the shards; None if they are still to be packed (a pod then packs and does not train).
        others: problems that checks of another package found.
    """
    if problems := [*find_problems(document, target, shard_set), *others]:
        raise combine_errors(problems, "this run cannot start")


def find_problems(document: RunConfig, target: PreflightTarget, shard_set: str | None = None) -> list[InputError]:
    """Return the problems that `preflight` raises."""
    return list(_problems(document, target, shard_set))


def _problems(document: RunConfig, target: PreflightTarget, shard_set: str | None) -> Iterable[InputError]:
    if target in ("cluster", "job"):
        yield from cluster_problems(document)
        if target == "cluster":
            yield from rank_problems(document)
        return
    yield from storage_problems(document, shard_set)
    if target == "pack" or (target == "pod" and shard_set is None):
        return  # packing needs no engine
    if target != "containers":
        yield from software_problems(document)
    yield from host_problems(document, shard_set_counts(document, shard_set), in_pod=target == "pod")
