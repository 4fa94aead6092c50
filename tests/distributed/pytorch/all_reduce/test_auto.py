"""`auto` over real processes: one decision for all, kept for the run, never taken over by another world."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from podscale.config import RunConfig
from podscale.config.train import AllReduceSection
from podscale.data.shard_set import ShardSet
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.step_status import StopRequest
from podscale.distributed.worker_env import WorkerEnv
from podscale.errors import Preempted
from podscale.pytorch.worker import run_training
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from podscale.telemetry.events import read_records
from tests.conftest import MakeShardSet
from tests.distributed.conftest import RunWorld
from tests.distributed.training.test_training import assert_same_bits, document, final_state

BYTES = 4 * 1_000_000
AUTO = AllReduceSection(algorithm="auto", row=2)


@pytest.mark.parametrize("size", [1, 4])
def test_every_rank_comes_to_the_same(run_world: RunWorld, tmp_path: Path, size: int) -> None:
    section = AUTO if size > 1 else AllReduceSection(algorithm="auto")

    def body(world: World) -> Any:
        from podscale.pytorch.all_reduce import build_all_reduce
        from podscale.pytorch.all_reduce.auto import resolve_algorithm

        first = resolve_algorithm(section, world, BYTES, tmp_path / "run" / "all_reduce.json")
        again = resolve_algorithm(section, world, BYTES, tmp_path / "run" / "all_reduce.json")
        build_all_reduce(first.section(section), world)
        return first, again, first.section(section)

    answers = run_world(size, body)
    first, again, chosen = answers[0]
    assert all(answer == answers[0] for answer in answers)
    assert (first.is_reused, again.is_reused) == (False, True)
    assert (again.choice, again.fabric) == (first.choice, first.fabric)
    assert chosen.algorithm in ("flat", "tree", "hierarchical", "torus2d")
    assert chosen.row == section.row
    assert first.facts()["algorithm"] == chosen.algorithm
    if size > 1:
        assert 1e6 < 1 / first.fabric.row.per_byte < 1e12, "bytes/s between two processes of one machine"


def test_another_world_or_another_model_decides_anew(run_world: RunWorld, tmp_path: Path) -> None:
    keep = tmp_path / "all_reduce.json"

    def body(world: World) -> list[bool]:
        from podscale.pytorch.all_reduce.auto import resolve_algorithm

        return [resolve_algorithm(AUTO, world, size, keep).is_reused for size in (BYTES, BYTES, 2 * BYTES)]

    assert run_world(2, body)[1] == [False, True, False]
    assert run_world(4, body)[3] == [False, True, False]
    keep.write_text("{ torn")
    assert run_world(2, body)[0] == [False, True, False]
    assert json.loads(keep.read_text())["choice"]["algorithm"]


def test_a_format_for_rows_asks_for_an_algorithm_with_rows(run_world: RunWorld, tmp_path: Path) -> None:
    section = AllReduceSection(algorithm="auto", row=2, wire_row="bf16", wire_column="bf16")

    def body(world: World) -> tuple[str, ...]:
        from podscale.pytorch.all_reduce.auto import resolve_algorithm

        found = [
            resolve_algorithm(section, world, BYTES, tmp_path / "all_reduce.json", sharded=halves)
            for halves in (False, True)
        ]
        return tuple(settled.section(section).algorithm for settled in found)

    either, halved = run_world(4, body)[0]
    assert either in ("hierarchical", "torus2d")
    assert halved == "torus2d", "a sharded update needs one that stops half way"


class StopAfter(StopRequest):
    """Asks to stop when it has been looked at so often: once a step."""

    def __init__(self, updates: int) -> None:
        super().__init__()
        self._left = updates

    @property
    def requested(self) -> bool:  # type: ignore[override]
        self._left -= 1
        return self._left < 0

    @requested.setter
    def requested(self, value: bool) -> None:
        pass


def train_a_while(config: RunConfig, shards: Path, world: World, updates: int) -> bool:
    """The stage as a rank carries it out; whether it came to its end."""
    run = RunDirectory.for_config(config)
    place = WorkerEnv(config, "train", str(shards), run.path / "ranks")
    place.rank_directory.mkdir(parents=True, exist_ok=True)
    try:
        run_training(place, world, ShardSet.open(shards), run, StopAfter(updates), ProgressTracker())
    except Preempted:
        return False
    return True


def test_a_run_that_continues_keeps_its_choice_and_its_bits(
    run_world: RunWorld, make_shard_set: MakeShardSet, tmp_path: Path
) -> None:
    shards = make_shard_set()
    auto = document(tmp_path / "auto", train__all_reduce={"algorithm": "auto", "row": 2})
    given = document(tmp_path / "given", train__all_reduce={"algorithm": "tree", "row": 2, "bucket_mb": 0.01})

    assert run_world(4, lambda world: train_a_while(auto, shards, world, 0)) == [False] * 4
    keep = RunDirectory.for_config(auto).all_reduce
    found = json.loads(keep.read_text())
    assert found["choice"]["algorithm"] == chosen(auto)[0][0]
    found["choice"] |= {"algorithm": "tree", "bucket_mb": 0.01}  # what nothing on this machine would come to
    keep.write_text(json.dumps(found))
    shutil.rmtree(RunDirectory.for_config(auto).checkpoints)

    assert run_world(4, lambda world: train_a_while(auto, shards, world, 5)) == [False] * 4
    assert run_world(4, lambda world: train_a_while(auto, shards, world, 1000)) == [True] * 4
    assert run_world(4, lambda world: train_a_while(given, shards, world, 1000)) == [True] * 4
    assert chosen(auto)[1:] == [("tree", True), ("tree", True)]
    assert_same_bits(final_state(auto), final_state(given))


def chosen(config: RunConfig) -> list[tuple[str, bool]]:
    """What each launch said of its choice."""
    records = read_records(RunDirectory.for_config(config).metrics)
    return [(record["algorithm"], record["kept"]) for record in records if record.get("event") == "all_reduce"]
