"""The helper that other tests of errors stand on: it must notice each difference."""

import pytest

from podscale.errors import ABSENT, InputError, PodscaleError, Preempted
from tests.support.refusals import refused


class Narrower(InputError):
    pass


def lose(kind: type[PodscaleError] = InputError) -> None:
    raise kind("must be positive", field="train.epochs", got=0, hint="Set it to 90.")


def test_an_error_that_fits_is_handed_over() -> None:
    with refused(90, field="train.epochs", got=0) as refusal:
        lose()
    assert refusal.error.hint == "Set it to 90."
    assert "train.epochs" in refusal.text


@pytest.mark.parametrize("wanted", [{"field": "train"}, {"got": 1}, {"got": ABSENT}, {"field": ""}])
def test_another_field_or_value_is_another_error(wanted: dict[str, object]) -> None:
    with pytest.raises(AssertionError), refused(**wanted):  # type: ignore[arg-type]
        lose()


def test_another_class_or_text_is_another_error() -> None:
    with pytest.raises(AssertionError), refused():
        lose(Narrower)
    with pytest.raises(Preempted), refused():
        lose(Preempted)
    with pytest.raises(AssertionError), refused(91):
        lose()
