"""Pages of docs/reference/ are what the code says; `make reference` writes them."""

import re
from pathlib import Path

import pytest
import typer
import yaml

from podscale.config import RunConfig, loads, option_names
from tools import cli_reference, files_reference, modules_reference, options_reference
from tools.reference_pages import reference_pages, stale_pages

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    return reference_pages()


def test_pages_are_what_the_code_says(pages: dict[Path, str]) -> None:
    changed = [
        str(path.relative_to(ROOT))
        for path, text in pages.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert not changed, "run: make reference"
    assert not stale_pages(pages), "run: make reference"


def test_every_option_has_a_row() -> None:
    pages = options_reference.pages()
    missing = [
        option
        for option in option_names()
        if f"| `{option}` |" not in pages[options_reference.SECTION_PAGES / f"{option.partition('.')[0]}.md"]
    ]
    assert not missing


def test_the_first_page_of_options_is_short_and_its_examples_work() -> None:
    names = [option for group in options_reference.FIRST_OPTIONS for option in group.options]
    assert len(names) == len(set(names))
    assert 20 <= len(names) <= 30
    (document,) = re.findall(r"```yaml\n(.*?)```", options_reference.HEAD, re.DOTALL)
    assert loads(document, "page").run.id == yaml.safe_load(document)["run"]["id"]
    for group in options_reference.FIRST_OPTIONS:
        changes = re.findall(r"--set ('[^']*'|\S+)", group.example.replace("='", "=").replace("' ", " "))
        assert changes
        assert all(change.partition("=")[0] in option_names() for change in changes)


def test_every_section_has_a_page_and_a_subject() -> None:
    index = options_reference.pages()[options_reference.TARGET]
    assert re.findall(r"\(options/(\w+)\.md\) \| \d+ \| \S", index) == list(RunConfig.model_fields)


def test_every_command_and_option_is_on_the_page() -> None:
    """The page is read from the functions; typer's own parser has the same names."""
    page = cli_reference.render()
    found = {command.name: list(cli_reference.parameters(command)) for command in cli_reference.commands()}
    root = typer.main.get_command(cli_reference.app)
    parsed: dict[str, set[str]] = {}
    groups = [("", root)]
    while groups:
        prefix, group = groups.pop()
        for name, command in group.commands.items():  # type: ignore[attr-defined]
            if hasattr(command, "commands"):
                groups.append((f"{prefix}{name} ", command))
            else:
                options = [one for one in command.params if one.param_type_name == "option" and one.name != "help"]
                parsed[prefix + name] = {text for one in options for text in [*one.opts, *one.secondary_opts]}
    documented = {name: {text for one in options for text in one.names} for name, options in found.items()}
    assert documented == parsed
    assert all(f"\n## podscale {name}\n" in page for name in parsed)


def test_defaults_of_commands_are_shown() -> None:
    train = next(command for command in cli_reference.commands() if command.name == "shard")
    of = next(one for one in cli_reference.parameters(train) if one.names == ("--of",))
    assert (of.default, of.value, of.required) == ("`1`", "N", False)


def test_files_without_a_row_are_found(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.yaml", "model/model.json", "surprise.bin"):
        (tmp_path / name).write_text("")
    assert files_reference.unknown_files(tmp_path, files_reference.RUN_FILES) == ["surprise.bin"]
    absent = files_reference.absent_files(tmp_path, files_reference.RUN_FILES)
    assert "report.html" in absent
    assert not {"config.yaml", "hang/*"} & set(absent)


def test_signatures_are_written_as_in_the_code(tmp_path: Path) -> None:
    by_name = {public.name: public for public in modules_reference.exported(ROOT / "podscale/config/__init__.py")}
    assert modules_reference.signature(by_name["loads"].node).startswith("def loads(")
    assert modules_reference.signature(by_name["Defaults"].node) == "class Defaults(text: str, name: str)"
    runs = {public.name: public for public in modules_reference.exported(ROOT / "podscale/runs/__init__.py")}
    assert runs["Lease"].module == "podscale.runs.lease"
    assert "self" not in modules_reference.signature(runs["Lease"].node)


def test_every_module_is_on_a_page() -> None:
    text = "".join(modules_reference.pages().values())
    modules = [path for path in (ROOT / "podscale").rglob("*.py") if path.name != "__init__.py"]
    assert not [path for path in modules if f"| `{modules_reference._dotted(path)}` |" not in text]
