"""Checks at the start of a stage: every rank runs the same configuration, and the run fits the world size.

Each rank posts its document, code, data and library versions to the store of its rank group. Rank 0 compares them and
answers. That costs a few kilobytes a rank, works before any process group exists, and names ranks that never arrived.
"""

import hashlib
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from podscale import version
from podscale.config import RunConfig, result_values
from podscale.config.batch_phases import batch_phases
from podscale.config.fields import FieldClass
from podscale.config.identity import field_values
from podscale.config.ranks import batch_norm_group, check_ranks
from podscale.data.loaders.build_loader import open_shard_set
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.store import StoreError, StoreTimeout
from podscale.distributed.worker_env import WorkerEnv
from podscale.errors import HangDetected, InputError, PodscaleError
from podscale.util.formatting import format_ranks
from podscale.version import VERSION

StartupFacts = Mapping[str, str]
"""Configuration facts of one rank: values as text by name."""

MACHINE_LOCAL_OPTIONS = (
    "run.workspace",
    "input.workers",
    "input.prefetch",
    "input.cache_dir",
    "input.cache_bytes",
    "input.record_cache_bytes",
    "input.decoded_cache_bytes",
    "input.decoded_cache_form",
    "checkpoint.keep_last",
    "checkpoint.keep_best",
    "checkpoint.asynchronous",
    "launch.",
)
"""Placement options, or sections of them, that may differ between machines. All others must agree."""

MAX_SHOWN = 12
"""Maximum number of differences in an error text."""
CANNOT_START = "cannot start"
ANSWER_KEY, ACKNOWLEDGED_KEY = "agreement/answer", "agreement/heard"
ANSWER_GRACE_SECONDS = 30.0
"""Extra time for which other ranks wait for rank 0's answer, seconds, beyond rank 0's own timeout."""
ACKNOWLEDGEMENT_SECONDS = 5.0
"""Longest wait for the other ranks to read an answer, seconds."""


def startup_facts(
    config: RunConfig, stage: str, shard_set: ShardSet, *, device: str, local_size: int, libraries: StartupFacts
) -> dict[str, str]:
    """Return the facts that must be the same on all ranks of a stage; `local_size` is the number of ranks on a node."""
    manifest = shard_set.manifest
    return {
        "stage": stage,
        **document_facts(config),
        "podscale": f"{VERSION} (sources {source_hash()})",
        "class map": manifest.classes_sha256[:16],
        "shard plan": manifest.plan_fingerprint[:16],
        **{f"index of the {name} split": split.index_sha256[:16] for name, split in manifest.splits.items()},
        "device": device,
        "ranks on a node": str(local_size),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": np.__version__,
        **libraries,
    }


def document_facts(config: RunConfig) -> dict[str, str]:
    """Return the options that must agree: those of class `result`, and placement except `MACHINE_LOCAL_OPTIONS`."""
    placement = field_values(config, FieldClass.PLACEMENT)
    shared = {name: value for name, value in placement.items() if not name.startswith(MACHINE_LOCAL_OPTIONS)}
    return {name: json.dumps(value) for name, value in {**result_values(config), **shared}.items()}


