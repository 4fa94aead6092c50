"""The helper that checks how a command ended."""

import pytest

from podscale.errors import ExitCode, InputError
from tests.support.outcomes import assert_error, reused_stages

ERR = f"metrics at http://127.0.0.1:1\npodscale: {InputError('unknown', field='--sweep', got='x', hint='Try y')}\n"


def test_an_error_as_expected() -> None:
    assert_error(2, ERR, "'x'", field="--sweep")
    assert_error(1, "podscale: bad\n", exit_code=ExitCode.FAILED)


@pytest.mark.parametrize(
    ("code", "err", "says", "field"),
    [
        (1, ERR, "", "--sweep"),
        (2, ERR, "'z'", "--sweep"),
        (2, ERR, "", "sweep"),
        (2, ERR, "", "--row"),
        (2, "", "", ""),
        (2, f"Traceback (most recent call last):\n{ERR}", "", "--sweep"),
    ],
)
def test_anything_else_fails(code: int, err: str, says: str, field: str) -> None:
    with pytest.raises(AssertionError):
        assert_error(code, err, says, field=field)


def test_stages_that_were_not_repeated() -> None:
    assert reused_stages("shard: finished before, nothing to do\ntrain: 3.0 s\nx report: finished before\n") == [
        "shard",
        "report",
    ]
