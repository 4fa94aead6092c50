"""Job of a prediction: an indexed Job whose pods each predict a part of the images with a run's model.

A part that is there is not predicted again, so a job that was stopped or failed resumes when it is submitted again. The
pod that finishes the last part joins all of them in one file.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath

from podscale.config import RunConfig
from podscale.config.images import stage_image
from podscale.errors import InputError, combine_errors
from podscale.kubernetes.job_spec import JobSpec, build_job_spec
from podscale.kubernetes.pod_resources import volume_mounts
from podscale.runs import RunDirectory
from podscale.util.locations import Location

MAX_PARTS = 10_000
"""Parts of a job; the API server accepts 100,000 completions of indexed jobs."""
NAME_DIGITS = 12
"""Digits of the prediction's hash in the name of its folder."""


@dataclass(frozen=True, kw_only=True)
class PredictionJob:
    """Images and options of a prediction on a cluster.

    Args:
        images: Paths in the pods, or URLs, of files, folders, tars and shard sets.
        parts: Parts of the list, each predicted by one pod.
        parallel: Pods at the same time; 0 for all.
        top: Classes of each prediction.
        batch: Images of a batch; None for the default of the hardware.
        convert: Convert images of other formats and depths.
        calibrate: Calibrate the probabilities.
    """

    images: Sequence[str]
    parts: int = 1
    parallel: int = 0
    top: int = 5
    batch: int | None = None
    convert: bool = False
    calibrate: bool = True

    @property
    def sha256(self) -> str:
        """Hash of what determines the rows, and of the number of parts."""
        values = {name: value for name, value in asdict(self).items() if name != "parallel"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def rows_file(config: RunConfig, prediction: PredictionJob) -> PurePosixPath:
    """Return the file with all rows; the folder of the parts is beside it, without the suffix."""
    folder = PurePosixPath(RunDirectory.for_config(config).predicted)
    return folder / f"{prediction.sha256[:NAME_DIGITS]}.jsonl"


def build_predict_spec(config: RunConfig, prediction: PredictionJob) -> JobSpec:
    """Return the specification of a prediction's job. Raises InputError, or InputErrors for several."""
    if errors := list(_check(config, prediction)):
        raise combine_errors(errors, "this job cannot run")
    spec = build_model_spec(config)
    values = [spec.identity, prediction.sha256]
    return replace(
        spec,
        stage="predict",
        identity=hashlib.sha256(json.dumps(values).encode()).hexdigest(),
        command=_command(config, prediction),
        parts=prediction.parts,
        parallel=min(prediction.parallel or prediction.parts, prediction.parts),
    )


def build_model_spec(config: RunConfig) -> JobSpec:
    """Return the specification of pods that predict with a run's model. Raises InputError if the hardware cannot.

    They have the image, hardware and resources of the run's evaluation, without its cache of shards.
    """
    spec = build_job_spec(config, "evaluate")
    if spec.hardware.kind == "tpu":
        hint = "Set launch.hardware to GPUs or leave it out, and launch.image to an image with PyTorch."
        raise InputError("predictions need PyTorch", field="launch.hardware", got=spec.hardware.name, hint=hint)
    image = stage_image(config, engine="pytorch")
    return replace(
        spec, engine="pytorch", image=image, resources=replace(spec.resources, cache_gib=0.0), cache_path=None
    )


def _command(config: RunConfig, prediction: PredictionJob) -> tuple[str, ...]:
    rows = rows_file(config, prediction)
    flags = {"--convert": prediction.convert, "--plain-softmax": not prediction.calibrate}
    return (
        *("podscale", "predict", str(RunDirectory.for_config(config).path), *prediction.images),
        *("--part", f"$(JOB_COMPLETION_INDEX)/{prediction.parts}", "--out", str(rows.with_suffix(""))),
        *("--merge", str(rows), "--top", str(prediction.top)),
        *(() if prediction.batch is None else ("--batch", str(prediction.batch))),
        *(flag for flag, chosen in flags.items() if chosen),
    )


def _check(config: RunConfig, prediction: PredictionJob) -> Iterator[InputError]:
    if not prediction.images:
        hint = "Name a file, folder, tar or shard set in the pods, or a URL."
        yield InputError("nothing to predict", field="--images", hint=hint)
    if not 1 <= prediction.parts <= MAX_PARTS:
        yield InputError(f"must be from 1 to {MAX_PARTS}", field="--parts", got=prediction.parts)
    for name, got, least in (
        ("--parallel", prediction.parallel, 0),
        ("--top", prediction.top, 1),
        ("--batch", prediction.batch, 1),
    ):
        if got is not None and got < least:
            yield InputError("too small", field=name, got=got)
    mounts = [PurePosixPath(path) for path in volume_mounts(config)]
    for image in prediction.images:
        path = Location.parse(image).local_path
        if image.startswith("-") or "$(" in image:
            yield InputError("cannot be named in a job", field="--images", got=image, hint="Rename it.")
        elif path is not None and not any(path.is_relative_to(mount) for mount in mounts):
            hint = "Name an absolute path on a volume of the pods (launch.cluster.volumes), or a URL."
            yield InputError("no volume is mounted there", field="--images", got=image, hint=hint)
