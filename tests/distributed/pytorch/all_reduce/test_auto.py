"""`algorithm: auto` on real processes: all ranks make one choice, the run keeps it, another world does not reuse it."""

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
from podscale.pytorch.stored_choice import StoredChoice
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
def test_every_rank_makes_the_same_choice(run_world: RunWorld, tmp_path: Path, size: int) -> None:
    section = AUTO if size > 1 else AllReduceSection(algorithm="auto")

    def body(world: World) -> Any:
        from podscale.pytorch.all_reduce import build_all_reduce
        from podscale.pytorch.all_reduce.auto import resolve_algorithm

        first = resolve_algorithm(section, world, BYTES, StoredChoice(tmp_path / "run" / "all_reduce.json"))
        again = resolve_algorithm(section, world, BYTES, StoredChoice(tmp_path / "run" / "all_reduce.json"))
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


def test_another_world_or_model_chooses_again(run_world: RunWorld, tmp_path: Path) -> None:
    keep = tmp_path / "all_reduce.json"

    def body(world: World) -> list[bool]:
        from podscale.pytorch.all_reduce.auto import resolve_algorithm

        return [
            resolve_algorithm(AUTO, world, size, StoredChoice(keep)).is_reused for size in (BYTES, BYTES, 2 * BYTES)
        ]

    assert run_world(2, body)[1] == [False, True, False]
    assert run_world(4, body)[3] == [False, True, False]
    keep.write_text("{ torn")
    assert run_world(2, body)[0] == [False, True, False]
    assert json.loads(keep.read_text())["choice"]["algorithm"]


def test_a_wire_format_for_rows_chooses_an_algorithm_with_rows(run_world: RunWorld, tmp_path: Path) -> None:
    section = AllReduceSection(algorithm="auto", row=2, wire_row="bf16", wire_column="int8")

    def body(world: World) -> tuple[str, ...]:
        from podscale.pytorch.all_reduce.auto import resolve_algorithm

        choices = [
            resolve_algorithm(section, world, BYTES, StoredChoice(tmp_path / "all_reduce.json"), sharded=halves)
            for halves in (False, True)
        ]
        return tuple(choice.section(section).algorithm for choice in choices)

    either, halved = run_world(4, body)[0]
    assert either in ("hierarchical", "torus2d")
    assert halved == "torus2d", "a sharded step needs an algorithm with a reduce-scatter"


class StopAfter(StopRequest):
    """Stop request after `steps` reads, one a step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    @property
    def requested(self) -> bool:  # type: ignore[override]
        self._left -= 1
        return self._left < 0

    @requested.setter
    def requested(self, value: bool) -> None:
        pass


def train_a_while(config: RunConfig, shards: Path, world: World, steps: int) -> bool:
    """Run the training stage of a rank. Returns False if it was stopped."""
    run = RunDirectory.for_config(config)
    worker_env = WorkerEnv(config, "train", str(shards), run.path / "ranks")
    worker_env.rank_directory.mkdir(parents=True, exist_ok=True)
    try:
        run_training(worker_env, world, ShardSet.open(shards), run, StopAfter(steps), ProgressTracker())
    except Preempted:
        return False
    return True


def test_a_resumed_run_keeps_its_choice_and_its_bits(
    run_world: RunWorld, make_shard_set: MakeShardSet, tmp_path: Path
) -> None:
    shards = make_shard_set()
    auto = document(tmp_path / "auto", train__all_reduce={"algorithm": "auto", "row": 2}, train__fused_kernels="auto")
    explicit = document(tmp_path / "given", train__all_reduce={"algorithm": "tree", "row": 2, "bucket_mb": 0.01})

    assert run_world(4, lambda world: train_a_while(auto, shards, world, 0)) == [False] * 4
    keep = RunDirectory.for_config(auto).all_reduce
    choice = json.loads(keep.read_text())
    assert choice["choice"]["algorithm"] == chosen(auto)[0][0]
    choice["choice"] |= {"algorithm": "tree", "bucket_mb": 0.01}  # a choice that this machine would not make
    keep.write_text(json.dumps(choice))
    shutil.rmtree(RunDirectory.for_config(auto).checkpoints)

    assert run_world(4, lambda world: train_a_while(auto, shards, world, 5)) == [False] * 4
    assert run_world(4, lambda world: train_a_while(auto, shards, world, 1000)) == [True] * 4
    assert run_world(4, lambda world: train_a_while(explicit, shards, world, 1000)) == [True] * 4
    assert chosen(auto)[1:] == [("tree", True), ("tree", True)]
    assert_same_bits(final_state(auto), final_state(explicit))


def chosen(config: RunConfig) -> list[tuple[str, bool]]:
    """Return the algorithm of each launch, and whether it was reused, from the event log."""
    records = read_records(RunDirectory.for_config(config).metrics)
    return [(record["algorithm"], record["kept"]) for record in records if record.get("event") == "all_reduce"]
