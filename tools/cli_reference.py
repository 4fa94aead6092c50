"""Write docs/reference/cli.md from the command line's functions: `python -m tools.cli_reference`."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from enum import EnumType
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from podscale.cli import app

TARGET = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"

HEAD = """# The command line

Every command of `podscale`, with its arguments, options and defaults. Generated from `podscale/cli` by
`tools/cli_reference.py`; a test keeps it true.

A run document is YAML. `RUN` is its path or the name of a [preset](presets.md), and may be left out for the embedded
digits. Every command that takes a document also takes `--set section.key=value`, as often as needed
([options](options.md)). `--help` after a command prints what stands here; `podscale --install-completion` adds
completion of commands, presets and option names to the shell.
"""

TOPICS = {
    "Runs on this machine": (
        "run",
        "shard",
        "train",
        "collapse",
        "evaluate",
        "report",
        "predict",
        "merge-predictions",
        "export",
        "serve",
        "study",
    ),
    "Look before and while it runs": ("config", "presets", "watch", "monitor", "doctor"),
    "Jobs on a cluster": ("submit", "status", "logs", "stop", "list", "render"),
    "Kubeflow Pipelines": ("compile", "pipeline upload", "pipeline run", "pipeline schedule"),
    "Monitoring": ("rules export", "dashboards export"),
    "Measurements": ("bench train", "bench input", "bench allreduce", "tpu compile"),
}

REMARKS = {
    "run": """The same command continues an interrupted run, and does not repeat finished stages.

```
podscale run imagenette --dry-run              # images, steps, processes, memory; starts nothing
podscale run digits --set train.epochs=40      # one option changed
podscale run digits --fresh                    # moves the earlier run of this id aside
podscale run digits --runner docker            # each stage in a container of launch.image
```

[Images](../how-to/images.md) has the containers.""",
    "shard": """```
podscale shard imagenette --index 3 --of 8     # part 3 of 8, as the pods of an indexed job do
podscale shard --inspect datasets/FINGERPRINT --verify
podscale shard my-run.yaml --verify --decode-index   # repairs damaged shards and decode indexes
```

`--contact-sheet FOLDER` writes a picture of each split. See [shard sets](../how-to/shard-sets.md).""",
    "collapse": "See [ensemble](../explanation/ensemble.md).",
    "evaluate": """```
podscale evaluate digits
podscale evaluate runs/a runs/b --shard-set datasets/FINGERPRINT
```

Two models or more are evaluated together. `--shard-set` takes an fsspec URL too (`http://`, `gs://`, `s3://`), which is
read through the node-local cache of `input.cache_dir`.""",
    "predict": """```
podscale predict runs/digits photos more.tar --out rows.csv --html sheet.html
find photos -name '*.jpg' | podscale predict runs/digits - --top 1
```

Exits with 1 if an image has no prediction; its row has the reason. With `--part`, exits with 0 when all rows of the
part are written. See [predictions](../how-to/predict.md).""",
    "merge-predictions": """```
podscale predict runs/digits photos --part 0/2 --out parts
podscale predict runs/digits photos --part 1/2 --out parts
podscale merge-predictions parts --out rows.csv
```

Exits with 1 if an image has no prediction. Nothing is deleted.""",
    "serve": """```
podscale serve runs/digits --port 8080
podscale serve runs/digits/export/model.onnx    # an exported file, without PyTorch
curl -H 'Content-Type: image/jpeg' --data-binary @photo.jpg 'http://127.0.0.1:8080/predict?top=3'
curl -F image=@a.jpg -F image=@b.jpg http://127.0.0.1:8080/predict
```

Exits with 0 after SIGTERM, once the accepted requests are answered. See [serving](../how-to/serve.md).""",
    "export": """```
podscale export runs/digits --preprocessing    # pixels in, probabilities out
podscale export runs/digits --int8 --images more-photos
podscale export runs/digits --repository models    # models/digits/1/model.onnx, for Triton and KServe
```

Exits with 1 if the file would differ from the model; nothing is written then. See
[exported files](../how-to/export.md).""",
    "study": "Resumes trial by trial. See [studies](../how-to/studies.md).",
    "config": """```
podscale config ying2018-32k --set train.epochs=90
podscale config digits --plot                  # learning rate, momentum and weight decay over the run
podscale config --schema > schema.json         # for editors
```""",
    "watch": """`RUN` is a run directory, a document, a preset or an id; without it the newest run in `./runs`.
[A picture](../images/watch.svg) of a real run (by `tools/watch_picture.py`).""",
    "monitor": """Starts the Prometheus that is installed on this machine, prints which alerts fire and which endpoints
