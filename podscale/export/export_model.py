"""Export of a trained model to one file, which takes its name after it agrees with the model in PyTorch.

exported = export_model("runs/digits", ExportOptions(format="onnx", preprocessing=True))
print(exported.path, exported.agreement.largest_difference)

`export_run` writes the files that a run document names, and registers them.
"""

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from podscale.config import RunConfig
from podscale.config.export import FILE_NAMES
from podscale.errors import InputError, PodscaleError
from podscale.export.demo_page import build_demo_page
from podscale.export.export_options import ExportOptions, check_options, find_format
from podscale.export.export_result import Agreement, Export, LogProbabilities, compare, log_probabilities
from podscale.export.image_sample import ImageSample, load_sample
from podscale.export.int8 import quantise
from podscale.export.web_runtime import WebRuntime, load_web_runtime
from podscale.prediction.exported_file import ExportedFile, ExportMetadata, normalise
from podscale.prediction.model import Classifier, PredictionModel, build_classifier, open_model
from podscale.report.demo_page_link import update_demo_link
from podscale.runs import RunDirectory
from podscale.runs.ensemble_members import MODEL_JSON
from podscale.runs.model_files import WEIGHTS_FILE, EvaluatedModel, inference_options_of, preprocessing_of, run_of
from podscale.runs.user_code import code_of_model, imported_from
from podscale.util.files import write_json
from podscale.util.formatting import one_line


def export_model(model: str | Path, options: ExportOptions | None = None) -> Export:
    """Export the model of a run or model directory, and write the report of its check beside the file.

    Raises InputError if an option or the model is not usable, and PodscaleError if the file differs from the model;
    then nothing is written.
    """
    options = options or ExportOptions()
    if options.format == "html":
        options = replace(options, preprocessing=True)
    check_options(options, find_format(options.format))
    opened = open_model(model, calibrate=options.calibrate)
    if opened.exported is not None:
        hint = "Name the directory of the run or of the model."
        raise InputError("an exported file already", field="MODEL", got=str(model), hint=hint)
    opened = replace(opened, config=_in_fp32(opened))
    target = _target(opened, options)
    code = code_of_model(opened.files.directory, opened.config)
    with imported_from(code), _work_directory(target) as work:
        export = _Exporter(opened, options, work).export(target)
        with _write_errors(target):
            export.written.chmod(0o644)  # some writers leave it to the owner alone
            target.parent.mkdir(parents=True, exist_ok=True)
            write_json(export.report, export.to_json())
            export.written.replace(target)
            run = RunDirectory(target.parent.parent)
            if options.format == "html" and target.parent == run.exports:
                update_demo_link(run)
    return replace(export, written=target)


def export_run(config: RunConfig, shard_set: str) -> Iterator[str]:
    """Write each file of the export section and register them; yield a report of each. Raises as `export_model`.

    Args:
        shard_set: location of the shards, whose images check and calibrate.
    """
    run, section = RunDirectory.for_config(config), config.export
    run.exports.mkdir(exist_ok=True)
    exports: list[Export] = []
    for name, file in zip(section.formats, section.file_names, strict=True):
        options = ExportOptions(
            format=name.removesuffix("-int8"),
            out=run.exports / file,
            preprocessing=section.preprocessing and name != "safetensors",
            int8=name.endswith("-int8"),
            shard_set=shard_set,
            limit=section.images,
            calibration=section.calibration_images,
        )
        exports.append(export_model(run.path, options))
        yield exports[-1].to_text()
    if section.mlflow_model is not None:
        from podscale.export.mlflow_registry import register_exports

        yield register_exports(config, exports)
    if section.kubeflow.address is not None:
        from podscale.export.kubeflow_registry import register_in_kubeflow

        yield register_in_kubeflow(config, exports)


