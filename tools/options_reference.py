"""Write docs/reference/options.md, a page for each section, from the run document's model.

Run `python -m tools.options_reference`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from podscale.config import RunConfig, option_names
from podscale.config.fields import is_section, section_of

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
TARGET = REFERENCE / "options.md"
SECTION_PAGES = REFERENCE / "options"

HEAD = """# Options

A run document is a YAML file with the options below; an option that it leaves out has its default. Generated from
`podscale/config` by `tools/options_reference.py`; a test keeps it true.

A document needs only a few lines. `--set` changes single options on the command line:

```yaml
run: {id: flowers, seed: 1}
data: {source: /data/flowers}
model: {name: resnet50}
train:
  epochs: 30
  global_batch: 256
  schedule: {name: cosine, learning_rate: 0.1, warmup_epochs: 5}
```

```
podscale run flowers.yaml --set train.epochs=40 --set run.id=flowers-40
podscale config flowers.yaml       # every option with its value
```

An unknown option is an error, which names the nearest known one.
"""

CLASSES = """## Classes

The class of an option, in the tables below, says what the option affects, and if you may change it when you resume a
run:

| class | affects | a change in an existing run |
|---|---|---|
| `result` | weights and scores | is refused: give the new run its own `run.id` |
| `placement` | where and on how many processes the run computes | is allowed: the run resumes with the new value |
| `display` | what is shown and logged | is allowed |
"""


class Group(NamedTuple):
    """Options that people change together."""

    title: str
    text: str
    options: tuple[str, ...]
    example: str


FIRST_OPTIONS = (
    Group(
        "The run",
        "The id names the run directory and the jobs. A command with the same id resumes the run.",
        ("run.id", "run.workspace", "run.seed"),
        "podscale run RUN --set run.id=flowers-seed2 --set run.seed=2",
    ),
    Group(
        "The images",
        "A folder with a subfolder for each class, a table, an archive or a URL.",
        ("data.source", "data.format", "data.validation_fraction", "input.image_size", "input.crop.flip"),
        "podscale run RUN --set data.source=/data/flowers --set input.image_size=160",
    ),
    Group(
        "The model and its training",
        "If you multiply the batch by k, usually multiply the learning rate by k too, and add a warm-up. "
        "`train.recipe` fills in published settings for a batch.",
        (
            "model.name",
            "train.recipe",
            "train.epochs",
            "train.global_batch",
            "train.accumulation",
            "train.optimizer.name",
            "train.optimizer.weight_decay",
            "train.schedule.name",
            "train.schedule.learning_rate",
            "train.schedule.warmup_epochs",
            "train.precision",
        ),
        "podscale run RUN --set train.global_batch=1024 --set train.schedule.learning_rate=0.4 "
        "--set train.schedule.warmup_epochs=5",
    ),
    Group(
        "Evaluation and checkpoints",
        "",
        ("evaluate.every_epochs", "train.target_top1", "checkpoint.every_epochs"),
        "podscale run RUN --set evaluate.every_epochs=5 --set train.target_top1=0.76",
    ),
    Group(
        "Where it runs",
        "On this machine (`podscale run`), or on a cluster (`podscale submit`).",
        ("launch.backend", "launch.hardware", "launch.nodes", "launch.processes", "input.workers"),
        "podscale submit RUN --set launch.hardware='nvidia-h100-80gb x8' --set launch.nodes=4",
    ),
)
"""Options that people change first, for the first page."""


def pages() -> dict[Path, str]:
    """Return the text of each page by its path."""
    sections = RunConfig.model_fields.items()
    return {
        TARGET: _first_page(),
        **{SECTION_PAGES / f"{name}.md": _section_page(name, info) for name, info in sections},
    }


def _first_page() -> str:
    rows = {row.name: row for name, info in RunConfig.model_fields.items() for row in _all_rows(name, _model_of(info))}
    parts = [HEAD, CLASSES, "## Change these first\n"]
    for group in FIRST_OPTIONS:
        parts += [f"### {group.title}\n", *([f"{group.text}\n"] if group.text else [])]
        parts += [*_table(rows[name] for name in group.options), "", f"```\n{group.example}\n```\n"]
    parts += ["## All options by section\n", "| section | options | subject |", "|---|---|---|"]
    for name, info in RunConfig.model_fields.items():
        options = sum(option.startswith(f"{name}.") for option in option_names())
        parts.append(f"| [`{name}`](options/{name}.md) | {options} | {_summary(name, _model_of(info))} |")
    return "\n".join(parts) + "\n"


SUMMARIES = {
    "model": "Architecture and its parts.",
    "model.batch_norm": "Batch statistics and their groups.",
    "train": "Training: length, batch, loss, precision, optimizer, schedule and all-reduce.",
    "train.optimizer": "Optimizer. Options that only one optimizer has are in the sections below.",
    "train.optimizer.adam": "Adam and AdamW.",
    "train.optimizer.rmsprop": "RMSProp.",
    "train.schedule": "Learning rate and momentum over the run.",
    "evaluate": "Evaluation, during the training and as a stage of its own.",
    "checkpoint": "Times and number of checkpoints.",
    "telemetry": "Metrics endpoint, logs and experiment trackers.",
    "launch": "Processes, machines and jobs.",
}
"""Subjects of sections whose classes have no docstring."""


def _summary(name: str, model: type[BaseModel]) -> str:
    text = SUMMARIES.get(name) or " ".join((model.__doc__ or "").partition("\n\n")[0].split())
    assert text, f"SUMMARIES: the section needs a subject (got {name})"
    return text.replace("|", "\\|")


def _section_page(name: str, info: FieldInfo) -> str:
    model = _model_of(info)
    parts = [
        f"# Options of {name}\n",
        f"{_summary(name, model)} Generated from `podscale/config` by `tools/options_reference.py`; a test keeps it "
        "true. [Options](../options.md) explains the classes and lists the options that people change first.\n",
        *_tables(name, model, level=1),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _tables(prefix: str, model: type[BaseModel], level: int) -> Iterator[str]:
    """Yield the table of a section's own options, then a heading and tables for each section inside."""
    if level > 1:
        yield f"{'#' * min(level, 3)} {prefix}\n"
        yield f"{_summary(prefix, model)}\n"
    yield from _table(_rows(prefix, model))
    yield ""
    for name, info in model.model_fields.items():
        if (inner := _subsection(info)) is not None:
            yield from _tables(f"{prefix}.{name}", inner, level + 1)
        elif (entry := _entry(info)) is not None:
            yield f"{'#' * min(level + 1, 3)} Entries of {prefix}.{name}\n"
            yield from _table(_all_rows(f"{prefix}.{name}[]", entry))
            yield ""


