"""A program that does not fit the memory of a device: the compiler's error as what to change in the document."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import jax

from podscale.config import RunConfig
from podscale.config.checks import fits_devices
from podscale.errors import InputError
from podscale.jax.ahead.shortage import Shortage, find_shortage
from podscale.text import human_bytes


@contextmanager
def fits(what: str, field: str, advice: Callable[[Shortage], str]) -> Iterator[None]:
    """Around what compiles and calls a program: raises InputError, the same on every host, where memory is short.

    Args:
        what: the program, for people.
        field: option that decides how much memory it needs.
        advice: what to do about it.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (shortage := find_shortage(str(error))) is None:
            raise
        needed, available = shortage
        raise InputError(
            f"{what} does not fit the memory of a device: it needs {human_bytes(needed)} of the "
            f"{human_bytes(available)} that a program may use, {human_bytes(needed - available)} too much",
            field=field,
            hint=advice(shortage),
        ) from error


def update_fits(config: RunConfig, devices: int) -> AbstractContextManager[None]:
    """Around an update."""
    train = config.train

    def advice(shortage: Shortage) -> str:
        fitting = _fitting(shortage, config, devices)
        lower = f"train.global_batch, now {train.global_batch}, to about {fitting}" if fitting else "train.global_batch"
        return (
            f"Lower {lower}, or raise train.accumulation, now {train.accumulation}: `podscale tpu compile RUN --sweep "
            "batch` finds the largest batch that fits."
        )

    return fits("the update", "train.global_batch", advice)


def evaluation_fits() -> AbstractContextManager[None]:
    """Around a batch of an evaluation."""
    return fits("the evaluation", "evaluate.batch", lambda shortage: "Lower evaluate.batch.")


def _fitting(shortage: Shortage, config: RunConfig, devices: int) -> int:
    """The largest batch that the document allows for which memory is enough, if all of it shrinks with it; else 0."""
    most = config.train.global_batch * shortage.available // shortage.needed

    def with_batch(batch: int) -> RunConfig:
        return config.model_copy(update={"train": config.train.model_copy(update={"global_batch": batch})})

    return next((batch for batch in range(most, 0, -1) if fits_devices(with_batch(batch), devices)), 0)
