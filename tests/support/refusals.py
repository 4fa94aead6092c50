"""Checks of the machine-readable parts of an error: class, exit code, field and value."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from podscale.config.fields import first_error
from podscale.errors import ABSENT, InputError, PodscaleError


@dataclass
class Refusal:
    """Error that a block raised, available after the block."""

    _error: PodscaleError | None = None

    @property
    def error(self) -> PodscaleError:
        assert self._error is not None, "the block has not ended"
        return self._error

    @property
    def text(self) -> str:
        return str(self.error)


@contextmanager
def refused(
    *contains: object, field: object = ..., got: object = ..., kind: type[PodscaleError] = InputError
) -> Iterator[Refusal]:
    """Expect an error of exactly this class in the block.

    Args:
        contains: numbers, keys, paths and commands that the text must contain; no sentences.
        field: expected `field`, as text; default: any.
        got: expected `got`; ABSENT if there must be none; default: any.
        kind: class of the error; a subclass is another error.
    """
    refusal = Refusal()
    with pytest.raises(kind) as caught:
        yield refusal
    refusal._error = error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    _check(error, contains, field, got)


@contextmanager
def invalid(*contains: object, field: object, got: object = ...) -> Iterator[None]:
    """Expect the ValidationError of a document that code makes in the block; arguments as of `refused`."""
    with pytest.raises(ValidationError) as caught:
        yield
    _check(first_error(caught.value), contains, field, got)


def _check(error: PodscaleError, contains: tuple[object, ...], field: object, got: object) -> None:
    if field is not ...:
        assert error.field == str(field), f"field {error.field!r} of: {error}"
    if got is ABSENT:
        assert error.got is ABSENT, f"got {error.got!r} in: {error}"
    elif got is not ...:
        assert error.got == got, f"got {error.got!r} in: {error}"
    for text in contains:
        assert str(text) in str(error), f"{text} is not in: {error}"
