"""Write docs/reference/files.md from the code that writes the files: `python -m tools.files_reference`."""

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from podscale.data.decode_index import SUFFIX as DECODE_INDEX_SUFFIX
from podscale.data.decode_index import VERSION as DECODE_INDEX_VERSION
from podscale.data.index import INDEX_COLUMNS, INDEX_MAGIC, INDEX_VERSION, ImageFlag
from podscale.data.manifest import MANIFEST_FILE, Shard, ShardSetManifest, SplitSummary
from podscale.evaluation.evaluation_json import Evaluation
from podscale.runs.checkpoint.array_file import WrittenFile
from podscale.runs.checkpoint.format import SCHEMA_VERSION, CheckpointManifest, RunIdentity
from podscale.runs.directory import RunDirectory, RunFile
from podscale.runs.model_files import MODEL_FORMAT
from podscale.runs.predictions import PREDICTION_COLUMNS, PREDICTIONS_FORMAT, TEMPERED_LOSSES

TARGET = Path(__file__).resolve().parents[1] / "docs" / "reference" / "files.md"


class FileRow(NamedTuple):
    """File or folder; `pattern` is a glob relative to its directory, `always` is True if every finished run has it."""

    pattern: str
    writer: str
    text: str
    always: bool = True


RUN_FILES = (
    FileRow("config.yaml", "train", "Run document with every option resolved."),
    FileRow("environment.json", "each stage", "Versions, devices, host and command line of the newest launch."),
    FileRow("metrics.jsonl", "train, evaluate", "One JSON line for each logged step, evaluation and event (below)."),
    FileRow("telemetry.json", "each stage", "Last metric values of each stage, from its leading pod."),
    FileRow("outcome.json", "each stage", "Exit code, error and seconds of each stage's newest launch."),
    FileRow("stages.json", "each stage", "Inputs of finished stages, by which they are reused."),
    FileRow("checkpoints/step-*/*", "train", "Checkpoints (below)."),
    FileRow("model/model.safetensors", "train", "Weights and buffers in fp32 under torchvision's names."),
    FileRow("model/ema.safetensors", "train", "Running average of the weights, if `train.ema` keeps one.", False),
    FileRow("model/trained.safetensors", "train", "Weights of the last step, if `evaluate.weights` is `ema`.", False),
    FileRow(
        "model/model.json", "train", "Architecture, classes and preprocessing (below); its presence marks a model."
    ),
    FileRow("model/code.tar", "train", "Code of the user, if the run has `launch.code`.", False),
    FileRow("model/README.md", "report", "Model card."),
    FileRow("predictions.safetensors", "evaluate", "One row for each validation image (below)."),
    FileRow("predicted/*", "pods of `--stage predict`", "Rows of any images, and a folder with their parts.", False),
    FileRow("evaluation.json", "evaluate", "Scores of the model (below)."),
    FileRow("ensemble/*", "evaluate", "Predictions of each member and combination, and `passes.json`.", False),
    FileRow("export/*", "export", "Exported files of the model, and the report of each check.", False),
    FileRow("report.html", "report", "Report: one page without remote assets."),
    FileRow("summary.md", "`podscale run`", "Stages, exit codes and seconds, as text."),
    FileRow("pipeline.log", "`podscale run`", "All that the stages printed."),
    FileRow("pipeline/*", "`podscale run`", "Artifacts of the pipeline's tasks, as KFP keeps them."),
    FileRow("logs/*", "train, evaluate", "`rank-<k>.log` of each worker and `launcher-<n>.log` of each node."),
    FileRow(".heartbeat", "train", "Wall time of the run by cause, over all launches (goodput)."),
    FileRow(".lease", "each stage", "Lock and fencing number: a run directory has one writer at a time."),
    FileRow("launcher.json", "launcher of a pipeline", "Its attempts at each stage, and the last failure.", False),
    FileRow(".launcher-heartbeat", "launcher of a pipeline", "Renewed while the launcher watches the job.", False),
    FileRow(
        ".launcher-silence",
        "train",
        "Time for which the leading pod saw the same heartbeat, and the mark of an abandoned job.",
        False,
    ),
    FileRow(".job-start", "launcher of a pipeline", "When the job's pods were scheduled and started.", False),
    FileRow("metrics.url", "each stage", "Address of the metrics endpoint, while it is served.", False),
    FileRow("all_reduce.json", "train", "Measurements and choice of `train.all_reduce.algorithm: auto`.", False),
    FileRow("fused_kernels.json", "train", "Measurements and choice of `train.fused_kernels: auto` (GPU).", False),
    FileRow("hang/*", "train", "Stack of each rank when the run last hung.", False),
    FileRow("mlperf.log", "train", "MLPerf's log lines, with `telemetry.mlperf_log`.", False),
    FileRow("tensorboard/*", "train", "Event files, with the tracker `tensorboard`.", False),
    FileRow("trackers/*", "train", "Record of what was sent to experiment trackers.", False),
)

