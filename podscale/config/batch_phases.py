"""Batch phases: the global batch and the accumulation of each part of a run (`train.global_batch`, `train.phases`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from pydantic_core import PydanticCustomError

from podscale.config.fields import conflict_error
from podscale.config.run import RunDocument
from podscale.config.train import TrainSection

Document = TypeVar("Document", bound=RunDocument)


@dataclass(frozen=True)
class BatchPhase:
    """Part of a run with one global batch and one accumulation.

    Args:
        start: epoch at which it begins.
        batch_option: option that sets the global batch.
        accumulation_option: option that sets the accumulation.
    """

    start: float
    global_batch: int
    accumulation: int
    batch_option: str = "train.global_batch"
    accumulation_option: str = "train.accumulation"

    @property
    def pass_images(self) -> int:
        """Images of a forward-backward pass, over all ranks."""
        return self.global_batch // self.accumulation

    def apply(self, config: Document) -> Document:
        """Return the document of a run whose every step has this batch and accumulation."""
        train = config.train
        if not train.phases:
            return config  # it has no other batch
        phases = tuple(phase.model_copy(update={"global_batch": None, "accumulation": None}) for phase in train.phases)
        update = {"global_batch": self.global_batch, "accumulation": self.accumulation, "phases": phases}
        return config.model_copy(update={"train": train.model_copy(update=update)})

    def locate_error(self, error: PydanticCustomError) -> PydanticCustomError:
        """Return a conflict of the document of `apply` with the option of this phase that causes it."""
        if self.start == 0:
            return error
        context = error.context or {}
        options = {"train.global_batch": self.batch_option, "train.accumulation": self.accumulation_option}
        key, problem = context["key"], context["problem"]
        if key not in options:
            problem += f", in the phase of {self.batch_option} {self.global_batch}"
        return conflict_error(options.get(key, key), problem, got=context["got"], hint=context["hint"])


def batch_phases(train: TrainSection) -> tuple[BatchPhase, ...]:
    """Return the parts of a run in order; neighbours differ in their global batch or their accumulation."""
    return tuple(_iter_batch_phases(train))


def largest_batch(train: TrainSection) -> BatchPhase:
    """Return the part of a run with the largest global batch."""
    return max(batch_phases(train), key=lambda phase: phase.global_batch)


def largest_pass(train: TrainSection) -> BatchPhase:
    """Return the part of a run with the largest forward-backward pass, which takes most memory."""
    return max(batch_phases(train), key=lambda phase: phase.pass_images)


def format_batches(train: TrainSection) -> str:
    """Return the global batches of a run as text: 256, or 256, then 1280 from epoch 30."""
    first, *later = batch_phases(train)
    changes = [phase for before, phase in pairwise((first, *later)) if phase.global_batch != before.global_batch]
    return ", then ".join([f"{first.global_batch}", *(f"{p.global_batch} from epoch {p.start:g}" for p in changes)])


def check_each_batch(config: Document, check: Callable[[Document], object]) -> None:
    """Run `check` on the document of each batch phase; its conflict names the option of the phase."""
    for phase in batch_phases(config.train):
        try:
            check(phase.apply(config))
        except PydanticCustomError as error:
            raise phase.locate_error(error) from None


def _iter_batch_phases(train: TrainSection) -> Iterator[BatchPhase]:
    current = BatchPhase(0.0, train.global_batch, train.accumulation)
    yield current
    for number, section in enumerate(train.phases):
        key = f"train.phases.{number}"
        batch, accumulation = section.global_batch, section.accumulation
        following = BatchPhase(
            start=section.start,
            global_batch=current.global_batch if batch is None else batch,
            accumulation=current.accumulation if accumulation is None else accumulation,
            batch_option=current.batch_option if batch is None else f"{key}.global_batch",
            accumulation_option=current.accumulation_option if accumulation is None else f"{key}.accumulation",
        )
        if (following.global_batch, following.accumulation) != (current.global_batch, current.accumulation):
            current = following
            yield current
