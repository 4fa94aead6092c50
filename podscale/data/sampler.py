"""Sampler: the samples of each global batch, and the part of each rank.

They are a pure function of (seed, step): a run resumes at any step, and a checkpoint needs one integer. The global
batches do not depend on the number of ranks or hosts. A host is a node of the run.

`input.order: global`: each epoch is one permutation of the split. A step takes its global batch from the endless stream
of epochs (`StepPositions`), so a batch may end one epoch and begin the next, and no sample is left out.

`input.order: blocked`: the shards form G (`input.groups`) fixed groups with nearly equal numbers of samples. Every
group has epochs of its own, and every global batch takes 1 / G of its samples from each. A host owns G / hosts groups
and reads no other shard, so its node-local cache is enough (host sharding, as in the released code of Ying 2018).
Samples of a smaller group are used more often, by the ratio of the sizes; a ratio above `MAX_GROUP_IMBALANCE` is
refused.

With `input.repeats` r (repeated augmentation: Hoffer 2020, timm, torchvision) each sample comes r times in a row, so
on r different ranks if there are that many. An epoch of N positions then uses the first N / r samples of its
permutation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from podscale.data.rng import derive_key, permute
from podscale.data.shard_groups import check_shard_groups, format_choices
from podscale.data.step_positions import StepPositions, step_positions
from podscale.errors import InputError

if TYPE_CHECKING:
    from podscale.config.run_config import RunConfig


RowIndices = npt.NDArray[np.int64]
"""Rows of samples in the index of the split, from 0."""

MAX_GROUP_IMBALANCE = 1.1
"""Maximal ratio of the largest group to the smallest, in samples."""

_KEY_DOMAIN = 0x6F72646572  # "order": keeps these keys apart from those of crops and other uses of the seed


class SampleTable(Protocol):
    """Columns of a split that the sampler reads (see podscale.data.shard_set.Split)."""

    def __len__(self) -> int: ...

    def column(self, name: str) -> npt.NDArray[Any]: ...


@dataclass(frozen=True)
class SampleIndices:
    """Samples in the order in which they are used.

    Args:
        rows: int64 [n], row of each sample in the index of the split.
        epochs: int64 [n], number of earlier uses of each sample; with the sample's key it seeds the augmentation.
    """

    rows: RowIndices
    epochs: RowIndices

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> SampleIndices:
        return SampleIndices(self.rows[part], self.epochs[part])


@dataclass(frozen=True)
class Sampler:
    """Sample order of one split under one seed.

    Args:
        positions: samples of each step, over all ranks, and the number of samples of the split.
        groups: rows of each group of shards; None for `input.order: global`.
        hosts: number of hosts, each with the same number of ranks and of groups.
        repeats: uses of a sample in a row.
    """

    seed: int
    positions: StepPositions
    groups: tuple[RowIndices, ...] | None = None
    hosts: int = 1
    repeats: int = 1

    def global_batch(self, step: int) -> SampleIndices:
        """Return the samples of a step, from 0; group after group if blocked. They do not depend on the world size."""
        if self.groups is None:
            return self._slice_stream(0, None, self.positions.images_before(step), self.positions.batch_at(step))
        return self._batch_of_groups(step, range(len(self.groups)))

    def rank_batch(self, step: int, rank: int, world_size: int) -> SampleIndices:
        """Return the samples of one rank: every `world_size`-th sample of the global batch, from `rank` on.

        If blocked, the ranks of a host share the samples of the host's groups in the same way. A host has
        `world_size` / hosts consecutive ranks.
        """
        if self.groups is None:
            return self.global_batch(step)[slice(rank, None, world_size)]
        ranks_per_host = self._ranks_per_host(world_size)
        host, local = divmod(rank, ranks_per_host)
        return self._batch_of_groups(step, self._groups_of_host(host))[slice(local, None, ranks_per_host)]

    def host_of(self, rank: int, world_size: int) -> int:
        """Return the host of `rank`; raises InputError if hosts have unequal numbers of ranks."""
        return rank // self._ranks_per_host(world_size)

    def rows_of_host(self, host: int) -> RowIndices:
        """Return all samples that the ranks of `host` ever read."""
        if self.groups is None:
            return np.arange(self.positions.samples, dtype=np.int64)
        return np.concatenate([self.groups[group] for group in self._groups_of_host(host)])

    def _groups_of_host(self, host: int) -> range:
        groups_per_host = self._group_count // self.hosts
        return range(host * groups_per_host, (host + 1) * groups_per_host)

    @cached_property
    def _group_count(self) -> int:
        return len(self.groups) if self.groups is not None else 1

    def _ranks_per_host(self, world_size: int) -> int:
        if world_size % self.hosts:
            fitting = [
                hosts for hosts in range(1, world_size + 1) if world_size % hosts == self._group_count % hosts == 0
            ]
            raise InputError(
                f"does not divide the {world_size} ranks evenly",
                field="launch.nodes",
                got=self.hosts,
                hint=format_choices(fitting),
            )
        return world_size // self.hosts

    def _batch_of_groups(self, step: int, groups: range) -> SampleIndices:
        assert self.groups is not None
        begin, length = (
            images // len(self.groups) for images in (self.positions.images_before(step), self.positions.batch_at(step))
        )
        parts = [self._slice_stream(group, self.groups[group], begin, length) for group in groups]
        return SampleIndices(np.concatenate([p.rows for p in parts]), np.concatenate([p.epochs for p in parts]))

    def _slice_stream(self, group: int, members: RowIndices | None, begin: int, length: int) -> SampleIndices:
        """Return positions begin, ..., begin + length - 1 of one group's endless stream; `members` None: all rows."""
        count = self.positions.samples if members is None else len(members)
        epochs, positions = np.divmod(np.arange(begin, begin + length, dtype=np.int64), count)
        one_epoch = epochs[0] == epochs[-1]  # then one key serves all positions
        draws, repetitions = np.divmod(positions, self.repeats)
        rows = permute(draws, count, derive_key(self.seed, _KEY_DOMAIN, group, epochs[:1] if one_epoch else epochs))
        return SampleIndices(rows if members is None else members[rows], epochs * self.repeats + repetitions)