SHARD_SET_FILES = (
    FileRow(
        MANIFEST_FILE,
        "last packer",
        "Splits, shards and hashes (below). Written last: its presence marks a complete set.",
    ),
    FileRow("classes.json", "last packer", "Class names in index order."),
    FileRow("plan", "first packer", "Order and shard of every image, a column file."),
    FileRow("rejects.jsonl", "last packer", "Unusable images and the reason of each."),
    FileRow("duplicates.jsonl", "last packer", "Groups of byte-identical images."),
    FileRow("records/*/*.record", "packers", "Index rows of each shard, from which the splits' indexes are merged."),
    FileRow("*/shard-*-of-*.tar", "packers", "Images, as POSIX ustar archives that any tar reads."),
    FileRow("*/shard-*-of-*.idx", "last packer", "Index of the tar for DALI."),
    FileRow(
        f"*/shard-*-of-*{DECODE_INDEX_SUFFIX}",
        "packers, or `podscale shard --decode-index`",
        "Decode index of the shard (below), optional.",
        always=False,
    ),
    FileRow("*/index", "last packer", "Binary index of the split (below)."),
    FileRow("*/sources", "last packer", "Path of each image in the source, by row of the index."),
)

CHECKPOINT_FILES = (
    FileRow("model.safetensors", "train", "`model/<name>`: weights and buffers, OIHW, fp32."),
    FileRow("optimizer.safetensors", "train", "`optimizer/<slot>/<parameter>`: state of the update rule, fp32."),
    FileRow(MANIFEST_FILE, "train", "Step, identity of the run and hash of each file. Written last."),
)

HEAD = """# Files

The files that a run reads and writes, and their formats. Generated from the modules that write them by
`tools/files_reference.py`; a test compares the page with a real run.

Everything is below `run.workspace` (default: the current folder):

```
datasets/<fingerprint>/    a shard set, shared by all runs with the same `data` section
runs/<id>/                 one run
code/<sha256>.tar          code of users (`launch.code`), by its hash; each launch unpacks it
programs/                  programs that the JAX engine compiled, shared by all runs; may be deleted
```

JSON files are replaced atomically. Formats carry a version, and a reader refuses a version that it does not know. A run
directory belongs to one document: if a `result` option differs, the command lists the differences and stops
([classes of options](options.md#classes)).
"""

METRICS = """## metrics.jsonl

Each line is a JSON object with `time` (Unix seconds) and `kind`. Numbers that are not finite are null. After a restart,
lines of steps that are done again appear twice: the later ones hold.

| kind | keys |
|---|---|
| `step` | `step`, `epoch`, `loss`, `learning_rate`, `images_per_second` (over all ranks), \
`phases` (seconds since the last line), and more by option |
| `evaluation` | `step`, `epoch`, `top1`, `top5` (fractions), `loss` |
| `event` | `event`, such as `start`, `resumed`, `checkpoint`, `evaluated` or `done`, and its own keys |
"""

