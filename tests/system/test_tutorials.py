"""The commands of docs/tutorials run as they stand, and print what the pages show."""

import re
import time
from pathlib import Path

import pytest

from tests.support.examples import runs_examples
from tests.support.tutorials import FENCE, PAGES, ROOT, assert_tutorial_runs, missing_line, read_blocks, run_blocks

ON_A_CLUSTER = "first-cluster-run.md"
"""Its commands are run by tests/cluster/test_tutorial.py."""
QUICKSTART = "quickstart.md"
"""Runs what `make run` runs, whose output README.md shows."""
README = ROOT / "README.md"
LAPTOP_PAGES = [page for page in PAGES if page.name != ON_A_CLUSTER]
TIMEOUT_SECONDS = 900


@runs_examples
@pytest.mark.timeout(TIMEOUT_SECONDS + 60)
@pytest.mark.parametrize("page", LAPTOP_PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_run_and_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    ended = assert_tutorial_runs(page, folder, TIMEOUT_SECONDS)
    if page.name == QUICKSTART:
        shown = [content.splitlines() for kind, content in FENCE.findall(README.read_text()) if kind == "text"]
        everything = [line for lines in ended.printed.values() for line in lines]
        assert [missing_line(lines, everything) for lines in shown] == [None]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_is_commands_and_output_alone(page: Path) -> None:
    blocks = read_blocks(page.read_text(encoding="utf-8"))
    assert len([block for block in blocks if block.reason is None]) >= 5
    assert all(re.fullmatch(r"[\w,.' -]{15,}\.", block.reason) for block in blocks if block.reason)
    assert not any(block.printed for block in blocks if block.reason)


PAGE = """# A page

```bash
echo one 12 3.5%
cd ..
```

```text
one 12 99.9%
```

*Not run by a test: it needs
another machine.*

```bash
false
```

```bash
echo "in $(basename "$PWD")"; test -t 1 && printf '\\033[1mtwo\\033[0m\\r\\n'
```
"""


def test_blocks_share_one_shell_on_a_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    blocks = read_blocks(PAGE)
    assert [block.reason for block in blocks] == [None, "it needs another machine.", None]
    ended = run_blocks(blocks, folder, 60)
    assert ended.code == 0, ended.last
    first, _, third = blocks
    assert ended.printed == {first.line: ["one 12 3.5%"], third.line: [f"in {tmp_path.name}", "two"]}
    assert missing_line(first.printed, ended.printed[first.line]) is None


def test_the_shell_stops_at_a_command_that_fails(tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    blocks = read_blocks("```bash\necho before; false\necho after\n```\n\n```bash\necho later\n```\n")
    ended = run_blocks(blocks, folder, 60)
    assert (ended.code, ended.printed) == (1, {1: ["before"]})


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    began = time.monotonic()
    assert run_blocks(read_blocks("```bash\nsleep 60\n```\n"), folder, 1).code != 0
    assert time.monotonic() - began < 30


def test_another_kind_of_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^line 1: "):
        read_blocks("```yaml\na: 1\n```\n")


@pytest.mark.parametrize(
    ("expected", "printed", "missing"),
    [
        (["step 10/360  loss 2.2652  289 images/s"], ["step  10/360   loss 1.9  1,303 images/s"], None),
        (["step 10/360"], ["step 20/360"], "step 10/360"),
        (["a", "b"], ["b", "a"], "b"),
        (["a", "...", "c"], ["a", "b", "c"], None),
        (["data  digits (auto), ..."], ["data digits (auto), images known later"], None),
        (["./datasets/3674f37dc166cf4e/x"], ["./datasets/31536fa316ac2528/x"], None),
        (["loss 0.1"], ["loss none"], "loss 0.1"),
        (["1,438 train images"], ["1,437 train images"], "1,438 train images"),
        (["at http://127.0.0.1:45265/metrics"], ["at http://127.0.0.1:9/metrics"], None),
    ],
)
def test_shown_output_is_compared_line_by_line(expected: list[str], printed: list[str], missing: str | None) -> None:
    assert missing_line(expected, printed) == missing
