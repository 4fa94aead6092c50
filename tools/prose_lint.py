"""Check what a machine can check of names, docstrings and lengths: `python -m tools.prose_lint` (part of `make lint`).

Six rules, the last two for the library only, in every Python file of `FOLDERS`:

- A defined name has no private word (`PRIVATE_WORDS`), but the field's term.
- A class whose word means several things (`AMBIGUOUS_CLASSES`) says which one: `ScoreRow`, not `Row`.
- A docstring begins with a verb or a noun, not with a question word (`OPENING`).
- The body of a function has at most `MAX_BODY_LINES` lines; ruff limits the parameters before it (`PLR0913`).
- The docstring of a public function names each array parameter, because a type such as `Tensor` gives neither shape nor
  dtype. An override without a docstring has its base's.
- It also names each `float` whose own name gives neither a unit nor a quantity of the field (`QUANTITIES`).
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("podscale", "components", "pipelines", "benchmarks", "tools", "tests", "images")
LIBRARY = "podscale"

PRIVATE_WORDS = {
    **dict.fromkeys(("life", "lives"), "launch"),
    "pulse": "heartbeat",
    "heed": "apply",
    **dict.fromkeys(("settle", "settled"), "resolve, run_due_actions"),
    "meeting": "rendezvous",
    **dict.fromkeys(("seat", "seats"), "rank env"),
    "whereabouts": "progress tracker",
    "census": "peer status",
    "comeback": "rejoin",
    **dict.fromkeys(("told", "tell", "tells", "hear", "heard"), "message, report, receive"),
    **dict.fromkeys(("speak", "spoken", "said"), "message, report, log"),
    **dict.fromkeys(("lent", "lend"), "swapped"),
    "vigil": "watch, wait",
    **dict.fromkeys(("trouble", "troubles"), "problem, failure"),
    "patience": "timeout, retry policy",
    "figures": "metrics, scores, values",
    **dict.fromkeys(("companion", "companions"), "owned objects"),
    "whence": "source, origin",
    **dict.fromkeys(("born", "unborn"), "started"),
    **dict.fromkeys(("carry", "carried"), "run, keep, state"),
    **dict.fromkeys(("lap", "laps"), "interval"),
    "notes": "heartbeat record, remarks",
    **dict.fromkeys(("orphan", "orphans"), "leftover process"),
    "stretch": "interval, range",
    **dict.fromkeys(("demand", "demands"), "request, required"),
    **dict.fromkeys(("shortage", "shortages"), "out of memory, deficit"),
    "lacking": "missing",
    **dict.fromkeys(("arm", "arms"), "group"),
    "imaginary": "synthetic",
    "outline": "dry run, summary",
    **dict.fromkeys(("stand", "standing"), "status, fake"),
    **dict.fromkeys(("room", "rooms"), "package, space, margin"),
    "house": "repository, project",
    **dict.fromkeys(("floor", "floors"), "minimum, layer"),
    **dict.fromkeys(("finding", "findings"), "result, problem, conclusion"),
}
"""Private words, as whole parts of a name, and the field's terms to use instead.

`own`, `whole` and `word` are left out: `own_loss`, `whole_image` and `command_words` are plain English.
"""

EXEMPT_NAMES = {
    "components/findings/component.py:findings": "the name of a component of Kubeflow Pipelines, in compiled packages",
    "components/steps.py:findings": "the step of that component",
    "LIFE_BEGAN": "named like its environment variable",
    "LEASE_PATIENCE": "named like its environment variable",
    "carry": "state of a jax.lax.scan",
    "whence": "parameter of io.IOBase.seek",
}
"""Names that may contain a private word, anywhere or in one file, and the reason."""

AMBIGUOUS_CLASSES = ("Call", "Entry", "Note", "Pace", "Place", "Row", "Segment", "Session", "State", "View")
"""Names that a class must not have without another word."""

OPENING = re.compile(r"\s*(What|How|Whether|Where|Who|Whose)\b")
"""Beginning of a docstring that is a question instead of a name or an action."""

ARRAY_TYPE = re.compile(r"\b(Tensor|NDArray|ArrayLike|Array)\b")
"""Annotation that gives neither shape nor dtype."""

FLOAT_TYPE = re.compile(r"float( \| None)?")
UNITS = ("seconds", "bytes", "gib", "share", "per_image", "per_epoch")
"""Endings of a name that give its unit."""
QUANTITIES = (
    *("epoch", "loss", "top1", "top5", "grad_norm", "learning_rate", "momentum", "beta1", "beta2", "eps"),
    *("seconds_left", "value", "width", "height"),
)
"""Names of the field's quantities, whose unit or range is the same everywhere; `value` has that of what is set."""