MODEL = f"""## model.json

| key | content |
|---|---|
| `format` | `{MODEL_FORMAT}` |
| `run` | Id of the run. |
| `architecture` | [Model section](options/model.md) of the document. |
| `parameters` | Number of trainable values. |
| `classes` | Class names in index order. |
| `preprocessing` | `color`, `image_size` in pixels, `crop_fraction`, `interpolation`, \
`per_image_standardization`, `mean` and `std` per channel. |
| `inference` | Other options of the document that predictions depend on, by section. |
| `training` | Epochs, batch, steps (`updates`), skipped steps, last evaluation, origin of the initial weights, \
`weights` (`trained` or `ema`). |

With `model.safetensors`, it is all that another program needs to use the model; the model card has the code.
"""


def render() -> str:
    """Return the page."""
    named = {value._name for value in vars(RunDirectory).values() if isinstance(value, RunFile)}
    missing = {name for name in named if not any(row.pattern.partition("/")[0] == name for row in RUN_FILES)}
    assert not missing, f"RUN_FILES: rows for all files of RunDirectory are needed (missing {missing})"
    parts = [
        HEAD,
        "## Run directory\n",
        *_files(RUN_FILES),
        METRICS,
        "## Checkpoint\n",
        "`checkpoints/step-<n>/`, independent of the number of ranks and of the engine. A checkpoint without a valid "
        "manifest does not count; nothing is renamed into place, so object stores serve as well.\n",
        *_files(CHECKPOINT_FILES),
        f"`manifest.json` (schema {SCHEMA_VERSION}) has the fields of a checkpoint and `sha256` of its own content:\n",
        *_fields({"": CheckpointManifest, "identity": RunIdentity, "files[]": WrittenFile}, CHECKPOINT_FIELDS),
        MODEL,
        "## predictions.safetensors\n",
        f"Columns in key order; metadata `format` is `{PREDICTIONS_FORMAT}`.\n",
        "| column | dtype | content |",
        "|---|---|---|",
        *(f"| `{name}` | {np.dtype(dtype)} | {PREDICTION_TEXTS[name]} |" for name, dtype in PREDICTION_COLUMNS.items()),
        f"| `{TEMPERED_LOSSES}` | float32 | {PREDICTION_TEXTS[TEMPERED_LOSSES]} |",
        "",
        "## evaluation.json\n",
        "Its JSON schema is `podscale/evaluation/evaluation.schema.json`.\n",
        *_schema(Evaluation.model_json_schema()),
        "## Shard set\n",
        "`datasets/<fingerprint>/`, with a folder for each split (`train`, `validation`). The same source and options "
        "give the same bytes on every machine, at any number of packers.\n",
        *_files(SHARD_SET_FILES),
        "Beside the folder, `<fingerprint>.outcome.json` and `<fingerprint>.telemetry.json` have the outcome and "
        "the last metric values of the shard stage.\n",
        "`manifest.json`:\n",
        *_fields({"": ShardSetManifest, "splits.<name>": SplitSummary, "splits.<name>.shards[]": Shard}, SHARD_FIELDS),
        f"`index`: magic `{INDEX_MAGIC.rstrip(bytes(1)).decode()}`, version {INDEX_VERSION} (u32), number of columns "
        "(u32), rows (u64), then the columns in this order, each aligned to 64 bytes, little-endian:\n",
        "| column | dtype | content |",
        "|---|---|---|",
        *(f"| `{name}` | {np.dtype(dtype)} | {INDEX_TEXTS[name]} |" for name, dtype in INDEX_COLUMNS.items()),
        "",
        "Flags: "
        + ", ".join(f"{flag.name.lower().replace('_', ' ')} {flag.value}" for flag in ImageFlag if flag.name)
        + ".",
        "",
        f"`shard-<i>-of-<n>{DECODE_INDEX_SUFFIX}`, version {DECODE_INDEX_VERSION}: a column file with the byte string "
        "of each image in the order of the shard. Its header has the sha256 of the shard; the index of another shard "
        "is not used. A byte string, little-endian, is empty or has:\n",
        *DECODE_INDEX_TEXTS,
    ]
    return "\n".join(parts).rstrip() + "\n"


