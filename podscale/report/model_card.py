"""Model card model/README.md: scores, limits, data and use of the weights (Mitchell et al. 2019)."""

from pathlib import Path

from podscale.config import TrainSection
from podscale.config.batch_phases import format_batches
from podscale.data.shard_set import ShardSet
from podscale.evaluation.evaluation_json import Claim
from podscale.report import markup
from podscale.report.report_data import ReportData, read_report_data
from podscale.util.files import write_atomically
from podscale.util.formatting import printable

LISTED_CLASSES = 50
WEAKEST_CLASSES = 5


def write_model_card(run_directory: Path, shard_set: ShardSet | Path | str | None) -> Path:
    """Write <run>/model/README.md, in an existing directory, and return its path."""
    data = read_report_data(Path(run_directory), shard_set)
    path = data.run.model / "README.md"
    write_atomically(path, model_card(data))
    return path


def model_card(data: ReportData) -> str:
    """Render the card as Markdown, with escaped class names and paths."""
    sections = (_header_section, _scores_section, _limits_section, _data_section, _recipe_section, _usage_section)
    return "\n\n".join(text for section in sections if (text := section(data))) + "\n"


def escape_markdown(value: object) -> str:
    """Escape text for one line of Markdown."""
    shown = printable(str(value)).replace("\n", "\\n")
    return "".join(f"\\{c}" if c in "\\`*_[]<>#|~$&" else c for c in shown)


def _header_section(data: ReportData) -> str:
    if data.config is None:
        return f"# {escape_markdown(data.name)}"
    size = data.config.eval_image_size
    return (
        f"# {escape_markdown(data.name)}\n\n"
        f"An image classifier: {data.config.model.name} over {len(data.classes)} classes, for "
        f"RGB images of {size} x {size} pixels. Trained with Podscale."
    )


