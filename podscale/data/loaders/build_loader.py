"""Build the loader that the run document names."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from podscale.data import native
from podscale.data.batch_plan import BatchPlan, EvaluationBatchPlan, ImagePhases, TrainingBatchPlan
from podscale.data.loaders.base import BadRecordGuard, Loader
from podscale.data.native_support import sequential_jpegs
from podscale.errors import InputError
from podscale.util.locations import Location

if TYPE_CHECKING:
    from podscale.config.run_config import RunConfig
    from podscale.config.schedule import CropSection
    from podscale.data.sampler import Sampler
    from podscale.data.shard_set import ShardSet, Split

log = logging.getLogger("podscale.data")

MIN_INDEXED_BYTES = 15_000
"""Mean size of a JPEG from which on a decode index saves time, bytes: docs/explanation/input.md, Decode index."""


def build_loader(
    config: RunConfig,
    split: Split,
    sampler: Sampler,
    *,
    phases: ImagePhases,
    ranks: range,
    world_size: int,
    device: str,
) -> Loader:
    """Return the training loader of one process; a batch has the parts of its ranks, one after the other.

    Args:
        phases: size and crop of the images by first step (`podscale.training.schedules.image_phases`).
        ranks: ranks of the sample order, of `world_size`, that this process computes.
        device: torch's name (`cpu`, `cuda:0`) of the device that gets the batches, and on which a loader may decode.
    """
    hosts = sorted({sampler.host_of(rank, world_size) for rank in ranks})
    rows = np.concatenate([sampler.rows_of_host(host) for host in hosts])
    guard = BadRecordGuard(split, config.input.max_bad_rate)
    batch_plan = TrainingBatchPlan(config, split, sampler, guard, phases=phases, ranks=ranks, world_size=world_size)
    name = resolve_loader(config.input.loader, device, needs_cpu_loader=config.input.needs_cpu_loader)
    split.prefetch(rows, with_indexes=name == "native")
    decoded_bytes = config.input.decoded_cache_bytes
    wants_hint = name == "native" and ranks.start == 0 and not decoded_bytes
    if wants_hint and (hint := decode_index_hint(split, config.input.crop)):
        log.info("%s", hint)
    return _make_loader(name, config, batch_plan, guard, device, rows, decoded_bytes=decoded_bytes)


def build_evaluation_loader(config: RunConfig, split: Split, *, ranks: range, world_size: int, device: str) -> Loader:
    """Return the evaluation loader of one process; its steps run from 0 to `sampler.evaluation_steps`."""
    rows = np.arange(len(split))
    guard = BadRecordGuard(split, config.input.max_bad_rate)
    batch_plan = EvaluationBatchPlan(config, split, guard, ranks=ranks, world_size=world_size)
    name = resolve_loader(config.input.loader, device)
    split.prefetch(rows, with_indexes=name == "native")
    return _make_loader(name, config, batch_plan, guard, device, rows)


def decode_index_hint(split: Split, crop: CropSection) -> str:
    """Return the hint that the loader `native` would decode a split faster with decode indexes.

    Empty if the split has indexes, or if they would save little with these crops. Either all shards have an index or
    none, so the first one decides.
    """
    sizes = split.column("size")[sequential_jpegs(split)]
    takes_whole_images = crop.padding is not None
    if takes_whole_images or not 0 < len(split) <= 2 * len(sizes) or np.mean(sizes) < MIN_INDEXED_BYTES:
        return ""
    if split.decode_index(0) is not None:
        return ""
    place = " where the set is; copy its .decode files too" if split.is_remote else ""
    return (
        f"the {split.name} split has no decode index: with one, the loader native decodes images of "
        f"{np.mean(sizes) / 1000:.0f} kB 1.1 to 1.5 times as fast, with the same pixels. "
        f"Run `podscale shard RUN --decode-index`{place}."
    )


def resolve_loader(name: str, device: str, *, needs_cpu_loader: bool = False) -> str:
    """Resolve `auto` by device and installed software; on a CPU, or if the crops need it, it decodes on the CPU."""
    if name == "auto":
        if needs_cpu_loader or not device.startswith("cuda"):
            return _cpu_loader()
        return "dali" if is_dali_installed() else "nvjpeg" if _is_nvjpeg_available(device) else _cpu_loader()
    if name == "native":
        if not native.is_installed():
            log.warning("input.loader=native: the extension is not installed; the reference loader is slower")
        return _cpu_loader()
    if name == "dali" and not is_dali_installed():
        raise InputError(
            "DALI is not installed",
            field="input.loader",
            got="dali",
            hint="Run `pip install 'podscale[gpu]'`, or set input.loader=auto.",
        )
    return name


def _cpu_loader() -> str:
    return "native" if native.is_available() else "reference"


def unavailable_reason(name: str, device: str) -> str:
    """Return the reason why a loader that decodes images does not run on this machine with this device; "" if it does.

    `native` without its extension is unavailable here, although `resolve_loader` has a substitute.
    """
    if name == "native" and not native.is_available():
        found = "its pixels are not those of the installed Pillow" if native.is_installed() else "it is not installed"
        return f"the native extension is not usable: {found}. `podscale doctor` prints the remedy."
    if name == "dali" and not is_dali_installed():
        return "DALI is not installed. Run `pip install 'podscale[gpu]'`."
    if name == "nvjpeg" and not device.startswith("cuda"):
        return "it decodes on a GPU, and the device is a CPU"
    if name == "nvjpeg" and not _is_nvjpeg_available(device):
        return "torchvision's decoder does not work on this GPU"
    return ""


def is_dali_installed() -> bool:
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def _is_nvjpeg_available(device: str) -> bool:
    try:
        from podscale.data.loaders.nvjpeg import is_available_on
    except ImportError:  # torchvision 0.29 announces that later versions have no decoders
        return False
    return is_available_on(device)


def open_shard_set(location: str, config: RunConfig) -> ShardSet:
    """Open the shard set at a path, or at an fsspec URL through the node-local cache.

    Up to input.record_cache_bytes of it are kept in memory. Raises InputError if there is no complete shard set.
    """
    memory = config.input.record_cache_bytes
    if (directory := Location.parse(location).local_path) is not None:
        from podscale.data.memory_cache import MemoryCache
        from podscale.data.shard_set import LocalShardMapper, ShardSet

        return ShardSet.open(directory, MemoryCache(LocalShardMapper(), memory) if memory else None)
    from podscale.data.node_cache import ShardCache  # its retries need tenacity, which GPU sessions do not carry

    return ShardCache(config.input.cache_dir, config.input.cache_bytes).open(location, memory)


def _make_loader(
    name: str,
    config: RunConfig,
    batch_plan: BatchPlan,
    guard: BadRecordGuard,
    device: str,
    rows: npt.NDArray[np.int64],
    *,
    decoded_bytes: int = 0,
) -> Loader:
    """Return the loader `name` of these `rows`, int64 [n], with a decoded cache of `decoded_bytes`."""
    settings = config.input
    if decoded_bytes and name in ("dali", "nvjpeg"):
        raise InputError(
            f"the loader in use ({name}) does not cache decoded images",
            field="input.decoded_cache_bytes",
            got=decoded_bytes,
            hint="Set input.loader=native or reference, or input.decoded_cache_bytes=0.",
        )
    if name == "synthetic":
        from podscale.data.loaders.synthetic import SyntheticLoader

        classes = int(batch_plan.split.labels.max()) + 1
        return SyntheticLoader(batch_plan, classes=classes, seed=config.run.seed, device=device)
    if name == "dali":
        from podscale.data.loaders.dali import DaliLoader

        return DaliLoader(
            batch_plan, guard, workers=settings.workers, prefetch=settings.prefetch, seed=config.run.seed, device=device
        )
    if name == "nvjpeg":
        from podscale.data.loaders.nvjpeg import NvjpegLoader

        return NvjpegLoader(batch_plan, guard, prefetch=settings.prefetch, device=device)
    from podscale.data.loaders.cache_form import choose_cache_form
    from podscale.data.loaders.cpu import NativeLoader, PillowLoader, image_allocator
    from podscale.data.loaders.decoded_cache import open_image_store

    images = open_image_store(batch_plan.split, decoded_bytes)
    make: Callable[..., PillowLoader] = PillowLoader
    if name == "native":
        form = settings.decoded_cache_form if decoded_bytes else "pixels"
        if form == "auto":
            form = choose_cache_form(batch_plan, rows, images.limit_bytes)
        make = partial(NativeLoader, keeps_coefficients=form == "coefficients")
    elif decoded_bytes and settings.decoded_cache_form == "coefficients":
        log.warning("the decoded cache keeps pixels, because only the loader native keeps coefficients")
    return make(
        batch_plan,
        guard,
        workers=settings.workers,
        prefetch=settings.prefetch,
        images=images,
        allocate=image_allocator(device),
    )
