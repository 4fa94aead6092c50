"""The notebooks of docs/tutorials run from top to bottom, and are committed without outputs."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

from podscale.runs import RunDirectory
from tests.support.examples import runs_examples

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
TIMEOUT_SECONDS = 600


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs(path: Path) -> None:
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert notebook.cells[0].source.startswith("# ")
    assert [cell for cell in code if cell.outputs or cell.execution_count is not None] == []
    for cell in code:
        compile(cell.source, path.name, "exec")


@runs_examples
@pytest.mark.timeout(TIMEOUT_SECONDS + 60)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    from nbclient import NotebookClient

    notebook = read(path)
    NotebookClient(
        notebook, timeout=TIMEOUT_SECONDS, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "stream" and output.name == "stderr"] == []
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) == 1, "the plot, drawn again in place"
    (run,) = (tmp_path / "work" / "runs").iterdir()
    assert RunDirectory(run).report.stat().st_size > 10_000
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert float(text.partition("top-1 ")[2].partition("%")[0]) > 90