class OptionRow(NamedTuple):
    name: str
    kind: str
    default: str
    text: str


def _table(rows: Iterator[OptionRow]) -> Iterator[str]:
    yield "| option | class | default | meaning |"
    yield "|---|---|---|---|"
    yield from (f"| `{row.name}` | {row.kind} | {row.default} | {row.text} |" for row in rows)


def _all_rows(prefix: str, model: type[BaseModel]) -> Iterator[OptionRow]:
    """Yield the options of a section, those of the sections inside included."""
    yield from _rows(prefix, model)
    for name, info in model.model_fields.items():
        if (inner := _subsection(info)) is not None:
            yield from _all_rows(f"{prefix}.{name}", inner)


def _rows(prefix: str, model: type[BaseModel]) -> Iterator[OptionRow]:
    for name, info in model.model_fields.items():
        if _subsection(info) is not None:
            continue
        extra: Any = info.json_schema_extra
        choices = [argument for argument in get_args(info.annotation) if isinstance(argument, str)]
        listed = f" ({', '.join(f'`{choice}`' for choice in choices)})" if choices else ""
        text = _escape(f"{info.description}{listed}")
        default = "required" if info.is_required() else f"`{json.dumps(info.default)}`"
        yield OptionRow(f"{prefix}.{name}", extra["x-class"], default, text)


def _escape(text: str) -> str:
    """Return a table's cell, in which `<` outside code is no HTML."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part.replace("<", "&lt;") if index % 2 == 0 else part for index, part in enumerate(parts))


def _model_of(info: FieldInfo) -> type[BaseModel]:
    model = _subsection(info)
    assert model is not None
    return model


def _subsection(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    return kind if is_section(kind) else None


def _entry(info: FieldInfo) -> type[BaseModel] | None:
    """Return the section type of a list of sections."""
    return section_of(info.annotation) if get_origin(info.annotation) is tuple else None


if __name__ == "__main__":
    SECTION_PAGES.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
