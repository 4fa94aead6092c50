"""Write docs/reference/presets.md from the documents that come with Podscale: `python -m tools.presets_reference`."""

import re
from collections.abc import Iterator
from pathlib import Path

from pipelines import presets
from podscale.config import RunConfig, load

TARGET = Path(__file__).resolve().parents[1] / "docs" / "reference" / "presets.md"

HEAD = """# Presets

The run documents that come with Podscale, by the name that commands take: `podscale run NAME`. Generated from
`pipelines/presets/` by `tools/presets_reference.py`; a test keeps it true. `podscale presets` lists them,
`podscale config NAME` prints one with every option.

The text of each preset is the head of its document. "Claim" is what was published; the report of a run compares itself
with it. "Ours" is what the publication does not say, or what differs here. Settings that a head does not name are ours
too: intervals of evaluation and checkpoints, workers, resources, `min_shards`. None of the published runs has run at
its full size here; [what was measured](../explanation/measured.md) has what did.
"""

STUDIES_HEAD = """## Studies

Grids of runs for `podscale study NAME`; [studies](../how-to/studies.md) explains them.

| study | what it is |
|---|---|"""

_PARAGRAPH = re.compile(r"[A-Z][\w' ()]{2,24}: ")
_REMARK = re.compile(r"\s{3,}\((.+)\)$")


def render() -> str:
    """Return the page."""
    documents = {name: load(presets.resolve_preset(name)) for name in presets.preset_names()}
    published = {name: config for name, config in documents.items() if config.claim.source is not None}
    own = {name: config for name, config in documents.items() if name not in published}
    parts = [
        HEAD,
        "## To start from\n",
        "| preset | model | images, px | batch | epochs | rule |",
        "|---|---|---|---|---|---|",
        *(_row(name, _settings(config)) for name, config in own.items()),
        "\n## Published runs\n",
        "| preset | model | batch | epochs | rule | top-1, % | minutes | hardware |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(name, [*_settings(config, image=False), *_claim(config)]) for name, config in published.items()),
        "",
        STUDIES_HEAD,
        *(f"| `{name}` | {_escape(_study_summary(name))} |" for name in presets.study_names()),
        "",
        *(_section(name) for name in [*own, *published]),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _row(name: str, cells: list[str]) -> str:
    return f"| [`{name}`](#{name}) | {' | '.join(cells)} |"


def _settings(config: RunConfig, *, image: bool = True) -> list[str]:
    side = [f"{config.input.image_size}"] if image else []
    return [
        config.model.name,
        *side,
        f"{config.train.global_batch:,}",
        f"{config.train.epochs:g}",
        config.train.optimizer.name.upper(),
    ]


def _claim(config: RunConfig) -> list[str]:
    claim = config.claim
    top1 = "" if claim.top1 is None else f"{100 * claim.top1:.2f}"
    return [top1, "" if claim.minutes is None else f"{claim.minutes:g}", claim.hardware or ""]


def _section(name: str) -> str:
    lines = _head_lines(presets.resolve_preset(name))
    body = "\n\n".join(_blocks(lines))
    return f"## {name}\n\n{body}\n\nDocument: [{name}.yaml](../../pipelines/presets/{name}.yaml)\n"


def _study_summary(name: str) -> str:
    return _head_lines(presets.resolve_study(name))[0]


def _head_lines(path: Path) -> list[str]:
    """Return the comment at the top of a document, without its marks."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return lines


def _blocks(lines: list[str]) -> Iterator[str]:
    """Yield the paragraphs of a head; indented lines are code."""
    block: list[str] = []
    code = False
    for line in [*lines, ""]:
        indented = line.startswith("  ")
        begins = not code and block and _PARAGRAPH.match(line)
        if block and (not line or indented != code or begins):
            yield _code(block) if code else _escape(" ".join(block))
            block = []
        if line:
            block.append(line)
            code = indented


def _code(lines: list[str]) -> str:
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    text = "\n".join(_REMARK.sub(r"   # \1", line[margin:]) for line in lines)
    return f"```\n{text}\n```"


def _escape(text: str) -> str:
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*|])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