cannot be scraped. Endpoints with TLS and tokens need no option; those with mTLS need `--client-certificate` and
`--client-key`. Samples stay in `FOLDER/.prometheus`.""",
    "doctor": """```
podscale doctor                                # this machine
podscale doctor --cluster digits               # operators, permissions, nodes, quota, volume, queue, images
podscale doctor --cluster digits --no-pull     # the same, and it creates nothing
```

With `--cluster` it reads, and lets the API server check the job by a dry run. Only a node knows one thing: whether
it can pull the images. For this a Job of one small pod runs `podscale --version` in `launch.image` and
`launch.launcher_image`, with the service account and the pull secrets of the run, for at most a minute. It is deleted
in any case; if doctor is killed, the cluster deletes it.""",
    "submit": """Submits each stage as a job, or adopts the job that exists, follows it to its end and shows the log of
rank 0. SIGTERM and Ctrl-C leave the job running unless `--stop-on-signal` is given. `podscale-defaults`, the ConfigMap
that the chart leaves in the namespace, holds below the document; `--defaults FILE` replaces it.

Before the first stage it looks at what later ones need: the namespace, claims, service account, queue, and the kind of
job of `launch.backend`. What is missing is reported at once; what these credentials may not read is left out.""",
    "status": "`RUN` may be the id of the run, here and in `logs` and `stop`.",
    "stop": """The pods save first, and submitting again continues. The job of a pipeline returns when its task is
retried: terminate the pipeline's run instead.""",
    "render": """```
podscale render digits --backend pytorchjob --stage all | kubectl apply -f -
```

Examples are in [manifests/jobs](../../manifests/jobs).""",
    "compile": "The package is for `podscale pipeline` or for KFP's user interface. See [kfp](../how-to/kfp.md).",
    "pipeline upload": "An unchanged package is sent once. See [the pipeline on KFP](../how-to/kfp.md).",
    "pipeline run": "With `--wait` it shows the stages as they start and end, and fails if the run fails.",
    "pipeline schedule": "Each run is named `<run.id>-<time>`.",
    "rules export": "See [runbooks](../runbooks/README.md), and [drills](../how-to/drills.md) for `--shorten`.",
    "dashboards export": "For a Grafana without Podscale's chart. See [dashboards](../how-to/dashboards.md).",
    "bench train": """One variant, a grid (`--vary a.b=x,y`) or a sweep. Started again, it measures what is missing. See
[gpu](../how-to/gpu.md).""",
    "bench input": """Loaders take turns, each in its steady state, on the images of a run, a folder, an archive or a
shard set. With RUN the report has what its model takes on this host, the headroom, and what would raise it.
See [gpu](../how-to/gpu.md#measure-the-input).""",
    "bench allreduce": "Here, or as the program of `torchrun`. See [all-reduce](../explanation/all-reduce.md).",
    "tpu compile": """Needs no TPU. It reports memory, an estimate of the largest batch that fits, collectives, work and
estimated images/s; `--sweep batch` finds that batch by compiling. See [tpu](../explanation/tpu.md).""",
}

TAIL = """## What is printed

On a terminal a run shows its stages, a line of progress with images/s and time left, and the step log in words.
Elsewhere standard output is JSON lines and nothing else: every record of `metrics.jsonl` as it is written, and one line
`ended` with stages, seconds, exit code, top-1 and the report's path. Stages and tables for people go to standard error.
`--set telemetry.log=text` or `json` sets one of the two; `NO_COLOR=1` removes the colours.

Where a run writes is in [files](files.md), what the exit codes mean in [exit codes](exit-codes.md).

## On a cluster

`--namespace` and `--context` go with all commands for jobs. Without them the document (`launch.cluster`), the pod's own
service account or the kubeconfig decides. A run has one job a stage, named `<run.id>` (training) or `<run.id>-<stage>`.
The name is the lock: of two that submit at once, one creates the job and the other adopts it, and another document
under the same id is refused. A job that succeeded stays, one that failed is replaced. The job does not need the command
that waits for it: when the API server does not answer for some minutes, or the waiting command is killed, the job runs
on, and the same command follows it again.

A stage that exits with code 2 ends its job at once, because no restart can help. So does an image that cannot be
pulled, after five minutes. The permissions that submitting needs are one table,
`podscale/kubernetes/cluster_doctor.py`: the chart's launcher role is made of it, and `podscale doctor --cluster` asks
the API server about each line.
"""


@dataclass(frozen=True)
class Command:
    """Command by its words after `podscale`."""

    name: str
    function: Any

    @property
    def summary(self) -> str:
        """First paragraph of the help."""
        return " ".join(self.help.partition("\n\n")[0].split())

    @property
    def help(self) -> str:
        return inspect.getdoc(self.function) or ""


