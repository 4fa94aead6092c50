"""The plan: deterministic, stable when images are added, balanced; unusable data sets are refused."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.config.data import DataSection
from podscale.data.sharding.shard_plan import ShardPlan, describe_changes, plan_shards
from podscale.data.sources import SourceItem
from podscale.util.progress_reports import ProgressUpdate
from tests.support.refusals import refused


class Fixed:
    """Source of made-up items."""

    def __init__(self, items: Sequence[SourceItem]) -> None:
        self._items = items

    def items(self) -> Iterator[SourceItem]:
        return iter(self._items)

    def read(self, item: SourceItem) -> bytes:
        raise AssertionError("planning reads no image")


def images(count: int, classes: int = 3, size: int = 5000) -> list[SourceItem]:
    return [SourceItem(b"c%d/%05d.jpg" % (i % classes, i), f"c{i % classes}", size + i % 97) for i in range(count)]


def split_of(plan: ShardPlan) -> dict[bytes, str]:
    return {
        entry.item.name: split
        for split in plan.bounds
        for shard in range(plan.shard_count(split))
        for entry in plan.entries(split, shard)
    }


def test_the_order_of_listing_does_not_matter() -> None:
    items = images(300)
    shuffled = random.Random(1).sample(items, len(items))
    data = DataSection(source="x", shard_bytes=100_000)
    assert plan_shards(Fixed(items), data).fingerprint == plan_shards(Fixed(shuffled), data).fingerprint


def test_containers_do_not_depend_on_the_order_of_listing() -> None:
    items = [item._replace(container=b"t%d.tar" % (i % 3), offset=512 * i + 512) for i, item in enumerate(images(60))]
    plans = [plan_shards(Fixed(order), DataSection(source="x")) for order in (items, items[::-1])]
    assert plans[0].fingerprint == plans[1].fingerprint
    found = {entry.item.name: entry.item for entry in plans[0].entries("train", 0)}
    assert all(found[item.name][4:] == item[4:] for item in items if item.name in found)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"policy": "convert"}, {"resize_short": 64}, {"quality": 80}, {"shard_bytes": 50_000}]
)
def test_options_that_change_the_shards_change_the_fingerprint(change: dict[str, int]) -> None:
    data = DataSection(source="x", shard_bytes=100_000)
    other = data.model_copy(update=change)
    assert plan_shards(Fixed(images(300)), data).fingerprint != plan_shards(Fixed(images(300)), other).fingerprint


def test_every_image_is_planned_once_and_mixed() -> None:
    items = images(1500)
    plan = plan_shards(Fixed(items), DataSection(source="x", shard_bytes=500_000))
    assert sorted(split_of(plan)) == sorted(item.name for item in items)
    assert [e.key for s in range(plan.shard_count("train")) for e in plan.entries("train", s)] == list(range(1200))
    # a listing has runs of one class; after the shuffle, neighbours have the same class only by chance (1/3)
    labels = plan.columns["label"][:1200]
    assert abs((labels[1:] == labels[:-1]).mean() - 1 / 3) < 0.05


def test_a_plain_hold_out_moves_nothing_when_images_are_added() -> None:
    data = DataSection(source="x", stratify=False, validation_fraction=0.25)
    before = split_of(plan_shards(Fixed(images(1000)), data))
    after = split_of(plan_shards(Fixed(images(1500)), data))
    assert all(after[name] == split for name, split in before.items())
    assert 0.2 < sum(split == "validation" for split in after.values()) / 1500 < 0.3


def test_a_stratified_hold_out_takes_the_same_share_of_every_class() -> None:
    items = images(400, classes=2) + [SourceItem(b"rare/%d.jpg" % i, "rare", 100) for i in range(2)]
    plan = plan_shards(Fixed(items), DataSection(source="x", validation_fraction=0.1))
    train = int(plan.bounds["train"][-1])
    assert np.bincount(plan.columns["label"][train:]).tolist() == [20, 20, 1]
    # adding one image to a class moves at most one other of that class
    more = plan_shards(
        Fixed([*items, SourceItem(b"c0/new.jpg", "c0", 100)]), DataSection(source="x", validation_fraction=0.1)
    )
    before, after = split_of(plan), split_of(more)
    assert sum(before[name] != after[name] for name in before) <= 1


def test_given_splits_are_kept() -> None:
    items = [item._replace(split="validation" if i % 5 == 0 else "train") for i, item in enumerate(images(100, 2))]
    assert split_of(plan_shards(Fixed(items), DataSection(source="x"))) == {item.name: item.split for item in items}


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300_000), min_size=12, max_size=120),
    shard_bytes=st.integers(4096, 1_000_000),
    min_shards=st.integers(1, 2),
)
def test_shards_are_contiguous_never_empty_and_near_their_size(
    sizes: list[int], shard_bytes: int, min_shards: int
) -> None:
    items = [SourceItem(b"%04d.jpg" % i, "ab"[i % 2], size) for i, size in enumerate(sizes)]
    data = DataSection(source="x", shard_bytes=shard_bytes, min_shards=min_shards, validation_fraction=0.3)
    plan = plan_shards(Fixed(items), data)
    for split, bounds in plan.bounds.items():
        assert (np.diff(bounds) >= 1).all()
        assert plan.shard_count(split) >= min_shards
        assert plan.shard_bytes(split).max() <= shard_bytes + 2 * (max(sizes) + 4 * 512)
    assert plan.bounds["train"][-1] == plan.bounds["validation"][0]
    assert plan.bounds["validation"][-1] == len(items)


def test_a_plan_is_read_back(tmp_path: Path) -> None:
    names = [b"c0/\xff\xfe.jpg", b"c0/new\nline.jpg", b"c1/a.jpg", b"c1/b.jpg"]
    plan = plan_shards(Fixed([SourceItem(name, name[:2].decode(), 7) for name in names]), DataSection(source="x"))
    plan.write(tmp_path / "plan")
    back = ShardPlan.read(tmp_path / "plan")
    assert (back.fingerprint, back.classes, sorted(back.source_names)) == (
        plan.fingerprint,
        ["c0", "c1"],
        sorted(names),
    )
    assert list(back.entries("train", 0)) == list(plan.entries("train", 0))


def test_a_cut_plan_is_refused(tmp_path: Path) -> None:
    plan_shards(Fixed(images(50)), DataSection(source="x")).write(tmp_path / "plan")
    whole = (tmp_path / "plan").read_bytes()
    for length in (0, 5, 100, len(whole) - 10):
        (tmp_path / "plan").write_bytes(whole[:length])
        with refused(field=tmp_path / "plan"):
            ShardPlan.read(tmp_path / "plan")


def test_the_class_map_is_the_sorted_names_or_the_given_one() -> None:
    assert plan_shards(Fixed(images(30)), DataSection(source="x")).classes == ["c0", "c1", "c2"]
    plan = plan_shards(Fixed(images(30)), DataSection(source="x", classes=("c2", "c0", "c1")))
    assert plan.classes == ["c2", "c0", "c1"]
    assert all(e.label == ["c2", "c0", "c1"].index(e.item.name[:2].decode()) for e in plan.entries("train", 0))


@pytest.mark.parametrize(
    ("items", "options", "field", "expected"),
    [
        ([], {}, "data.source", "no images"),
        (images(10, classes=1), {}, "data.source", "'c0'"),
        ([*images(10), images(10)[3]], {}, "data.source", "c0/00003.jpg is listed twice"),
        (images(10), {"classes": ("c0", "c1", "cat")}, "data.source", "missing: 'cat', unexpected: 'c2'"),
        (images(10), {"classes": ("c0", "c0", "c1", "c2")}, "data.classes", "twice"),
        (
            [*images(10), SourceItem(b"one/1.jpg", "one", 10)],
            {},
            "data.source",
            "without an image in the validation split: 'one'",
        ),
        (
            [i._replace(split="train") for i in images(9)]
            + [i._replace(split="validation", name=b"v" + i.name) for i in images(9) if i.label != "c1"],
            {},
            "data.source",
            "without an image in the validation split: 'c1'",
        ),
        ([images(9)[0]._replace(split="validation"), *images(9)[1:]], {}, "data.source", "some images only"),
        (images(10), {"min_shards": 5}, "data.min_shards", "validation split has only 3 images"),
    ],
)
def test_an_unusable_data_set_is_refused(
    items: list[SourceItem], options: dict[str, object], field: str, expected: str
) -> None:
    with refused(expected, field=field):
        plan_shards(Fixed(items), DataSection(source="x", **options))


def test_only_the_chosen_classes_are_packed() -> None:
    every = plan_shards(Fixed(images(300)), DataSection(source="x"))
    plan = plan_shards(Fixed(images(300)), DataSection(source="x", only_classes=("c2", "c0")))
    assert plan.classes == ["c0", "c2"]
    assert split_of(plan) == {name: split for name, split in split_of(every).items() if not name.startswith(b"c1")}
    assert all(entry.label == (entry.item.label == "c2") for entry in plan.entries("train", 0))
    ordered = DataSection(source="x", only_classes=("c2", "c0"), classes=("c2", "c0"))
    assert plan_shards(Fixed(images(300)), ordered).classes == ["c2", "c0"]


@pytest.mark.parametrize(
    ("names", "expected"), [(("c0", "c11"), "Did you mean c1?"), (("cat", "dog"), "It has 'c0', 'c1', 'c2'.")]
)
def test_a_class_that_the_source_lacks_is_refused(names: tuple[str, ...], expected: str) -> None:
    with refused(expected, field="data.only_classes", got="c11" if "c11" in names else "cat"):
        plan_shards(Fixed(images(30)), DataSection(source="x", only_classes=names))


@pytest.mark.parametrize("holdout", [None, 0.1])
def test_a_limit_of_training_images_leaves_the_validation_images(holdout: float | None) -> None:
    data = DataSection(source="x", holdout_fraction=holdout)
    every = split_of(plan_shards(Fixed(images(300)), data))
    few, more = (
        split_of(plan_shards(Fixed(images(300)), data.model_copy(update={"images_per_class": count})))
        for count in (5, 20)
    )
    for chosen, count in ((few, 5), (more, 20)):
        assert chosen.items() <= every.items(), "every image stays in its split"
        assert [name for name, split in chosen.items() if split == "validation"] == [
            name for name, split in every.items() if split == "validation"
        ]
        labels = [name[:2] for name, split in chosen.items() if split == "train"]
        assert [labels.count(label) for label in (b"c0", b"c1", b"c2")] == [count] * 3
    assert few.items() <= more.items(), "a smaller limit takes a subset"
    other = split_of(plan_shards(Fixed(images(300)), data.model_copy(update={"images_per_class": 5, "seed": 1})))
    assert other != few
    assert split_of(plan_shards(Fixed(images(300)), data.model_copy(update={"images_per_class": 1000}))) == every


def test_changes_are_described() -> None:
    data = DataSection(source="x")
    before = plan_shards(Fixed(images(30)), data)
    now = plan_shards(Fixed([*(i._replace(size=1) if n == 4 else i for n, i in enumerate(images(32)[2:]))]), data)
    assert describe_changes(before, now) == "2 added (such as c0/00030.jpg), 2 removed (such as c0/00000.jpg), " + (
        "1 changed (such as c0/00006.jpg)"
    )


def test_listing_reports_progress() -> None:
    updates: list[ProgressUpdate] = []
    plan_shards(Fixed(images(30)), DataSection(source="x"), updates.append)
    assert (updates[-1].stage, updates[-1].images, updates[-1].done) == ("list", 30, True)


@pytest.mark.parametrize("stratify", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_a_held_out_part_of_the_training_images_replaces_the_validation_images(given: bool, stratify: bool) -> None:
    items = images(1000, 2)
    if given:
        items = [item._replace(split="validation" if i % 5 == 0 else "train") for i, item in enumerate(items)]
    data = DataSection(source="x", stratify=stratify)
    reported = split_of(plan_shards(Fixed(items), data))
    selection = split_of(plan_shards(Fixed(items), data.model_copy(update={"holdout_fraction": 0.1})))
    assert set(selection) == {name for name, split in reported.items() if split == "train"}
    held_out = sum(split == "validation" for split in selection.values())
    assert held_out == (80 if stratify else pytest.approx(80, abs=30))