CHECKPOINT_FIELDS = {
    "step": "Steps done.",
    "identity.result": "`result` options of the run; a run with others may not resume.",
    "identity.classes_sha256": "Hash of the class map.",
    "identity.data_fingerprint": "Fingerprint of the data section.",
    "files[].name": "File beside the manifest.",
    "files[].bytes": "Its size.",
    "files[].sha256": "Its hash.",
    "meta": "Position in the run: epoch, steps skipped, last evaluation, loss scale, number of ranks.",
    "top1": "Top-1 accuracy at this step, a fraction; null if there was no evaluation.",
}
SHARD_FIELDS = {
    "schema_version": "Version of this format.",
    "data_fingerprint": "Hash of the data section; the name of the folder.",
    "plan_fingerprint": "Hash of the plan: which image is in which shard.",
    "options": "Data section that the set was made with.",
    "classes_sha256": "Hash of the class map.",
    "rejects": "Unusable images by reason.",
    "duplicates": "Byte-identical images: inside a split, across splits, of different classes, dropped.",
    "splits.<name>.count": "Images, without dropped duplicates.",
    "splits.<name>.bytes": "Size of the shards.",
    "splits.<name>.class_counts": "Images of each class.",
    "splits.<name>.index_sha256": "Hash of the index.",
    "splits.<name>.shards[].name": "File name of a shard.",
    "splits.<name>.shards[].count": "Its images.",
    "splits.<name>.shards[].bytes": "Its size.",
    "splits.<name>.shards[].sha256": "Its hash.",
}
ENSEMBLE_TEXT = "Several models: members, combinations, disagreement; null for one model. The schema has its keys."
EVALUATION_TEXTS = {
    "schema_version": "Version of this format.",
    "run": "Id of the run.",
    "data_fingerprint": "Fingerprint of the data section.",
    "plan_fingerprint": "Fingerprint of the shard set's plan.",
    "classes_sha256": "Hash of the class map.",
    "split": "Split that was evaluated.",
    "samples": "Number of images.",
    "classes": "Number of classes.",
    "top5": "Fraction of samples whose true class is among the `top5_k` most probable.",
    "evaluation_seconds": "Time of the evaluation.",
    "evaluation_images_per_second": "Rate of the evaluation, over all processes.",
    "processes": "Processes of the evaluation.",
    "hardware": "Hardware of the claim.",
    "source": "Publication of the claim.",
    "name": "Class name.",
    "predicted": "Samples that were predicted as this class.",
    "correct": "Of these, samples of this class.",
    "accuracy": "Fraction of its samples that are correct.",
    "precision": "Fraction of its predictions that are correct.",
    "label": "Index of the true class.",
    "count": "Number of samples.",
    "edges": "Edges of the bins.",
    "confidence": "Mean confidence in each bin.",
    "per_class": "Scores of each class; null for a ratio without denominator.",
    "confused[].predicted": "Index of the predicted class.",
    "calibration.source": "Publication of the method.",
    "calibration.count": "Samples in each bin.",
    "calibration.accuracy": "Accuracy in each bin.",
}
"""Texts of keys, by name, for those without a description in the model; or by path, instead of that description."""
PREDICTION_TEXTS = {
    "keys": "[n]: unique key of each sample.",
    "labels": "[n]: index of the true class.",
    "topk": "[n, k]: the k most probable classes, best first; k is 5, or the number of classes if that is less.",
    "confidences": "[n, k]: their softmax probabilities.",
    "losses": "[n]: cross-entropy of the true class in nats, without label smoothing.",
    "tempered_losses": "[n, 25]: the same with the logits times 2^(i/4 - 3), i = 0 to 24; PyTorch engine only, not of "
    "several models.",
}
DECODE_INDEX_TEXTS = (
    "| bytes | content |",
    "|---|---|",
    "| 8 | XXH3-64 of the image's bytes, with the XXH3-64 of all that follows here as its seed. |",
    "| 2 | MCUs between two entries, k. |",
    "| 2 + 2 c an entry | States of the entropy decoder before the MCUs k, 2 k, ... and at the end of the scan: bits "
    "since the previous entry (uint16), then the DC predictors of the c components (int16). Bits of stuffed bytes and "
    "restart markers do not count. At a restart marker it is the state before the marker. |",
)

