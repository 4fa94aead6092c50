"""One undisturbed run of the digits, which tests of the whole pipeline compare with or copy."""

from pathlib import Path

import pytest

from tests.support.commands import SMALL_DIGITS, podscale


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with run.yaml, the digits' shard set and the finished run runs/calm. Copy it before changing them;
    other runs may be made in it."""
    place = tmp_path_factory.mktemp("digits")
    (place / "run.yaml").write_text(SMALL_DIGITS)
    ended = podscale(place, "run", "run.yaml", "--set", "run.id=calm")
    assert ended.code == 0, ended.err
    (place / "calm.out").write_text(ended.out)
    (place / "calm.err").write_text(ended.err)
    return place
