"""Out-of-memory errors of the compiler, translated into options of the document to change."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from podscale.config import RunConfig
from podscale.config.batch_phases import BatchPhase
from podscale.config.ranks import fits_devices
from podscale.errors import InputError
from podscale.util.formatting import format_bytes

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"
_TEMPORARIES = re.compile(rf"memory required for .*? \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm", re.IGNORECASE)


class OutOfMemory(NamedTuple):
    """Bytes of device memory that a program needs, and bytes that a program may use."""

    needed: int
    available: int


def parse_out_of_memory(message: str) -> OutOfMemory | None:
    """Parse an error of the compiler; None if it is not about memory."""
    match = _TEMPORARIES.search(message) or _USED.search(message)
    if match is None:
        return None
    needed, needed_unit, available, available_unit = match.groups()
    return OutOfMemory(round(float(needed) * _UNITS[needed_unit]), round(float(available) * _UNITS[available_unit]))


@contextmanager
def explain_out_of_memory(program: str, field: str, advice: Callable[[OutOfMemory], str]) -> Iterator[None]:
    """Turn out-of-memory errors of the body, which compiles and calls a program, into InputError on every host.

    Args:
        field: option that decides how much memory it needs.
        advice: returns the hint of the error.
    """
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (memory := parse_out_of_memory(str(error))) is None:
            raise
        needed, available = memory
        raise InputError(
            f"{program} does not fit the memory of a device: it needs {format_bytes(needed)} of the "
            f"{format_bytes(available)} that a program may use, {format_bytes(needed - available)} too much",
            field=field,
            hint=advice(memory),
        ) from error


def explain_training_memory(config: RunConfig, phase: BatchPhase, devices: int) -> AbstractContextManager[None]:
    """Explain the errors of the step of a batch phase, by the options that set its batch."""

    def advice(memory: OutOfMemory) -> str:
        fitting, lower = _fitting_batch(memory, phase.apply(config), devices), phase.batch_option
        lower += f", now {phase.global_batch}, to about {fitting}" if fitting else ""
        return (
            f"Lower {lower}, or raise {phase.accumulation_option}, now {phase.accumulation}: `podscale tpu compile RUN "
            "--sweep batch` finds the largest batch that fits."
        )

    return explain_out_of_memory("the train step", phase.batch_option, advice)


def explain_evaluation_memory() -> AbstractContextManager[None]:
    return explain_out_of_memory("the evaluation", "evaluate.batch", lambda memory: "Lower evaluate.batch.")


def _fitting_batch(memory: OutOfMemory, config: RunConfig, devices: int) -> int:
    """Return the largest allowed batch that fits if memory is proportional to it; 0 if there is none."""
    largest = config.train.global_batch * memory.available // memory.needed

    def with_batch(batch: int) -> RunConfig:
        return config.model_copy(update={"train": config.train.model_copy(update={"global_batch": batch})})

    return next((batch for batch in range(largest, 0, -1) if fits_devices(with_batch(batch), devices)), 0)