def _scores_section(data: ReportData) -> str:
    if data.evaluation is None:
        reasons = [entry.reason for entry in data.missing if entry.part == "the scores"]
        return f"## Scores\n\nNot evaluated: {escape_markdown(reasons[0] if reasons else 'there is no evaluation')}"
    scores, speed = data.evaluation.scores, data.evaluation.throughput
    low, high = scores.top1_interval
    interval = f"95 % interval {100 * low:.2f} to {100 * high:.2f}"
    rows = [
        ("top-1 accuracy", f"{markup.format_percent(scores.top1, 2)} ({interval})"),
        (f"top-{scores.top5_k} accuracy", markup.format_percent(scores.top5, 2)),
        ("mean class accuracy", markup.format_percent(scores.balanced_accuracy, 2)),
        ("cross-entropy", f"{markup.format_loss(scores.loss)} nats"),
        ("expected calibration error", f"{markup.format_percent(scores.ece, 2)} (15 bins)"),
        ("training throughput", f"{markup.format_rate(speed.training_images_per_second)} images/s"),
        ("training time", markup.format_seconds(speed.training_seconds)),
        *_claim_rows(data.evaluation.claim),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    split = data.evaluation.identity.split
    return f"## Scores\n\nOn the {scores.samples} images of the split {split}, each once.\n\n| | |\n|---|---|\n{table}"


def _claim_rows(claim: Claim) -> list[tuple[str, str]]:
    """Return rows with the published run's claims, then its hardware and source."""
    top1, minutes, rate = claim.top1.claimed, claim.minutes.claimed, claim.images_per_second.claimed
    rows = [] if top1 is None else [("top-1 claimed by the published run", markup.format_percent(top1, 2))]
    rows += [] if minutes is None else [("training time claimed", markup.format_seconds(60 * minutes))]
    rows += [] if rate is None else [("training throughput claimed", f"{markup.format_rate(rate)} images/s")]
    where = ", ".join(escape_markdown(part) for part in (claim.hardware, claim.source) if part)
    return [*rows, ("claimed on", where)] if rows and where else rows


def _limits_section(data: ReportData) -> str:
    lines = [
        f"- It always predicts one of its {len(data.classes)} classes, whatever the image shows.",
        "- The scores hold for images like those of the validation split; other cameras, places or times may differ.",
        "- If checkpoints or settings were chosen by the validation split, it is not an independent test set.",
    ]
    if data.evaluation is not None:
        weak = sorted((c for c in data.evaluation.per_class if c.accuracy is not None), key=lambda c: c.accuracy or 0)
        named = ", ".join(
            f"{escape_markdown(c.name)} ({markup.format_percent(c.accuracy)} of {c.samples})"
            for c in weak[:WEAKEST_CLASSES]
        )
        lines.append(f"- Weakest classes: {named}.")
        if empty := sum(c.samples == 0 for c in data.evaluation.per_class):
            lines.append(f"- {empty} classes have no validation image: their accuracy is not known.")
    return "## Limits\n\n" + "\n".join(lines)


def _data_section(data: ReportData) -> str:
    if data.shards is None:
        return ""
    manifest = data.shards.manifest
    counts = ", ".join(f"{split.count} {name}" for name, split in manifest.splits.items())
    listed = ", ".join(escape_markdown(name) for name in data.shards.classes[:LISTED_CLASSES])
    more = len(data.shards.classes) - LISTED_CLASSES
    return (
        f"## Data\n\n- Source: {escape_markdown(manifest.options.get('source', 'unknown'))}\n- Images: {counts}\n"
        f"- Left out as unusable: {sum(manifest.rejects.values())}\n"
        f"- Shard set: `{printable(manifest.data_fingerprint)}`, plan `{printable(manifest.plan_fingerprint)}`\n"
        "- Licence of the data: not stated in the run document. Find it out before you distribute the weights.\n"
        f"- Classes: {listed}" + (f" and {more} more (model.json lists all)" if more > 0 else "")
    )


def _recipe_section(data: ReportData) -> str:
    if data.config is None:
        return ""
    train, schedule, optimizer = data.config.train, data.config.train.schedule, data.config.train.optimizer
    momentum = f" with momentum {optimizer.momentum:g}," if optimizer.has_option("momentum") else ","
    lines = [
        f"- {train.epochs:g} epochs in batches of {format_batches(train)}, {train.precision}, "
        f"seed {data.config.run.seed}",
        f"- {optimizer.name.upper()}{momentum} weight decay {optimizer.weight_decay:g}",
        f"- Learning rate {schedule.learning_rate:g}, {schedule.name}, warm-up over {schedule.warmup_epochs:g} epochs",
        f"- Label smoothing {train.label_smoothing:g}; random crops at {data.config.input.image_size} pixels",
        *_origin_lines(data),
        *_fine_tuning_lines(train),
        *([f"- Settings by the recipe {escape_markdown(train.recipe_origin)}"] if train.recipe_origin else []),
        "- Everything else is in config.yaml of the run directory",
    ]
    return "## Recipe\n\n" + "\n".join(lines)


def _origin_lines(data: ReportData) -> list[str]:
    """Return the line on the initial weights, from model.json; none for a run from random weights."""
    origin = data.model.get("training", {}).get("started_from") if data.model else None
    if not isinstance(origin, dict):
        return []
    facts = [f"Initial weights from {escape_markdown(origin.get('source', origin.get('run', 'unknown')))}"]
    if "run" in origin:
        facts[0] += f" at epoch {origin.get('epoch', 0):g}"
    facts += [f"{key} {escape_markdown(origin[key])}" for key in ("revision", "sha256", "url") if key in origin]
    if "loaded" in origin:
        facts.append(f"{origin['loaded']} arrays loaded, the classifier {escape_markdown(origin.get('head'))}")
    facts += [
        f"{key}: {escape_markdown(', '.join(origin[key]))}" for key in ("skipped", "initialised") if origin.get(key)
    ]
    return [f"- {'; '.join(facts)}"]


def _fine_tuning_lines(train: TrainSection) -> list[str]:
    """Return a line for each option that treats parts of the model differently."""
    lines = []
    if train.freeze:
        norm = ", with batch norm as in evaluation" if train.freeze_batch_norm else ""
        lines.append(f"- Not trained: {escape_markdown(', '.join(train.freeze))}{norm}")
    if train.layer_decay is not None:
        lines.append(f"- Layer-wise decay of the learning rate {train.layer_decay:g}")
    if train.learning_rate_scale:
        scales = ", ".join(f"{name} {factor:g}" for name, factor in train.learning_rate_scale.items())
        lines.append(f"- Learning rate scaled: {escape_markdown(scales)}")
    return lines


def _usage_section(data: ReportData) -> str:
    identity = data.evaluation.identity.model_sha256 if data.evaluation else None
    proof = f"\n\nsha256 of model.safetensors: `{identity}`" if identity else ""
    return (
        "## Use\n\n`model.safetensors` holds the weights by name (convolutions as OIHW, float32), `model.json` the "
        "architecture, the class names in index order and the preprocessing. Nothing is pickled.\n\n"
        "```python\nimport json\nfrom safetensors.numpy import load_file\n\n"
        'weights = load_file("model.safetensors")       # name -> array\n'
        'description = json.load(open("model.json"))   # architecture, classes, preprocessing\n```\n\n'
        f"{_normalisation(data)}{proof}"
    )


def _normalisation(data: ReportData) -> str:
    """Return the sentence on how pixels become inputs of the network."""
    if data.config is None:
        return "Pixels are scaled to [0, 1], then normalised per RGB channel (config.yaml is missing)."
    section = data.config.input
    if section.per_image_standardization:
        return (
            "Each image is standardised by itself: (pixels - mean) / max(deviation, 1 / sqrt(number of values)), over "
            f"pixels from 0 to 255 of all channels. Images are resized with a {section.eval_interpolation} filter."
        )
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (section.mean, section.std))
    return (
        f"Pixels are scaled to [0, 1], then normalised with mean ({mean}) and standard deviation ({std}) per RGB "
        f"channel. Images are resized with a {section.eval_interpolation} filter."
    )
