"""Images and classes of a run that are known before its stages."""

from pathlib import Path

import pytest

from podscale.config import loads
from podscale.stages.known_data import known_data


@pytest.mark.parametrize(
    ("data", "classes"),
    [
        ("{source: digits}", 10),
        ("{source: digits, only_classes: ['3', '8']}", 2),
        ("{source: photos, only_classes: [a, b, c]}", 3),
        ("{source: photos, classes: [a, b]}", 2),
        ("{source: photos}", None),
    ],
)
def test_classes_are_known_from_the_document(tmp_path: Path, data: str, classes: int | None) -> None:
    config = loads(f"run: {{workspace: {tmp_path}}}\ndata: {data}\n")
    assert known_data(config) == ({}, classes)
