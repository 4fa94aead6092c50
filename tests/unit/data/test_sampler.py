"""The sampler: permutations, ranks, hosts, starting at any step, quality of the shuffle, and golden values."""

from collections import Counter
from dataclasses import dataclass
from math import factorial

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.config.run_config import RunConfig
from podscale.data.rng import derive_key, mix64, permute, uniform
from podscale.data.sampler import Sampler, assign_shards_to_groups, build_sampler, evaluation_rows, evaluation_steps
from podscale.data.step_positions import StepPositions
from tests.support.refusals import refused

counts = st.integers(1, 3000)
seeds = st.integers(0, 2**63 - 1)


@dataclass
class Shards:
    """The part of a split that the sampler reads."""

    shard: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.shard)

    def column(self, name: str) -> npt.NDArray[np.int64]:
        assert name == "shard"
        return self.shard


def shards_of(*sizes: int) -> Shards:
    return Shards(np.repeat(np.arange(len(sizes)), sizes))


def blocked(batch: int, groups: int, nodes: int = 1) -> RunConfig:
    return RunConfig.model_validate(
        {
            "input": {"order": "blocked", "groups": groups},
            "train": {"global_batch": batch},
            "launch": {"nodes": nodes},
            "run": {"seed": 5},
        }
    )


@given(counts, seeds)
@settings(max_examples=200, deadline=None)
def test_permute_is_a_permutation(count: int, seed: int) -> None:
    rows = permute(np.arange(count), count, derive_key(seed))
    assert np.array_equal(np.sort(rows), np.arange(count))


@given(counts, seeds, st.data())
@settings(max_examples=50, deadline=None)
def test_permute_answers_single_positions_and_mixed_keys_alike(count: int, seed: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, count - 1))
    whole = permute(np.arange(count), count, derive_key(seed))
    assert permute(np.array([position]), count, derive_key(seed)) == whole[position]
    keys = derive_key(np.array([seed, seed ^ 1], dtype=np.uint64))
    assert permute(np.array([position, position]), count, keys)[0] == whole[position]


def test_golden_values() -> None:
    """These numbers decide the sample order of every run. Changing them makes all runs irreproducible."""
    assert mix64(np.array([1], dtype=np.uint64)) == [6238072747940578789]
    assert derive_key(1, 2, 3) == [16914669369030367833]
    assert permute(np.arange(10), 10, derive_key(0)).tolist() == [4, 3, 5, 9, 1, 0, 6, 8, 2, 7]
    assert permute(np.arange(5), 1_281_167, derive_key(42, 7)).tolist() == [728714, 1192368, 224608, 964838, 822112]
    order = Sampler(3, StepPositions.constant(1437, 6))
    assert order.global_batch(239).rows.tolist() == [534, 179, 1060, 64, 1147, 32]
    assert order.global_batch(239).epochs.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_permutation_of_imagenet_costs_little_memory_and_is_complete() -> None:
    count = 1_281_167
    rows = permute(np.arange(count), count, derive_key(9))
    assert np.bincount(rows, minlength=count).max() == 1


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7])
def test_all_orders_of_a_few_samples_are_equally_likely(count: int) -> None:
    trials = 40 * factorial(count)
    keys = np.repeat(derive_key(11, np.arange(trials)), count)
    orders = permute(np.tile(np.arange(count), trials), count, keys).reshape(trials, count)
    seen = np.array(list(Counter(map(tuple, orders.tolist())).values()))
    expected, freedom = trials / factorial(count), factorial(count) - 1
    chi2 = ((seen - expected) ** 2).sum() / expected + (factorial(count) - len(seen)) * expected
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("count", [100, 1437, 9469, 100_003])
def test_the_shuffle_has_no_visible_structure(count: int) -> None:
    """Serial correlation at several lags, correlation with the position and between epochs; sigma is 1/sqrt(n)."""
    bound = 5 / np.sqrt(count)
    first = permute(np.arange(count), count, derive_key(1, 0)).astype(float)
    second = permute(np.arange(count), count, derive_key(1, 1)).astype(float)
    pairs = [(first[:-lag], first[lag:]) for lag in (1, 2, 7)]
    pairs += [(first, np.arange(count)), (first, second)]
    for left, right in pairs:
        assert abs(np.corrcoef(left, right)[0, 1]) < bound


def test_every_sample_goes_everywhere() -> None:
    """2-d uniformity: over many keys, position x value is flat (chi-square), also for neighbouring differences."""
    count, trials = 97, 20_000
    keys = np.repeat(derive_key(2, np.arange(trials)), count)
    rows = permute(np.tile(np.arange(count), trials), count, keys).reshape(trials, count)
    for table in (rows, (rows[:, 1:] - rows[:, :-1]) % count):
        where = np.tile(np.arange(table.shape[1]), trials)
        cells = np.bincount(where * count + table.ravel(), minlength=table.shape[1] * count).astype(float)
        cells = cells[cells > 0]
        expected = table.size / len(cells)
        chi2 = ((cells - expected) ** 2).sum() / expected
        assert abs(chi2 - len(cells)) < 5 * np.sqrt(2 * len(cells))