class _Exporter:
    """One export in a work directory beside the target."""

    def __init__(self, model: PredictionModel, options: ExportOptions, work: Path) -> None:
        self._model, self._options, self._work = model, options, work
        description = {
            **model.files.description,
            "preprocessing": preprocessing_of(model.config),
            "inference": inference_options_of(model.config),
        }
        self._metadata = ExportMetadata(description, model.weights_sha256, options.preprocessing, model.temperature)

    def export(self, target: Path) -> Export:
        """Write the file in the work directory and check it. The result names `target`."""
        options, model = self._options, self._model
        runtime = load_web_runtime() if options.format == "html" else None  # first, because it may be missing
        names = {"safetensors": WEIGHTS_FILE, "html": FILE_NAMES["onnx"]}
        written = self._write(self._work / names.get(options.format, target.name))
        sample = self._load_sample("validation", options.limit)
        reference = log_probabilities(build_classifier(model), sample.images)
        agreement = self._compare(written, sample, reference)
        agreement.check(str(target))
        export = Export(target, written, options.format, self._metadata, agreement)
        if options.int8:
            export = self._quantise(export, sample, reference)
        return self._build_page(export, sample, runtime) if runtime is not None else export

    def _build_page(self, export: Export, sample: ImageSample, runtime: WebRuntime) -> Export:
        """Return the export of a page with the ONNX file inside."""
        page = build_demo_page(export.written.read_bytes(), export.metadata, sample, runtime)
        written = self._work / export.path.name
        written.write_bytes(page)
        return replace(export, written=written)

    def _load_sample(self, split: str, limit: int) -> ImageSample:
        locations, shard_set = self._options.images, self._options.shard_set
        if not locations and shard_set is not None:
            locations = [f"{shard_set.rstrip('/')}/{split}"]
        return load_sample(self._model, locations, split, limit)

    def _quantise(self, export: Export, sample: ImageSample, reference: LogProbabilities) -> Export:
        calibration = self._load_sample("train", self._options.calibration)
        images = calibration.images
        written = export.written.with_name(f"int8-{export.written.name}")
        quantise(
            export.written,
            written,
            images if self._options.preprocessing else normalise(images, self._model.config.input),
        )
        metadata = replace(self._metadata, quantization="int8")
        agreement = self._compare(written, sample, reference)
        return replace(
            export,
            written=written,
            metadata=metadata,
            agreement=agreement,
            fp32=export.agreement,
            calibration=f"{len(calibration)} images of {calibration.source}",
        )

    def _compare(self, written: Path, sample: ImageSample, reference: LogProbabilities) -> Agreement:
        try:
            outputs = log_probabilities(self._load(written), sample.images)
        except PodscaleError:
            raise
        except Exception as error:  # any error of a runtime, such as a batch that is a constant of the graph
            problem = f"the exported file does not compute {len(sample)} images: {one_line(str(error))}"
            hint = "Nothing was written. Export in another format."
            raise PodscaleError(problem, field=f"--format {self._options.format}", hint=hint) from error
        temperature = self._model.temperature or 1.0
        return compare(reference, outputs, sample, temperature, with_logits=not self._options.preprocessing)

    def _write(self, path: Path) -> Path:
        """Write the file in the format of the options."""
        from podscale.pytorch import inference

        strings, preprocessing = self._metadata.to_strings(), self._options.preprocessing
        if self._options.format == "safetensors":
            inference.write_weights(self._model.files.weights, path, strings)
            return path
        module = inference.build_inference_module(
            self._model.files,
            self._model.config,
            preprocessing=preprocessing,
            temperature=self._model.temperature or 1.0,
        )
        example = inference.example_input(self._model.config, preprocessing=preprocessing)
        match self._options.format:
            case "onnx" | "html":
                output = "probabilities" if preprocessing else "logits"
                inference.export_onnx(module, example, path, strings, output)
            case "torch-export":
                inference.export_program(module, example, path, strings)
            case "torchscript":
                inference.export_torchscript(module, example, path, strings)
        return path

    def _load(self, written: Path) -> Classifier:
        """Load the written file as `podscale predict` does."""
        if self._options.format == "safetensors":
            files = EvaluatedModel(written.parent, dict(self._metadata.description))
            return build_classifier(replace(self._model, files=files))
        return build_classifier(replace(self._model, exported=ExportedFile.open(written)))


def _in_fp32(model: PredictionModel) -> RunConfig:
    """Return the document with the precision of exported files, in which the reference is computed too."""
    return model.config.model_copy(update={"train": model.config.train.model_copy(update={"precision": "fp32"})})


def _target(model: PredictionModel, options: ExportOptions) -> Path:
    """Return the path of the file. Raises InputError if it is a directory, or that of --out does not exist."""
    if options.repository is not None:
        if "/" in model.files.name or model.files.name in ("", ".", ".."):
            raise InputError("not the name of a folder", field=f"{MODEL_JSON}: run", got=model.files.name)
        target = options.repository / model.files.name / "1" / FILE_NAMES["onnx"]
    else:
        name = FILE_NAMES[f"{options.format}-int8" if options.int8 else options.format]
        target = options.out or RunDirectory(_place(model)).exports / name
    with _write_errors(target):
        if options.out is not None and not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no such directory")
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory")
    return target


def _place(model: PredictionModel) -> Path:
    """Return the directory of the model's run, or that of a model without one."""
    directory = model.files.directory
    run = run_of(directory)
    if run is None:
        return directory
    return directory.parent if directory.parent.resolve() == run.path else run.path  # of a link, or of `.`


@contextmanager
def _work_directory(target: Path) -> Iterator[Path]:
    """Make a directory in the nearest one to the target that exists; it is removed at the end."""
    with _write_errors(target):
        place = next(parent for parent in target.parents if parent.exists())
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=place))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", field="--out", got=str(target)) from error