INDEX_TEXTS = {
    "key": "Names the sample and keys its augmentation.",
    "offset": "Start of the image in its tar, bytes.",
    "size": "Length of the image, bytes.",
    "shard": "Number of its tar in the split.",
    "label": "Index of its class.",
    "height": "Pixels.",
    "width": "Pixels.",
    "format": "1 JPEG, 2 PNG.",
    "flags": "Sum of the flags below.",
}


def unknown_files(directory: Path, rows: tuple[FileRow, ...]) -> list[str]:
    """Return the files below a directory that no row of the page names."""
    names = [path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*")) if path.is_file()]
    return [name for name in names if not any(fnmatch.fnmatchcase(name, row.pattern) for row in rows)]


def absent_files(directory: Path, rows: tuple[FileRow, ...]) -> list[str]:
    """Return the rows that every finished directory has and this one lacks."""
    return [row.pattern for row in rows if row.always and not any(directory.glob(row.pattern))]


def _files(rows: tuple[FileRow, ...]) -> Iterator[str]:
    yield "| file | written by | content |"
    yield "|---|---|---|"
    for row in rows:
        name = row.pattern.replace("step-*/*", "step-<n>/").replace("-*-of-*", "-<i>-of-<n>").removesuffix("*")
        yield f"| `{name.replace('*/', '<split>/')}` | {row.writer} | {row.text} |"
    yield ""


def _fields(models: Mapping[str, type[Any]], texts: Mapping[str, str]) -> Iterator[str]:
    """Yield the table of the fields of nested dataclasses, by the path of each."""
    names = [
        f"{path}.{field.name}" if path else field.name for path, model in models.items() for field in fields(model)
    ]
    leaves = [
        name for name in names if name not in models and f"{name}[]" not in models and f"{name}.<name>" not in models
    ]
    assert set(leaves) == set(texts), f"texts of fields (got {set(leaves) ^ set(texts)})"
    yield "| key | content |"
    yield "|---|---|"
    yield from (f"| `{name}` | {texts[name]} |" for name in texts)
    yield ""


def _schema(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the keys of a JSON schema, those of nested objects below theirs."""
    yield "| key | type | content |"
    yield "|---|---|---|"
    yield from _properties(schema, schema["$defs"], "")
    yield ""


def _properties(schema: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in schema["properties"].items():
        if name == "ensemble" and not prefix:
            yield f"| `ensemble` | object or null | {ENSEMBLE_TEXT} |"
            continue
        kind, inner = _kind(value, definitions)
        text = EVALUATION_TEXTS.get(prefix + name) or value.get("description") or (inner or {}).get("description")
        text = text or EVALUATION_TEXTS[name]
        if (inner or {}).get("title") == "ClaimCheck":
            text = "`claimed` and `achieved`; null if unknown."
        yield f"| `{prefix}{name}` | {kind} | {text.replace('|', chr(92) + '|')} |"
        if inner is not None and inner.get("title") != "ClaimCheck":
            yield from _properties(inner, definitions, f"{prefix}{name}{'[]' if kind == 'list' else ''}.")


def _kind(value: dict[str, Any], definitions: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Return the type of a key, and the object inside if it has one."""
    if "$ref" in value:
        return "object", definitions[value["$ref"].rpartition("/")[2]]
    if "anyOf" in value:
        kind, inner = _kind(next(one for one in value["anyOf"] if one.get("type") != "null"), definitions)
        return f"{kind} or null", inner
    if value.get("type") == "array":
        items = value.get("items", {})
        return "list", _kind(items, definitions)[1] if isinstance(items, dict) else None
    return ("text" if value.get("type") == "string" else value.get("type", "text")), None


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
