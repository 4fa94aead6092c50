"""Out-of-memory errors of the compiler, translated into options of the document to change."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import jax

from podscale.config import RunConfig
from podscale.config.checks import fits_devices
from podscale.errors import InputError
from podscale.util.formatting import format_bytes

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"
_TEMPORARIES = re.compile(rf"memory required for .*? \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm", re.IGNORECASE)


class MemoryShortage(NamedTuple):
    """Bytes of a device that the program needs, and those that the compiler may use."""

    needed: int
    available: int


def parse_memory_shortage(message: str) -> MemoryShortage | None:
    """The shortage that an error of the compiler speaks of; None where it speaks of something else."""
    match = _TEMPORARIES.search(message) or _USED.search(message)
    if match is None:
        return None
    needed, needed_unit, available, available_unit = match.groups()
    return MemoryShortage(round(float(needed) * _UNITS[needed_unit]), round(float(available) * _UNITS[available_unit]))


@contextmanager
def explain_out_of_memory(what: str, field: str, advice: Callable[[MemoryShortage], str]) -> Iterator[None]:
    """Around what compiles and calls a program: raises InputError, the same on every host, where memory is short.

    Args:
        what: the program, for people.
        field: option that decides how much memory it needs.
        advice: what to do about it.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (shortage := parse_memory_shortage(str(error))) is None:
            raise
        needed, available = shortage
        raise InputError(
            f"{what} does not fit the memory of a device: it needs {format_bytes(needed)} of the "
            f"{format_bytes(available)} that a program may use, {format_bytes(needed - available)} too much",
            field=field,
            hint=advice(shortage),
        ) from error


def explain_training_memory(config: RunConfig, devices: int) -> AbstractContextManager[None]:
    """Around an update."""
    train = config.train

    def advice(shortage: MemoryShortage) -> str:
        fitting = _fitting_batch(shortage, config, devices)
        lower = f"train.global_batch, now {train.global_batch}, to about {fitting}" if fitting else "train.global_batch"
        return (
            f"Lower {lower}, or raise train.accumulation, now {train.accumulation}: `podscale tpu compile RUN --sweep "
            "batch` finds the largest batch that fits."
        )

    return explain_out_of_memory("the update", "train.global_batch", advice)


def explain_evaluation_memory() -> AbstractContextManager[None]:
    """Around a batch of an evaluation."""
    return explain_out_of_memory("the evaluation", "evaluate.batch", lambda shortage: "Lower evaluate.batch.")


def _fitting_batch(shortage: MemoryShortage, config: RunConfig, devices: int) -> int:
    """The largest batch that the document allows for which memory is enough, if all of it shrinks with it; else 0."""
    most = config.train.global_batch * shortage.available // shortage.needed

    def with_batch(batch: int) -> RunConfig:
        return config.model_copy(update={"train": config.train.model_copy(update={"global_batch": batch})})

    return next((batch for batch in range(most, 0, -1) if fits_devices(with_batch(batch), devices)), 0)