MAX_BODY_LINES = 60
"""Longest body of a function, with its docstring and without the lines of its parameters."""

PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Problem(NamedTuple):
    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def parts_of(name: str) -> list[str]:
    """Return the words of a snake_case or CamelCase name."""
    return [part.lower() for part in PARTS.findall(name)]


def private_word(name: str) -> str | None:
    if name in EXEMPT_NAMES:
        return None
    return next((part for part in parts_of(name) if part in PRIVATE_WORDS), None)


def name_problems(tree: ast.Module, file: str) -> Iterator[Problem]:
    """Yield each private word in the name of the module or in a name that it defines."""
    for name, line in [(Path(file).stem, 1), *_defined_names(tree)]:
        if (word := private_word(name)) and f"{file}:{name}" not in EXEMPT_NAMES:
            yield Problem(file, line, f"{name}: use another word for `{word}` ({PRIVATE_WORDS[word]})")


def class_problems(tree: ast.Module, file: str) -> Iterator[Problem]:
    """Yield each class whose name is one ambiguous word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.lstrip("_") in AMBIGUOUS_CLASSES:
            yield Problem(file, node.lineno, f"{node.name}: means several things; say which one with another word")


def opening_problems(tree: ast.Module, file: str) -> Iterator[Problem]:
    """Yield each docstring that begins with a question word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            text = ast.get_docstring(node) or ""
            if opening := OPENING.match(text):
                line = getattr(node, "lineno", 1)
                problem = f'docstring begins with "{opening[1]}" instead of a verb or a noun: {text.splitlines()[0]}'
                yield Problem(file, line, problem)


def length_problems(tree: ast.Module, file: str) -> Iterator[Problem]:
    """Yield each function whose body is too long."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            lines = (node.end_lineno or 0) - node.body[0].lineno + 1
            if lines > MAX_BODY_LINES:
                yield Problem(file, node.lineno, f"{node.name}: {lines} lines, more than {MAX_BODY_LINES}; split it")


def parameter_problems(tree: ast.Module, file: str) -> Iterator[Problem]:
    """Yield each array, and each number without a unit, that the docstring of a public function does not name."""
    for function, owner in _public_functions(tree):
        text = ast.get_docstring(function)
        if text is None and owner is not None and owner.bases:
            continue
        arguments = function.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            annotation = ast.unparse(argument.annotation) if argument.annotation else ""
            missing = _missing_facts(argument.arg, annotation)
            if missing and not re.search(rf"\b{argument.arg}\b", text or ""):
                problem = f"{function.name}: the docstring does not name `{argument.arg}` ({annotation}): {missing}?"
                yield Problem(file, function.lineno, problem)


def _missing_facts(name: str, annotation: str) -> str:
    """Return the facts of a parameter that its name and type do not give; empty if they suffice."""
    if ARRAY_TYPE.search(annotation):
        return "shape, dtype"
    if FLOAT_TYPE.fullmatch(annotation) and name not in QUANTITIES and not name.endswith(UNITS):
        return "unit, range"
    return ""


def problems_of(tree: ast.Module, file: str) -> list[Problem]:
    """Return the problems of a module, by line.

    Args:
        file: Path from the top of the repository; rules for the library depend on it.
    """
    rules = (name_problems, class_problems, opening_problems, length_problems)
    problems = [problem for rule in rules for problem in rule(tree, file)]
    if Path(file).parts[0] == LIBRARY:
        problems += parameter_problems(tree, file)
    return sorted(problems, key=lambda problem: problem.line)


def _defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that a module defines, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.alias(asname=str()):
                yield str(node.asname), node.lineno
            case ast.ExceptHandler(name=str()) | ast.MatchAs(name=str()) | ast.MatchStar(name=str()):
                yield str(node.name), node.lineno
            case ast.MatchMapping(rest=str()):
                yield str(node.rest), node.lineno


def _public_functions(
    node: ast.Module | ast.ClassDef, owner: ast.ClassDef | None = None
) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """Yield each public function and method of a module, with its class."""
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _public_functions(child, child)
        elif isinstance(child, Function) and not child.name.startswith("_"):
            yield child, owner


def main() -> int:
    """Print the problems of the tree. Returns 1 if there are any."""
    problems = [
        problem
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for problem in problems_of(ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT)))
    ]
    print(*problems, sep="\n", end="\n" if problems else "")
    return min(len(problems), 1)


if __name__ == "__main__":
    sys.exit(main())
