"""`auto` over real processes: one decision for all, kept for the run, never taken over by another world."""

import json
from pathlib import Path
from typing import Any

import pytest

from podscale.config.model import AllReduceSection
from podscale.pytorch.world import World
from tests.distributed.conftest import RunWorld

BYTES = 4 * 1_000_000
AUTO = AllReduceSection(algorithm="auto", row=2)


@pytest.mark.parametrize("size", [1, 4])
def test_every_rank_comes_to_the_same(run_world: RunWorld, tmp_path: Path, size: int) -> None:
    section = AUTO if size > 1 else AllReduceSection(algorithm="auto")

    def body(world: World) -> Any:
        from podscale.pytorch.allreduce import build_all_reduce
        from podscale.pytorch.allreduce.auto import settle

        first = settle(section, world, BYTES, tmp_path / "run" / "all_reduce.json")
        again = settle(section, world, BYTES, tmp_path / "run" / "all_reduce.json")
        build_all_reduce(first.section(section), world)
        return first, again, first.section(section)

    answers = run_world(size, body)
    first, again, chosen = answers[0]
    assert all(answer == answers[0] for answer in answers)
    assert (first.kept, again.kept) == (False, True)
    assert (again.choice, again.fabric) == (first.choice, first.fabric)
    assert chosen.algorithm in ("flat", "tree", "hierarchical", "torus2d")
    assert chosen.row == section.row
    assert first.facts()["algorithm"] == chosen.algorithm
    if size > 1:
        assert 1e6 < 1 / first.fabric.row.per_byte < 1e12, "bytes/s between two processes of one machine"


def test_another_world_or_another_model_decides_anew(run_world: RunWorld, tmp_path: Path) -> None:
    keep = tmp_path / "all_reduce.json"

    def body(world: World) -> list[bool]:
        from podscale.pytorch.allreduce.auto import settle

        return [settle(AUTO, world, size, keep).kept for size in (BYTES, BYTES, 2 * BYTES)]

    assert run_world(2, body)[1] == [False, True, False]
    assert run_world(4, body)[3] == [False, True, False]
    keep.write_text("{ torn")
    assert run_world(2, body)[0] == [False, True, False]
    assert json.loads(keep.read_text())["choice"]["algorithm"]


def test_a_format_for_rows_asks_for_an_algorithm_with_rows(run_world: RunWorld, tmp_path: Path) -> None:
    section = AllReduceSection(algorithm="auto", row=2, wire_row="bf16", wire_column="bf16")

    def body(world: World) -> tuple[str, ...]:
        from podscale.pytorch.allreduce.auto import settle

        found = [settle(section, world, BYTES, tmp_path / "all_reduce.json", halves=halves) for halves in (False, True)]
        return tuple(settled.section(section).algorithm for settled in found)

    either, halved = run_world(4, body)[0]
    assert either in ("hierarchical", "torus2d")
    assert halved == "torus2d", "a sharded update needs one that stops half way"
