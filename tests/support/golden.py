"""Golden texts: one page of each kind is compared as a whole; other tests check its numbers and names."""

import os
from pathlib import Path


def assert_golden(path: Path, text: str) -> None:
    """Compare a text with a file. With the variable PODSCALE_TEST_RENEW, write the file; read `git diff` then."""
    if "PODSCALE_TEST_RENEW" in os.environ:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"not the text of {path}"
