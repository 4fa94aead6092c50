"""Input benchmark: images/s of pipelines from a shard set to batches, measured in interleaved rounds.

A pipeline is opened anew in each round: it warms up, is timed in its steady state, and closes. CPU time is user +
system of all threads of this process, so other load on the machine matters less than in wall time.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from podscale.config import InputSection, RunConfig
from podscale.config.fields import first_error
from podscale.data.loaders.base import Batch, Loader
from podscale.data.loaders.build_loader import build_loader
from podscale.data.loaders.cache_form import CacheForm
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import Split
from podscale.errors import InputError

BatchSizes = Generator[int, None, None]
"""Number of images of each batch that is ready."""
OpenPipeline = Callable[[], BatchSizes]
Delivery = Callable[[Iterator[Batch]], Iterator[Batch]]
"""Moves batches to the device, in order."""
WARMUP_BATCHES = 4
LOADERS = ("native", "reference", "dali", "nvjpeg")
"""Loaders that decode images, values of input.loader."""
FIXED_THREADS = ("nvjpeg",)
"""Loaders that ignore input.workers."""
MAX_CACHE_BYTES = 2**40
"""Limit of a decoded cache that is measured, bytes; all images of a sample fit."""


Item = TypeVar("Item")


class Rate(NamedTuple):
    """Speed of a pipeline in one round: images per CPU-second, and per second."""

    per_cpu_second: float
    per_second: float


def measure_round(
    open_pipeline: OpenPipeline, *, images: int = 1, seconds: float = 0.0, warmup: int = WARMUP_BATCHES
) -> Rate:
    """Open a pipeline, skip `warmup` batches, time at least `images` images and `seconds` seconds, and close it."""
    with closing(open_pipeline()) as batches:
        for _ in range(warmup):
            next(batches)
        cpu, start, count, elapsed = time.process_time(), time.perf_counter(), 0, 0.0
        while count < images or elapsed < seconds:
            count += next(batches)
            elapsed = time.perf_counter() - start
        return Rate(count / max(time.process_time() - cpu, 1e-6), count / max(elapsed, 1e-6))


def measure_rounds(
    pipelines: Mapping[Item, OpenPipeline],
    rounds: int,
    *,
    images: int = 1,
    seconds: float = 0.0,
    warmup: int = WARMUP_BATCHES,
    on_rate: Callable[[Item, Rate], None] = lambda item, rate: None,
) -> tuple[dict[Item, list[Rate]], dict[Item, Exception]]:
    """Return the speeds of each pipeline, one a round, and the error of each pipeline that failed.

    The order rotates, so that no pipeline always follows the same one's load.
    """
    rates: dict[Item, list[Rate]] = {item: [] for item in pipelines}
    errors: dict[Item, Exception] = {}
    for number in range(rounds):
        for item in rotated(list(pipelines), number):
            if item in errors:
                continue
            try:
                rate = measure_round(pipelines[item], images=images, seconds=seconds, warmup=warmup)
            except Exception as error:  # a library or a device failed: the other pipelines can still be measured
                errors[item] = error
            else:
                rates[item].append(rate)
                on_rate(item, rate)
    return rates, errors


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    by %= max(len(items), 1)
    return [*items[by:], *items[:by]]


def loader_batches(
    config: RunConfig,
    split: Split,
    device: str = "cpu",
    deliver: Delivery | None = None,
    at_end: Callable[[Loader], None] = lambda loader: None,
) -> BatchSizes:
    """Yield the sizes of the training batches of one process, as input.loader and `deliver` make them ready.

    Image size and crop are those of the `input` section at every step.

    Args:
        at_end: Gets the loader after its last batch, before it is closed.
    """
    loader = build_loader(
        config,
        split,
        build_sampler(config, split),
        phases=[(0, config.input.image_size, config.input.crop)],
        ranks=range(1),
        world_size=1,
        device=device,
    )
    try:
        batches = loader.batches(0, 10**9)
        yield from map(len, batches if deliver is None else deliver(batches))
    finally:
        at_end(loader)
        loader.close()


@dataclass(frozen=True)
class InputSettings:
    """Settings of the measurement.

    Args:
        batch: Images of a batch.
        seconds: Time of each row over all rounds.
        device: torch's name of the device that gets the batches.
    """

    batch: int
    seconds: float
    rounds: int = 3
    device: str = "cpu"


@dataclass(frozen=True)
class InputRow:
    """Speed of one loader; `workers` is None if the loader ignores it, `rates` has one a round."""

    loader: str
    workers: int | None
    rates: tuple[Rate, ...] = ()
    reason: str = ""
    """Reason why it was not measured."""
    refused: int = 0
    """Images that the native extension refused; the reference path decoded them."""

    @property
    def per_second(self) -> float:
        """Images/s, median of the rounds."""
        return median(rate.per_second for rate in self.rates)

    @property
    def per_cpu_second(self) -> float:
        """Images per CPU-second, median of the rounds."""
        return median(rate.per_cpu_second for rate in self.rates)


def measure_loaders(
    section: InputSection,
    split: Split,
    rows: Sequence[InputRow],
    settings: InputSettings,
    *,
    deliver: Delivery | None = None,
    on_rate: Callable[[InputRow, Rate], None] = lambda row, rate: None,
) -> list[InputRow]:
    """Return the rows with their rates, or with the reason of a failure; rows that have a reason stay as they are.

    Args:
        section: Options of the input pipeline but for loader, workers and order.
    """
    if settings.batch > len(split):
        raise InputError(
            f"more than the {len(split)} images of the train split",
            field="--batch",
            got=settings.batch,
            hint="Give a smaller --batch, or more images.",
        )
    refusals = {row: Counter[str]() for row in rows if not row.reason}

    def open_row(row: InputRow) -> BatchSizes:
        config = loader_config(section, row, settings.batch)
        at_end = partial(_add_refusals, refusals[row])
        return loader_batches(config, split, settings.device, deliver, at_end)

    pipelines = {row: partial(open_row, row) for row in refusals}
    seconds = settings.seconds / settings.rounds
    rates, errors = measure_rounds(pipelines, settings.rounds, seconds=seconds, on_rate=on_rate)
    if errors and len(errors) == len(pipelines):
        raise next(iter(errors.values()))
    done = {
        row: replace(row, rates=tuple(rates[row]), refused=refusals[row].total())
        if row not in errors
        else replace(row, reason=" ".join(str(errors[row]).split()) or repr(errors[row]))
        for row in pipelines
    }
    return [done.get(row, row) for row in rows]


def _add_refusals(refusals: Counter[str], loader: Loader) -> None:
    refusals.update(loader.native_refusals)


def loader_config(section: InputSection, row: InputRow, batch: int, cache: CacheForm | None = None) -> RunConfig:
    """Return a document with this `input` section, for the loader of a row and a network that takes any image size.

    Raises InputError if the loader does not have an option of the section.

    Args:
        cache: Form of the decoded images in memory. None: no cache, since a round is too short to fill it.
    """
    values = section.model_dump(mode="json")
    values |= {"loader": row.loader, "workers": row.workers or 1, "order": "global", "groups": 1}
    values |= {"decoded_cache_bytes": MAX_CACHE_BYTES if cache else 0, "decoded_cache_form": cache or "auto"}
    document = {"input": values, "model": {"stem": "small"}, "train": {"global_batch": batch}}
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise first_error(error) from error