def build_sampler(config: RunConfig, split: SampleTable) -> Sampler:
    """Build the sampler of the training split; raises InputError if it is empty or the groups do not fit."""
    seed, repeats = config.run.seed, config.input.repeats
    if len(split) == 0:
        raise InputError("the training split has no images", hint="See rejects.jsonl in the shard set.")
    positions = step_positions(config.train, len(split))
    if config.input.order == "global":
        return Sampler(seed, positions, repeats=repeats)
    hosts, shard_of_row = config.launch.nodes, split.column("shard")
    check_shard_groups(config, hosts, len(np.unique(shard_of_row)))
    return Sampler(seed, positions, assign_shards_to_groups(shard_of_row, config.input.groups), hosts, repeats)


def assign_shards_to_groups(shard_of_row: npt.NDArray[Any], group_count: int) -> tuple[RowIndices, ...]:
    """Return the rows of each group of shards, ascending; `shard_of_row` [n] has the shard number of each row.

    Each shard, largest first, goes to the group with the fewest samples (Graham 1969). A tie goes to the first group.
    """
    sizes = np.bincount(shard_of_row)
    shards = [int(shard) for shard in np.argsort(-sizes, kind="stable") if sizes[shard]]
    if len(shards) < group_count:
        raise InputError(
            f"more than the {len(shards)} shards",
            field="input.groups",
            got=group_count,
            hint="Set data.min_shards to a multiple of input.groups.",
        )
    totals = np.zeros(group_count, dtype=np.int64)
    group_of_shard = np.full(len(sizes), -1)
    for shard in shards:
        group = int(np.argmin(totals))
        group_of_shard[shard] = group
        totals[group] += sizes[shard]
    if totals.max() > MAX_GROUP_IMBALANCE * totals.min():
        raise InputError(
            f"the smallest group of shards has {totals.min()} images and the largest {totals.max()}, so images of "
            "small groups would be used more often",
            field="input.groups",
            got=group_count,
            hint="Set data.min_shards to a multiple of input.groups.",
        )
    groups = group_of_shard[shard_of_row]
    return tuple(np.flatnonzero(groups == group) for group in range(group_count))


def evaluation_steps(count: int, world_size: int, batch: int) -> int:
    """Return the number of steps that evaluate `count` samples, with `batch` samples per rank."""
    return -(-count // (world_size * batch))


def evaluation_rows(
    count: int, step: int, rank: int, world_size: int, batch: int
) -> tuple[RowIndices, npt.NDArray[np.float32]]:
    """Return the rows of one rank's evaluation step, int64 [batch], and their weights, float32 [batch].

    Over all ranks and steps each sample comes once with weight 1. Positions beyond the last sample repeat its row with
    weight 0, so that all ranks and steps have the same shapes.
    """
    positions = step * world_size * batch + rank + world_size * np.arange(batch, dtype=np.int64)
    return np.minimum(positions, count - 1), (positions < count).astype(np.float32)
