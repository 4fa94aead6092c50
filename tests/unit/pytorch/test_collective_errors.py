"""Classification of failed collectives."""

import pytest

from podscale.pytorch.collective_errors import classify_error


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711", 77),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv operation to complete", 76),
        ("shape mismatch", None),
    ],
)
def test_failed_collectives_are_classified(text: str, code: int | None) -> None:
    kind = classify_error(RuntimeError(text))
    assert (int(kind.exit_code) if kind else None) == code


def test_errors_of_other_types_are_not_classified() -> None:
    assert classify_error(ValueError("gloo connection closed by peer")) is None