def test_uniform_numbers_are_uniform() -> None:
    numbers = uniform(derive_key(1, np.arange(100_000)))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.abs(np.histogram(numbers, 20)[0] - 5000).max() < 5 * np.sqrt(5000)


@given(count=st.integers(1, 300), batch=st.integers(1, 64), seed=seeds)
@settings(max_examples=12, deadline=None)
def test_epochs_are_permutations_of_the_stream(count: int, batch: int, seed: int) -> None:
    """Batches may span two epochs; each epoch still has every sample once."""
    order = Sampler(seed, StepPositions.constant(count, batch))
    steps = -(-3 * count // batch)
    stream = np.concatenate([order.global_batch(step).rows for step in range(steps)])[: 3 * count]
    epochs = np.concatenate([order.global_batch(step).epochs for step in range(steps)])[: 3 * count]
    assert np.array_equal(epochs, np.repeat(np.arange(3), count))
    for epoch in stream.reshape(3, count):
        assert np.array_equal(np.sort(epoch), np.arange(count))


def test_epochs_and_seeds_differ() -> None:
    order = Sampler(0, StepPositions.constant(1000, 1000))
    assert (order.global_batch(0).rows != order.global_batch(1).rows).mean() > 0.99
    assert (
        order.global_batch(0).rows != Sampler(1, StepPositions.constant(1000, 1000)).global_batch(0).rows
    ).mean() > 0.99


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 64])
def test_ranks_share_the_global_batch(world: int) -> None:
    order = Sampler(1, StepPositions.constant(100, 48))
    for step in range(5):
        batch = order.global_batch(step)
        shared = np.full(48, -1)
        for rank in range(world):
            part = order.rank_batch(step, rank, world)
            shared[rank::world] = part.rows
            assert np.array_equal(part.epochs, batch.epochs[rank::world])
        assert np.array_equal(shared, batch.rows)


def test_the_global_order_takes_every_document() -> None:
    config = RunConfig.model_validate({"train": {"global_batch": 32}, "run": {"seed": 3}})
    order = build_sampler(config, shards_of(50, 50))
    assert np.array_equal(order.global_batch(2).rows, Sampler(3, StepPositions.constant(100, 32)).global_batch(2).rows)
    with refused("rejects.jsonl"):
        build_sampler(config, Shards(np.array([], dtype=int)))


