"""One undisturbed run of the digits, which tests of the whole pipeline compare with or copy; supervisors to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import SMALL_DIGITS, podscale
from tests.support.supervised import Launch, launching


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


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """launch(*options, **behaviour of ranks): a supervisor with the run runs/t below tmp_path."""
    with launching(tmp_path) as start:
        yield start
