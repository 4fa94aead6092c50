"""Write docs/reference/modules.md and one page per package, from docstrings: `python -m tools.modules_reference`."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
TARGET = REFERENCE / "modules.md"
PACKAGE_PAGES = REFERENCE / "modules"
PACKAGE = ROOT / "podscale"

HEAD = """# Python modules

The library by packages: its public names with their signatures, and every module with its purpose. Generated from the
docstrings by `tools/modules_reference.py`; a test keeps it true. [Architecture](../explanation/architecture.md) has the
allowed imports between packages and a tour in eight files.

Names that a package exports are its public interface for the packages above it. The command line, the files and the
names of [`import podscale`](python.md) are the stable interface of Podscale: other Python names may change between
versions.

| package | modules | purpose |
|---|---|---|
"""

LINE_LENGTH = 100


@dataclass(frozen=True)
class PublicName:
    """Name that a package exports, with its definition."""

    name: str
    module: str
    node: ast.FunctionDef | ast.ClassDef


def pages() -> dict[Path, str]:
    """Return the text of each page by its path."""
    names = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    top = sorted(path for path in PACKAGE.glob("*.py") if path.name != "__init__.py")
    rows = [f"| [`podscale.{name}`](modules/{name}.md) | {len(_modules(name))} | {_purpose(name)} |" for name in names]
    tail = ["", "Beside the packages:", "", "| module | purpose |", "|---|---|", *(_module_row(path) for path in top)]
    index = HEAD + "\n".join([*rows, *tail]) + "\n"
    return {TARGET: index, **{PACKAGE_PAGES / f"{name}.md": _package_page(name) for name in names}}


def _package_page(name: str) -> str:
    parts = [f"# podscale.{name}\n"]
    parts.append(
        f"{_purpose(name)} Generated from the docstrings by `tools/modules_reference.py`; a test keeps it true. "
        "[Python modules](../modules.md) lists the packages.\n"
    )
    packages = sorted({path.parent for path in _modules(name)}, key=lambda path: (len(path.parts), path))
    for folder in packages:
        dotted = _dotted(folder / "__init__.py")
        parts.append(f"## {dotted}\n")
        text = _docstring(folder / "__init__.py")
        if text and folder != PACKAGE / name:
            parts.append(_escape(first_sentence(text)) + "\n")
        parts += _public(folder)
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        parts += ["| module | purpose |", "|---|---|", *map(_module_row, modules), ""] if modules else []
    return "\n".join(parts).rstrip() + "\n"


def _public(folder: Path) -> Iterator[str]:
    for public in exported(folder / "__init__.py"):
        yield f"### {public.name}\n"
        yield f"```python\n{signature(public.node)}\n```\n"
        text = ast.get_docstring(public.node)
        yield (f"{_escape(first_sentence(text))} " if text else "") + f"(`{public.module}`)\n"


def exported(init: Path) -> list[PublicName]:
    """Return the functions and classes of a package's `__all__`, in its order."""
    tree = _parse(init)
    values = (value for node in tree.body if (value := _assigned(node, "__all__")) is not None)
    names: list[str] = next(map(ast.literal_eval, values), [])
    origins = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)  # `if TYPE_CHECKING:` holds names that load on first use
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    found = []
    for name in names:
        module, original = origins.get(name, (_dotted(init), name))
        definition = _find(module, original)
        if definition is not None:
            found.append(PublicName(name, *definition))
    return found


def _find(module: str, name: str) -> tuple[str, ast.FunctionDef | ast.ClassDef] | None:
    """Return the module that defines a name and its definition, through re-exports; None for other values."""
    path = ROOT / Path(*module.split("."))
    if (path / f"{name}.py").exists():  # a module, which has a row of its own
        return None
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        return None
    for node in _parse(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _find(node.module, alias.name)
    return None


def signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the head of a definition, on several lines if it is long; a class has the arguments of its constructor."""
    if isinstance(node, ast.FunctionDef):
        return _call(
            f"def {node.name}", _arguments(node.args), f" -> {ast.unparse(node.returns)}" if node.returns else ""
        )
    init = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if init is not None:
        return _call(f"class {node.name}", _arguments(init.args)[1:], "")
    arguments = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign) and not _is_private(one)]
    if arguments and _is_record(node):
        return _call(f"class {node.name}", arguments, "")
    bases = ", ".join(map(ast.unparse, node.bases))
    return f"class {node.name}({bases})" if bases else f"class {node.name}"


def _is_private(node: ast.AnnAssign) -> bool:
    return isinstance(node.target, ast.Name) and (
        node.target.id.startswith("_") or "ClassVar" in ast.unparse(node.annotation)
    )


def _is_record(node: ast.ClassDef) -> bool:
    decorated = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    return decorated or any(ast.unparse(base) == "NamedTuple" for base in node.bases)


def _arguments(arguments: ast.arguments) -> list[str]:
    """Return the parameters of a function as they are written."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    texts = [_argument(one, default) for one, default in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        texts.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        texts.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        texts.append("*")
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    texts += [_argument(one, default) for one, default in keywords]
    return [*texts, *([f"**{ast.unparse(arguments.kwarg)}"] if arguments.kwarg is not None else [])]


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(argument)
    if default is None:
        return text
    return f"{text} = {ast.unparse(default)}" if argument.annotation is not None else f"{text}={ast.unparse(default)}"


def _call(start: str, arguments: list[str], end: str) -> str:
    line = f"{start}({', '.join(arguments)}){end}"
    if len(line) <= LINE_LENGTH:
        return line
    return f"{start}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){end}"


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    end = paragraph.find(". ")
    return paragraph if end < 0 else paragraph[: end + 1]


def _module_row(path: Path) -> str:
    text = _docstring(path)
    return f"| `{_dotted(path)}` | {_escape(first_sentence(text)).replace('|', chr(92) + '|') if text else ''} |"


def _purpose(name: str) -> str:
    text = _docstring(PACKAGE / name / "__init__.py")
    return _escape(first_sentence(text)) if text else PURPOSES[name]


PURPOSES = {
    "distributed": "Contract between launcher and worker, and between ranks.",
    "stages": "One function for each stage, in this pod or as a job.",
    "util": "Helpers that know nothing of a run.",
}
"""Purposes of packages without a docstring."""


def _escape(text: str) -> str:
    """Return a text in which `<`, `*` and `_` outside code are no markup; inside a word, `_` is none."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"\*|\b_|_\b", r"\\\g<0>", part.replace("<", "&lt;")) for part in parts[::2]]
    return "`".join(parts)


def _modules(name: str) -> list[Path]:
    return sorted((PACKAGE / name).rglob("*.py"))


def _dotted(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("")
    return ".".join(relative.parts[:-1] if relative.name == "__init__" else relative.parts)


def _docstring(path: Path) -> str:
    return ast.get_docstring(_parse(path)) or ""


def _assigned(node: ast.stmt, name: str) -> ast.expr | None:
    """Return the value that a statement assigns to a name; None for another statement."""
    if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == name for one in node.targets):
        return node.value
    return None


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PACKAGE_PAGES.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
