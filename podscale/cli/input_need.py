"""Need of a run for images on this host, for `podscale bench input` and the plan of `podscale run --dry-run`."""

import json
from typing import TYPE_CHECKING, NamedTuple

from podscale.config import RunConfig
from podscale.config.preflight.host import processes_per_node
from podscale.config.preflight.storage import shard_set_counts
from podscale.errors import InputError
from podscale.evaluation.history import read_history
from podscale.runs import dataset_directory, stage_outcomes
from podscale.stages.known_data import known_data
from podscale.telemetry.phases import NON_STEP_PHASES
from podscale.training.fine_tuning import trained_spec
from podscale.training.preflight import DEFAULT_CLASSES
from podscale.util import host_info
from podscale.util.formatting import format_count

if TYPE_CHECKING:
    from podscale.bench.input_need import NeededRate


MEASURE = "`podscale bench input RUN` measures it"


def describe_input(config: RunConfig) -> str:
    """Return the row of the plan on images/s: the need of the run, and the rate of this host's cores if it is known."""
    from podscale.bench.input_headroom import Headroom, format_rate, remedies
    from podscale.data import native

    if config.input.loader == "synthetic":
        return "random images, which need no decoding"
    need = run_need(config)
    text = f"takes about {format_rate(need.per_second)} images/s a host ({need.source})"
    cores = expected_cores(config)
    if cores is None:
        return f"{text}; what its cores deliver is not known yet: {MEASURE}, and what would raise it"
    headroom = Headroom(cores.threads * cores.per_core, cores.per_core, need.per_second, host_info.cpu_count())
    text += f"; {cores}: {headroom.verdict}"
    if headroom.ratio < 1:
        text += f". Raise it by {remedies(has_index=cores.has_index, has_extension=native.is_available())}"
    return f"{text}. {MEASURE}"


class ExpectedCores(NamedTuple):
    """Value of input.workers, its threads that have a core of this host, and the expected images/s of each.

    Args:
        has_index: True if the shard set has a decode index.
    """

    workers: int
    threads: int
    per_core: float
    has_index: bool
    source: str

    def __str__(self) -> str:
        from podscale.bench.input_headroom import format_rate

        rate, count = format_rate(self.threads * self.per_core), format_count(self.threads, "thread")
        return f"input.workers={self.workers} is {count} here, about {rate} images/s ({self.source})"


def expected_cores(config: RunConfig) -> ExpectedCores | None:
    """Return the threads of a run on this host with their rate; None if its images or its loader have no known one.

    The rate is that of a measured core, for JPEGs of the shard set's mean size.
    """
    from podscale.bench.input_headroom import CORE_RATES, RATED_CORE, expected_core_rate
    from podscale.data.loaders.build_loader import resolve_loader
    from podscale.data.native_support import has_mostly_sequential_jpegs
    from podscale.data.shard_set import ShardSet

    if not shard_set_counts(config) or (host_info.visible_gpus() and config.input.loader == "auto"):
        return None
    try:
        loader = resolve_loader(config.input.loader, "cpu")
        split = ShardSet.open(dataset_directory(config.run.workspace, config.data)).split("train")
    except InputError:
        return None
    if config.input.augment.is_enabled or (loader, False) not in CORE_RATES or not has_mostly_sequential_jpegs(split):
        return None
    has_index = split.decode_index(0) is not None
    kilobytes = float(split.column("size").mean()) / 1000
    rate = expected_core_rate(kilobytes, loader, has_index=has_index)
    threads = min(config.input.workers * processes_per_node(config), host_info.cpu_count())
    with_index = " with decode index" if has_index and loader == "native" else ""
    source = f"{loader}{with_index}, JPEGs of {kilobytes:.0f} kB, as measured on a core of {RATED_CORE}"
    return ExpectedCores(config.input.workers, threads, rate, has_index, source)


def run_need(config: RunConfig) -> "NeededRate":
    """Return the images/s that the training of a document takes on this host.

    The record of an earlier run of the same document on such a machine comes first, then an estimate by FLOP for its
    devices. A document without accelerators that claims the throughput of published hardware takes its part of that.
    If the model cannot be built here, it is the published rate of ResNet-50 on one GPU.
    """
    from podscale.bench.input_need import NeededRate, claimed_need, estimate_need, published_need, training_devices

    if (recorded := recorded_run_need(config)) is not None:
        return recorded
    devices, claim = training_devices(config), config.claim
    if devices.is_cpu and claim.images_per_second is not None and config.launch.nodes > 1:
        return claimed_need(claim.images_per_second, config.launch.nodes, claim.hardware)
    size = config.input.image_size
    try:
        flops = trained_spec(config, known_data(config)[1] or DEFAULT_CLASSES).training_flops(size)
    except InputError as error:
        need = published_need(host_info.gpu_names())
        reason = f"{config.model.name} cannot be built here: {error.problem}"
        return NeededRate(need.per_second, f"{need.source} (assumed: {reason})", need.basis)
    return estimate_need(f"{config.model.name} at {size} px", flops, devices)


def recorded_run_need(config: RunConfig) -> "NeededRate | None":
    """Return the need by an earlier run of the same document on a machine like this one; None if there is none."""
    from podscale.bench.input_need import recorded_need

    try:
        run = stage_outcomes.check_run_document(config)
        environment = json.loads(run.environment.read_text(encoding="utf-8"))
        nodes = int(environment["nodes"])
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return None
    history = read_history(run.metrics)
    rate = history.images_per_second()
    if not rate or nodes < 1 or not _is_like_this_machine(environment):
        return None
    seconds = sum(value for name, value in history.phases.items() if name not in NON_STEP_PHASES)
    waiting = history.phases.get("data_wait", 0.0) / seconds if seconds else 0.0
    return recorded_need(f"runs/{config.run.id}/{run.metrics.name}", rate, nodes, waiting)


def _is_like_this_machine(environment: dict[str, object]) -> bool:
    """Return True if a run was recorded on the same kind and number of GPUs, or of CPU cores if there are none."""
    gpus = host_info.gpu_names()
    if environment.get("gpus") != gpus:
        return False
    return bool(gpus) or (environment.get("cpu"), environment.get("cores")) == (
        host_info.cpu_name(),
        host_info.cpu_count(),
    )
