"""Four ranks, one of which has another configuration: all raise one error that names it."""

import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import podscale
from podscale.config import RunConfig
from podscale.data.shard_set import ShardSet
from podscale.distributed.rank_group import RankGroup
from podscale.errors import HangDetected, InputError
from podscale.pytorch.software import library_versions
from podscale.pytorch.world import TorchStore, World, join_torch_rank_group, torch_store
from podscale.training import startup_checks
from podscale.version import VERSION

RUN = {"run": {"id": "r"}, "train": {"global_batch": 32}}

Change = Callable[[pytest.MonkeyPatch], None]


def here(config: RunConfig, shard_set: ShardSet) -> dict[str, str]:
    return startup_checks.startup_facts(
        config, "train", shard_set, device="cpu", local_size=4, libraries=library_versions()
    )


def prefixed(rank_group: RankGroup, name: str) -> RankGroup:
    """Return the rank group with an unused key prefix in its store."""
    from torch._C._distributed_c10d import PrefixStore

    return replace(rank_group, store=TorchStore(PrefixStore(name, torch_store(rank_group))))


DOCUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "result": ({"label_smoothing": 0.2}, "train.label_smoothing: 0.2 on rank 2, 0.1 on ranks 0, 1 and 3"),
    "placement": ({"accumulation": 2}, "train.accumulation: 2 on rank 2, 1 on ranks 0, 1 and 3"),
}
LIBRARIES: dict[str, tuple[Change, str]] = {
    "torch": (lambda m: m.setattr(torch, "__version__", "2.0.1"), "torch: 2.0.1 on rank 2, "),
    "cuda": (lambda m: m.setattr(torch.version, "cuda", "12.1"), "CUDA of torch: 12.1 on rank 2, "),
    "nccl": (lambda m: m.setattr(torch.cuda.nccl, "version", lambda: (2, 1, 0)), "NCCL: 2.1.0 on rank 2, "),
    "cudnn": (lambda m: m.setattr(torch.backends.cudnn, "version", lambda: 7), "cuDNN: 7 on rank 2, "),
    "numpy": (lambda m: m.setattr(np, "__version__", "1.0"), "numpy: 1.0 on rank 2, "),
    "python": (
        lambda m: m.setattr(platform, "python_version_tuple", lambda: ("3", "9", "1")),
        "Python: 3.9 on rank 2, ",
    ),
    "code": (
        lambda m: m.setattr(startup_checks, "source_hash", lambda: "0123456789abcdef"),
        f"podscale: {VERSION} (sources 0123456789abcdef) on rank 2, ",
    ),
}


def test_every_kind_of_difference_is_named_on_every_rank(run_world: Any, make_shard_set: Any) -> None:
    shards = make_shard_set()
    manifest = ShardSet.open(shards).manifest
    data = {
        "class map": (replace(manifest, classes_sha256="c" * 64), f"class map: {'c' * 16} on rank 2, "),
        "plan": (replace(manifest, plan_fingerprint="p" * 16), f"shard plan: {'p' * 16} on rank 2, "),
    }
    errors = run_world(4, partial(errors_of_differences, shards, {name: other for name, (other, _) in data.items()}))
    assert errors[0] == errors[1] == errors[2] == errors[3]
    for name, (_, line) in {**DOCUMENTS, **data, **LIBRARIES}.items():
        assert f"\n  - {line}" in errors[0][name]
        assert errors[0][name].count("\n  - ") == 1, errors[0][name]
        assert "ranks 0, 1 and 3" in errors[0][name]


def errors_of_differences(shards: Path, manifests: dict[str, Any], world: World) -> dict[str, str]:
    """Return the error of this rank for each thing in which rank 2 differs: documents, manifests and libraries."""
    rank_group, odd, errors = join_torch_rank_group(20.0), world.rank == 2, {}
    config, shard_set = RunConfig.model_validate(RUN), ShardSet.open(shards)
    for name, (change, _) in DOCUMENTS.items():
        train = {**RUN["train"], **(change if odd else {})}
        rank_config = RunConfig.model_validate({**RUN, "train": train})
        errors[name] = startup_error(rank_group, name, lambda c=rank_config: here(c, shard_set))  # type: ignore[misc]
    for name, manifest in manifests.items():
        mine_set = ShardSet.open(shards)
        mine_set.manifest = manifest if odd else mine_set.manifest
        errors[name] = startup_error(rank_group, name, lambda s=mine_set: here(config, s))  # type: ignore[misc]
    for name, (change_library, _) in LIBRARIES.items():
        with pytest.MonkeyPatch.context() as patch:
            if odd:
                change_library(patch)
            errors[name] = startup_error(rank_group, name, lambda: here(config, shard_set))
    startup_checks.check_ranks_agree(prefixed(rank_group, "equal"), lambda: here(config, shard_set))
    return errors


def startup_error(rank_group: RankGroup, name: str, facts: Callable[[], startup_checks.StartupFacts]) -> str:
    with pytest.raises(InputError) as caught:
        startup_checks.check_ranks_agree(prefixed(rank_group, name), facts)
    assert int(caught.value.exit_code) == 2
    return str(caught.value)


def test_an_error_of_one_rank_is_raised_on_all(run_world: Any, make_shard_set: Any) -> None:
    shards = make_shard_set()

    def body(world: World) -> str:
        where = shards if world.rank != 3 else Path("/nowhere")
        config = RunConfig.model_validate(RUN)
        with pytest.raises(InputError) as caught:
            startup_checks.check_ranks_agree(join_torch_rank_group(20.0), lambda: here(config, ShardSet.open(where)))
        return str(caught.value)

    answers = run_world(4, body)
    assert len(set(answers)) == 1
    _, *ranks = answers[0].split("\n  - ")
    assert [line.partition(": /nowhere")[0] for line in ranks] == ["rank 3"]


def test_a_rank_that_does_not_arrive_is_named(run_world: Any) -> None:
    def body(world: World) -> str:
        if world.rank == 1:
            return ""
        with pytest.raises(HangDetected) as caught:
            startup_checks.check_ranks_agree(join_torch_rank_group(1.0), lambda: {"x": "1"})
        return str(caught.value)

    for rank, text in enumerate(run_world(4, body)):
        assert ("rank 1 of 4 " in text and "launch.timeout_seconds" in text) if rank != 1 else text == ""


def test_machine_local_options_may_differ() -> None:
    config = RunConfig.model_validate(RUN)
    facts = startup_checks.document_facts(config)
    options = {"input": {"workers": 7, "prefetch": 3, "cache_dir": "/x"}, "launch": {"threads": 3, "processes": 4}}
    assert startup_checks.document_facts(RunConfig.model_validate({**RUN, **options})) == facts
    assert {"train.global_batch", "train.all_reduce.algorithm", "evaluate.batch", "run.seed"} <= facts.keys()


def test_the_source_hash_depends_on_the_content_only(tmp_path: Path) -> None:
    copy = shutil.copytree(Path(podscale.__file__).parent, tmp_path / "podscale", ignore=lambda *_: ["__pycache__"])
    assert startup_checks.source_hash(copy) == startup_checks.source_hash()
    with (copy / "pytorch" / "step.py").open("a") as file:
        file.write("# changed\n")
    assert startup_checks.source_hash(copy) != startup_checks.source_hash()