@dataclass(frozen=True)
class CommandParameter:
    """Argument or option of a command."""

    names: tuple[str, ...]
    is_argument: bool
    value: str
    default: str
    text: str
    required: bool


def commands(instance: typer.Typer = app, prefix: str = "") -> Iterator[Command]:
    """Yield all commands in the order of the help."""
    for info in instance.registered_commands:
        assert info.callback is not None
        yield Command(prefix + (info.name or info.callback.__name__.replace("_", "-")), info.callback)
    for group in instance.registered_groups:
        assert group.typer_instance is not None
        name = group.name if isinstance(group.name, str) else group.typer_instance.info.name
        yield from commands(group.typer_instance, f"{prefix}{name} " if isinstance(name, str) else prefix)


def parameters(command: Command) -> Iterator[CommandParameter]:
    """Yield the arguments and options of a command in order."""
    hints = get_type_hints(command.function, include_extras=True)
    for name, parameter in inspect.signature(command.function).parameters.items():
        kind, *extras = get_args(hints[name]) if get_origin(hints[name]) is Annotated else [hints[name]]
        info = next((extra for extra in extras if isinstance(extra, ArgumentInfo | OptionInfo)), None)
        if info is None or info.hidden:  # Typer passes its context without one
            continue
        required = parameter.default is inspect.Parameter.empty
        yield CommandParameter(
            names=_names(name, kind, info),
            is_argument=isinstance(info, ArgumentInfo),
            value=_value(kind, info),
            default="" if required else _default(parameter.default),
            text=_cell(info.help or ""),
            required=required,
        )


def render() -> str:
    """Return the page."""
    known = {command.name: command for command in commands()}
    placed = [name for names in TOPICS.values() for name in names]
    assert sorted(placed) == sorted(known), f"TOPICS: name each command once (got {set(placed) ^ set(known)})"
    assert REMARKS.keys() <= known.keys(), f"REMARKS: no such command (got {REMARKS.keys() - known.keys()})"
    parts = [HEAD]
    for topic, names in TOPICS.items():
        rows = [f"| [`{name}`](#podscale-{name.replace(' ', '-')}) | {_cell(known[name].summary)} |" for name in names]
        parts += [f"**{topic}**\n", "| command | what it does |", "|---|---|", *rows, ""]
    parts.append(TAIL)
    for name in placed:
        parts += [*_section(known[name]), ""]
    return "\n".join(parts).rstrip() + "\n"


def _section(command: Command) -> Iterator[str]:
    found = list(parameters(command))
    arguments = [one for one in found if one.is_argument]
    yield f"## podscale {command.name}\n"
    yield _escape(command.summary) + "\n"
    if command.name in REMARKS:
        yield REMARKS[command.name] + "\n"
    if found:
        yield "| argument or option | default | meaning |"
        yield "|---|---|---|"
        yield from map(_row, [*arguments, *(one for one in found if not one.is_argument)])


def _row(one: CommandParameter) -> str:
    value = one.value.replace("|", "\\|")
    names = (
        f"`{value}`"
        if one.is_argument
        else ", ".join(f"`{name}`" for name in one.names) + (f" `{value}`" if value else "")
    )
    return f"| {names} | {'required' if one.required else one.default} | {one.text} |"


def _escape(text: str) -> str:
    """Return a text in which `<` outside code is no HTML."""
    parts = text.split("`")
    return "`".join(part.replace("<", "&lt;") if index % 2 == 0 else part for index, part in enumerate(parts))


def _cell(text: str) -> str:
    return _escape(text).replace("|", "\\|")


def _names(name: str, kind: Any, info: ArgumentInfo | OptionInfo) -> tuple[str, ...]:
    first = (info.default,) if isinstance(info.default, str) else ()  # typer keeps the first name in Annotated there
    declared = tuple(name for names in (*first, *(info.param_decls or ())) for name in names.split("/"))
    if declared or isinstance(info, ArgumentInfo):
        return declared
    option = name.replace("_", "-")
    return (f"--{option}", f"--no-{option}") if kind is bool else (f"--{option}",)


def _value(kind: Any, info: ArgumentInfo | OptionInfo) -> str:
    """Return the placeholder of a value; empty for a switch."""
    if info.metavar:
        return str(info.metavar)
    kind = _without_none(kind)
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    kind = get_args(kind)[0] if get_origin(kind) in (list, tuple) else kind
    if isinstance(kind, EnumType):
        members: dict[str, Any] = dict(kind.__members__)
        return "|".join(str(member.value) for member in members.values())
    return {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}[kind]


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return next(one for one in get_args(kind) if one is not NoneType)
    return kind


def _default(value: Any) -> str:
    if value is None or value is False or value in ([], (), ""):
        return ""
    value = getattr(value, "value", value)
    return f"`{str(value).lower() if value is True else value}`"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