SIZES = (25, 26, 24, 25, 25, 27, 25, 24)


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_blocked_hosts_read_their_own_groups_and_see_the_same_global_batches(nodes: int, per_host: int) -> None:
    split = shards_of(*SIZES)
    reference = build_sampler(blocked(32, 4), split)
    order = build_sampler(blocked(32, 4, nodes), split)
    world = nodes * per_host
    shards_of_host: list[set[int]] = [set() for _ in range(nodes)]
    for step in range(20):
        batch = reference.global_batch(step)
        assert np.array_equal(order.global_batch(step).rows, batch.rows)
        parts = [order.rank_batch(step, rank, world) for rank in range(world)]
        assert {len(part) for part in parts} == {32 // world}
        rows, epochs = (np.concatenate([getattr(part, name) for part in parts]) for name in ("rows", "epochs"))
        together = sorted(zip(rows.tolist(), epochs.tolist(), strict=True))
        assert together == sorted(zip(batch.rows.tolist(), batch.epochs.tolist(), strict=True))
        for rank, part in enumerate(parts):
            shards_of_host[rank // per_host] |= set(split.shard[part.rows].tolist())
            assert np.isin(part.rows, order.rows_of_host(rank // per_host)).all()
    assert sum(len(shards) for shards in shards_of_host) == len(SIZES)
    assert set.union(*shards_of_host) == set(range(len(SIZES)))


def test_blocked_one_host_follows_the_rule_of_strides() -> None:
    order = build_sampler(blocked(32, 4), shards_of(*SIZES))
    for rank in range(4):
        assert np.array_equal(order.rank_batch(3, rank, 4).rows, order.global_batch(3).rows[rank::4])


def test_blocked_groups_take_equal_parts_and_have_epochs_of_their_own() -> None:
    order = build_sampler(blocked(32, 4), shards_of(*SIZES))
    assert order.groups is not None
    steps = 100
    batches = [order.global_batch(step) for step in range(steps)]
    for number, members in enumerate(order.groups):
        part = slice(8 * number, 8 * number + 8)
        rows = np.concatenate([batch.rows[part] for batch in batches])
        epochs = np.concatenate([batch.epochs[part] for batch in batches])
        for epoch in range(steps * 8 // len(members)):
            assert np.array_equal(np.sort(rows[epochs == epoch]), members)
    sizes = [len(members) for members in order.groups]
    assert sum(sizes) == sum(SIZES)
    assert max(sizes) - min(sizes) <= 3


@given(st.integers(1, 8), st.integers(1, 5), st.data())
@settings(max_examples=50, deadline=None)
def test_deal_makes_disjoint_groups_of_shards(number: int, each: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(95, 100), min_size=number * each, max_size=number * each))
    shard = np.repeat(np.arange(len(sizes)), sizes)
    np.random.default_rng(len(sizes)).shuffle(shard)
    groups = assign_shards_to_groups(shard, number)
    assert np.array_equal(np.sort(np.concatenate(groups)), np.arange(len(shard)))
    owners = [set(shard[group].tolist()) for group in groups]
    assert sum(map(len, owners)) == len(sizes)


def test_blocked_refuses_what_it_cannot_do() -> None:
    with refused("2 shards", field="input.groups", got=4):
        build_sampler(blocked(32, 4), shards_of(50, 50))
    with refused("20 images", " 40", field="input.groups", got=4):
        build_sampler(blocked(32, 4), shards_of(20, 20, 20, 20, 20))
    with refused("3 hosts", "3 or 6", field="input.groups", got=4):
        build_sampler(blocked(48, 4, nodes=3), shards_of(*SIZES))
    with refused(" 3 ", " 8", "train.global_batch 32", field="input.groups", got=4):
        build_sampler(blocked(32, 4, nodes=3), shards_of(*SIZES))
    order = build_sampler(blocked(32, 4, nodes=2), shards_of(*SIZES))
    assert [order.host_of(rank, 6) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    for ask in (lambda: order.rank_batch(0, 0, 9), lambda: order.host_of(0, 9)):
        with refused("9 ranks", "Choose 1.", field="launch.nodes", got=2):
            ask()


@given(count=st.integers(1, 300), world=st.integers(1, 9), batch=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_evaluation_sees_every_sample_once(count: int, world: int, batch: int) -> None:
    steps = evaluation_steps(count, world, batch)
    parts = [evaluation_rows(count, step, rank, world, batch) for step in range(steps) for rank in range(world)]
    rows = np.concatenate([rows[weights == 1] for rows, weights in parts])
    assert np.array_equal(np.sort(rows), np.arange(count))
    assert all(len(rows) == batch and rows.max() < count for rows, _ in parts)
    assert sum(weights.sum() for _, weights in parts) == count
    assert any(weights.any() for _, weights in parts[-world:])


@pytest.mark.parametrize("order", ["global", "blocked"])
def test_batches_that_change_use_every_sample_once_an_epoch(order: str) -> None:
    """Counted over the steps, with ranks of two world sizes; the stream is that of a constant batch."""
    shards = Shards(np.repeat(np.arange(4), 60))
    phases = [{"start": 1, "global_batch": 64}, {"start": 2.5, "global_batch": 8}]
    document = {
        "input": {"order": order, "groups": 4 if order == "blocked" else 1},
        "train": {"epochs": 5, "global_batch": 32, "phases": phases},
    }
    changing = build_sampler(RunConfig.model_validate(document), shards)
    sizes = [len(changing.global_batch(step)) for step in range(20)]
    assert sizes == [32] * 8 + [64] * 6 + [8] * 6, "256 of 240 samples are the first beyond epoch 1"
    document["train"] = {"epochs": 5, "global_batch": 4 if order == "blocked" else 1}
    single = build_sampler(RunConfig.model_validate(document), shards)
    steps = range(8 + 6 + 70)
    used = [changing.global_batch(step) for step in steps]
    total = sum(map(len, used))
    stream = [single.global_batch(step) for step in range(total // single.positions.ranges[0].batch)]
    if order == "global":
        assert np.array_equal(np.concatenate([u.rows for u in used]), np.concatenate([s.rows for s in stream]))
    pairs = Counter(
        zip(*(np.concatenate([getattr(u, n) for u in used]).tolist() for n in ("epochs", "rows")), strict=True)
    )
    assert set(pairs.values()) == {1}
    assert all(sum(epoch == number for epoch, _ in pairs) == 240 for number in range(total // 240))
    for world_size in (2, 4):
        for step in (7, 8, 13, 14):
            parts = [changing.rank_batch(step, rank, world_size).rows for rank in range(world_size)]
            assert sorted(np.concatenate(parts).tolist()) == sorted(changing.global_batch(step).rows.tolist())