def source_hash(package: Path = Path(version.__file__).parent) -> str:
    """Return a hash of the installed sources: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def check_ranks_agree(rank_group: RankGroup, collect: Callable[[], StartupFacts]) -> None:
    """Return on every rank if the configurations of all ranks agree.

    Args:
        collect: returns this rank's facts. An error that it raises is posted as a fact, so that all ranks report it.

    Raises:
        InputError: ranks differ or cannot start; the same text on every rank, with the ranks and their values.
        HangDetected: a rank did not arrive within the rank group's timeout.
    """
    if rank_group.size == 1:
        collect()
        return
    local_error: Exception | None = None
    try:
        facts = dict(collect())
    except Exception as error:
        text = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        local_error, facts = error, {CANNOT_START: text}
    rank_group.store.set(_facts_key(rank_group.rank), json.dumps(facts))
    verdict = _compare_on_rank0(rank_group) if rank_group.rank == 0 else _receive_answer(rank_group)
    if local_error is not None and not isinstance(local_error, InputError):
        raise local_error  # a bug keeps its traceback
    if verdict is not None:
        raise local_error if local_error is not None and str(local_error) == str(verdict) else verdict


def compare_facts(posted: list[StartupFacts]) -> PodscaleError | None:
    """Return the error that follows from the facts of each rank, or None if they agree."""
    refusals = {rank: facts[CANNOT_START] for rank, facts in enumerate(posted) if CANNOT_START in facts}
    if len(refusals) == len(posted) and len(set(refusals.values())) == 1:
        return InputError(refusals[0])
    if refusals:
        listed = [f"  - {format_ranks(ranks)}: {text}" for text, ranks in _ranks_by_value(refusals).items()]
        return InputError("not every rank can start, so none does:\n" + "\n".join(listed))
    names = list(dict.fromkeys(name for facts in posted for name in facts))
    values = {
        name: _ranks_by_value({rank: facts.get(name, "none") for rank, facts in enumerate(posted)}) for name in names
    }
    lines = [
        f"  - {name}: {', '.join(f'{value} on {format_ranks(ranks)}' for value, ranks in groups.items())}"
        for name, groups in values.items()
        if len(groups) > 1
    ]
    if not lines:
        return None
    more = [f"  - and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
    listing = "\n".join([*lines[:MAX_SHOWN], *more])
    return InputError(
        f"ranks disagree on their configuration, so nothing was started:\n{listing}",
        hint="Give every rank the same run document, image and shard set.",
    )


def _compare_on_rank0(rank_group: RankGroup) -> PodscaleError | None:
    """Compare the facts of all ranks and post the answer. After an error, wait until the other ranks have read it."""
    keys, absent = [_facts_key(rank) for rank in range(rank_group.size)], list[int]()
    try:
        rank_group.store.wait(keys, rank_group.timeout_seconds)
        posted = [json.loads(text) for text in rank_group.store.get(keys)]
        error = compare_facts(posted)
    except StoreTimeout:
        absent = [rank for rank, key in enumerate(keys) if not rank_group.store.has(key)]
        error = HangDetected(
            f"{format_ranks(absent)} of {rank_group.size} did not reach the startup check",
            field="launch.timeout_seconds",
            got=rank_group.timeout_seconds,
            hint="See the outcome or the log of its pod.",
        )
    answer = {} if error is None else {"kind": type(error).__name__, "text": str(error)}
    rank_group.store.set(ANSWER_KEY, json.dumps(answer))
    if error is not None:
        _wait_for_acknowledgements(rank_group, rank_group.size - 1 - len(absent))
    return error


def _receive_answer(rank_group: RankGroup) -> PodscaleError | None:
    """Wait for rank 0's answer, on all other ranks."""
    timeout = rank_group.timeout_seconds + ANSWER_GRACE_SECONDS
    try:
        rank_group.store.wait([ANSWER_KEY], timeout)
        answer = json.loads(rank_group.store.get([ANSWER_KEY])[0])
    except StoreError as error:
        return HangDetected(
            f"rank {rank_group.rank} of {rank_group.size} got no answer from rank 0 at startup: {error}"
        )
    rank_group.store.add(ACKNOWLEDGED_KEY, 1)
    if not answer:
        return None
    return (HangDetected if answer["kind"] == "HangDetected" else InputError)(answer["text"])


def _wait_for_acknowledgements(rank_group: RankGroup, others: int) -> None:
    """Wait until `others` ranks have read the answer: the store may be in rank 0's process and exit with it."""
    deadline = time.monotonic() + ACKNOWLEDGEMENT_SECONDS
    while rank_group.store.add(ACKNOWLEDGED_KEY, 0) < others and time.monotonic() < deadline:
        time.sleep(0.02)


def _facts_key(rank: int) -> str:
    return f"agreement/{rank}"


def _ranks_by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks of each value, rarest value first: it is probably the wrong one."""
    ranks = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return dict(sorted(ranks.items(), key=lambda entry: len(entry[1])))


def open_agreed_shard_set(
    worker_env: WorkerEnv,
    rank_group: RankGroup,
    *,
    device: str,
    libraries: StartupFacts,
    check_device: Callable[[], None] = lambda: None,
) -> ShardSet:
    """Open the shard set on every rank and return it if all ranks agree; raises the errors of `check_ranks_agree`.

    Args:
        check_device: raises InputError if this rank's device cannot run the document.
    """
    opened: list[ShardSet] = []

    def collect_facts() -> StartupFacts:
        check_device()
        opened.append(open_shard_set(worker_env.shard_set, worker_env.config))
        local_size = worker_env.rank_env.local_world_size
        facts = startup_facts(
            worker_env.config, worker_env.stage, opened[0], device=device, local_size=local_size, libraries=libraries
        )
        if worker_env.stage == "train":
            facts["hosts of the sample order"] = str(build_sampler(worker_env.config, opened[0].split("train")).hosts)
        return facts

    check_ranks_agree(rank_group, collect_facts)
    return opened[0]


def validate_world(config: RunConfig, ranks: int, samples: int) -> None:
    """Raise InputError if the run does not fit this many ranks or training images (`samples`)."""
    train = config.train
    check_ranks(config, ranks)
    for phase in batch_phases(train):
        if phase.global_batch > samples:
            raise InputError(
                f"larger than the training split of {samples} images",
                field=phase.batch_option,
                got=phase.global_batch,
                hint="Lower it, or add images.",
            )
        if batch_norm_group(phase.apply(config), ranks).total < 2:
            raise InputError(
                f"one image per rank and pass has no variance for batch norm ({ranks} ranks, "
                f"{phase.accumulation_option} {phase.accumulation})",
                field=phase.batch_option,
                got=phase.global_batch,
                hint="Use at least 2 images per rank and pass.",
            )
