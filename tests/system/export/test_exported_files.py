"""Exported files: the same rows as the model's, in every format, and refusals that leave nothing behind."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open

import podscale
from podscale.config import data_fingerprint, dumps
from podscale.errors import InputError, PodscaleError
from podscale.export.export_model import export_model
from podscale.export.export_options import ExportOptions
from podscale.export.export_result import Export
from podscale.prediction import model as prediction_model
from podscale.prediction.predict import predict
from podscale.prediction.predictor import PredictOptions
from podscale.pytorch import inference
from podscale.runs.user_code import copy_code_to_model, user_code
from podscale.util.files import file_sha256
from tests.support import user_models
from tests.support.digits_run import DIGITS, write_digits_set
from tests.support.prediction import CLASSES, odd_images, write_model_run, write_photographs
from tests.support.tiny import SHALLOW

TEMPERATURE = 1.7
RESIDUAL = """
run: {id: residual, seed: 3}
input: {image_size: 32, interpolation: bicubic}
model: {name: resnet18, stem: small, width: 4}
evaluate: {flip: true}
train: {precision: bf16}
"""
VIT = """
run: {id: vit, seed: 3}
input: {image_size: 32}
model: {name: "timm:test_vit", options: {img_size: 32}}
"""
DEPTHWISE = """
run: {id: depthwise, seed: 3}
input: {image_size: 16}
model: {name: "python:tests.support.user_models:depthwise"}
"""
STANDARDISED = DEPTHWISE.replace("size: 16", "size: 16, per_image_standardization: true")
CASES = {
    "onnx": (RESIDUAL, ExportOptions(format="onnx", preprocessing=True)),
    "onnx, logits": (DEPTHWISE, ExportOptions(format="onnx")),
    "torch-export": (DEPTHWISE, ExportOptions(format="torch-export")),
    "torch-export, pixels": (STANDARDISED, ExportOptions(format="torch-export", preprocessing=True)),
    "torchscript": (RESIDUAL, ExportOptions(format="torchscript")),
    "torchscript, pixels": (VIT, ExportOptions(format="torchscript", preprocessing=True)),
}

MakeRun = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def _models() -> Any:
    """Few blocks, for the time that their export takes, and the temperature that the evaluation of every run fitted."""
    with SHALLOW, pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction_model, "_fitted_temperature", lambda files: TEMPERATURE)
        yield


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """make(document) -> directory of its run, made once; each test exports to a place of its own."""
    made: dict[str, Path] = {}

    def make(document: str) -> Path:
        if document not in made:
            config = write_model_run(tmp_path_factory.mktemp("run"), document)
            made[document] = Path(config.run.workspace) / "runs" / config.run.id
        return made[document]

    return make


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_photographs(folder, 9)
    for name in ("cmyk.jpg", "text.png"):
        (folder / name).write_bytes(odd_images()[name][0])
    return folder


@pytest.fixture(scope="module")
def pixels_file(make_run: MakeRun, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """ONNX file with preprocessing of the residual network."""
    out = tmp_path_factory.mktemp("onnx") / "model.onnx"
    return export_model(make_run(RESIDUAL), options_of("onnx", out, photos))


def options_of(case: str, out: Path, photos: Path) -> ExportOptions:
    values = {**vars(CASES[case][1]), "out": out, "images": [str(photos)]}
    return ExportOptions(**values)


def assert_same_rows(file: Path, run: Path, photos: Path, options: PredictOptions, tolerance: float) -> None:
    rows, expected = list(predict(file, [str(photos)], options)), list(predict(run, [str(photos)], options))
    assert [(row.image, row.classes, row.temperature, row.failure) for row in rows] == [
        (row.image, row.classes, row.temperature, row.failure) for row in expected
    ]
    assert [row.temperature for row in rows] == [
        TEMPERATURE if options.calibrate and row.classes else 1.0 for row in rows
    ]
    assert sum(row.failure is None for row in rows) == 10
    for row, other in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row.probabilities, other.probabilities, atol=tolerance)


@pytest.mark.parametrize("case", [name for name in CASES if name != "onnx"])
def test_rows_of_a_file_are_those_of_the_model(case: str, make_run: MakeRun, photos: Path, tmp_path: Path) -> None:
    run = make_run(CASES[case][0])
    suffix = {"onnx": ".onnx", "torch-export": ".pt2", "torchscript": ".torchscript"}[CASES[case][1].format]
    exported = export_model(run, options_of(case, tmp_path / f"model{suffix}", photos))
    tolerance = 3e-2 if CASES[case][0] == RESIDUAL else 1e-4  # the run predicts in bf16, files in fp32
    for options in (PredictOptions(top=2), PredictOptions(top=2, calibrate=False)):
        assert_same_rows(exported.path, run, photos, options, tolerance)
    assert exported.agreement.images == exported.agreement.top1_equal == 10
    assert exported.agreement.largest_difference < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"model{suffix}", f"model{suffix}.json"]
    assert exported.path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", ["model.torchscript", "model.safetensors"])
def test_a_model_of_the_users_code_is_exported(name: str, photos: Path, tmp_path: Path) -> None:
    """The model directory is elsewhere, and has the only copy of the code."""
    (tmp_path / "code").mkdir()
    shutil.copy(user_models.__file__, tmp_path / "code" / "models_of_a_test.py")
    config = podscale.load(
        {"input": {"image_size": 16}, "model": {"name": "python:models_of_a_test:depthwise"}},
        run={"workspace": tmp_path / "work"},
        launch={"code": tmp_path / "code"},
    )
    with user_code(config):
        write_model_run(tmp_path, dumps(config))
    shutil.copytree(tmp_path / "runs" / config.run.id / "model", tmp_path / "model")
    copy_code_to_model(config, tmp_path / "model")
    form = name.partition(".")[2]
    options = ExportOptions(format=form, out=tmp_path / name, images=[str(photos)])
    assert export_model(tmp_path / "model", options).written == tmp_path / name
    assert "models_of_a_test" not in sys.modules


def test_an_onnx_file_describes_itself(pixels_file: Export, make_run: MakeRun, photos: Path) -> None:
    run, file = make_run(RESIDUAL), onnx.load(str(pixels_file.path))
    values = {entry.key: entry.value for entry in file.metadata_props}
    weights = run / "model" / "model.safetensors"
    assert json.loads(values["podscale:model.json/classes"]) == CLASSES
    assert json.loads(values["podscale:model.json/preprocessing"])["interpolation"] == "bicubic"
    assert (values["podscale:run"], values["podscale:model"]) == ("residual", "resnet18")
    assert (values["podscale:weights_sha256"], values["podscale:temperature"]) == (file_sha256(weights), "1.7")
    (images,), (outputs,) = file.graph.input, file.graph.output
    sides = [dimension.dim_param or dimension.dim_value for dimension in images.type.tensor_type.shape.dim]
    assert (sides[1:], images.type.tensor_type.elem_type) == ([32, 32, 3], onnx.TensorProto.UINT8)
    assert isinstance(sides[0], str), "the batch is dynamic"
    assert (images.name, outputs.name) == ("images", "probabilities")
    report = json.loads(pixels_file.report.read_text())
    assert (report["opset"], report["check"]["images"], report["check"]["top1_equal"]) == (20, 10, 10)
    assert (report["sha256"], report["weights_sha256"]) == (file_sha256(pixels_file.path), file_sha256(weights))
    assert report["packages"].keys() == {"podscale", "torch", "onnx", "onnxscript", "onnxruntime"}
    assert "10 of 10" in pixels_file.to_text()
    assert_same_rows(pixels_file.path, run, photos, PredictOptions(top=2), 3e-2)
    assert_same_rows(pixels_file.path, run, photos, PredictOptions(top=2, calibrate=False, batch=1), 3e-2)


def test_the_report_names_a_runtime_of_any_distribution(pixels_file: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime is also the module of onnxruntime-gpu."""

    def fail(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", fail)
    assert pixels_file.to_json()["packages"]["onnxruntime"] == onnxruntime.__version__


def test_predictions_of_an_onnx_file_need_no_torch(pixels_file: Export, photos: Path) -> None:
    program = (
        "import sys; from podscale.prediction.predict import predict\n"
        f"print(len(list(predict({str(pixels_file.path)!r}, [{str(photos)!r}]))), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["11", "False"]


def test_safetensors_have_the_metadata(make_run: MakeRun, photos: Path, tmp_path: Path) -> None:
    run = make_run(DEPTHWISE)
    options = ExportOptions(format="safetensors", out=tmp_path / "a.safetensors", images=[str(photos)])
    exported = export_model(run / "model", options)
    assert exported.agreement.largest_difference == 0
    with safe_open(exported.path, "np") as file, safe_open(run / "model" / "model.safetensors", "np") as weights:
        assert set(file.keys()) == set(weights.keys())
        assert json.loads(file.metadata()["podscale:model.json/classes"]) == CLASSES


def test_a_repository_has_a_folder_of_the_run_and_a_version(
    make_run: MakeRun, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, repository = make_run(DEPTHWISE), tmp_path / "new" / "models"

    def fail(*arguments: Any) -> None:
        raise InputError("PyTorch cannot export this model")

    options = ExportOptions(repository=repository, images=[str(photos)])
    with monkeypatch.context() as patch:
        patch.setattr(inference, "export_onnx", fail)
        with pytest.raises(InputError):
            export_model(run, options)
    assert list(tmp_path.iterdir()) == [], "a refused export leaves no folders"
    exported = export_model(run, options)
    assert exported.path == repository / "depthwise" / "1" / "model.onnx"
    assert sorted(path.name for path in repository.rglob("*")) == ["1", "depthwise", "model.onnx", "model.onnx.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_the_run_of_a_repository_is_one_folder(make_run: MakeRun, tmp_path: Path) -> None:
    shutil.copytree(make_run(DEPTHWISE) / "model", tmp_path / "model")
    description = json.loads((tmp_path / "model" / "model.json").read_text())
    (tmp_path / "model" / "model.json").write_text(json.dumps({**description, "run": "../../elsewhere"}))
    with pytest.raises(InputError) as refusal:
        export_model(tmp_path / "model", ExportOptions(repository=tmp_path / "models"))
    assert refusal.value.got == "../../elsewhere"


def test_the_directory_of_the_run_is_found_from_inside(
    make_run: MakeRun, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "depthwise"
    shutil.copytree(make_run(DEPTHWISE), run)
    monkeypatch.chdir(run / "model")
    exported = export_model(".", ExportOptions(format="safetensors", images=[str(photos)]))
    assert exported.path == run / "export" / "model.safetensors"


def test_missing_and_damaged_weights_are_refused(make_run: MakeRun, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(make_run(DEPTHWISE), tmp_path / "run")
    weights = tmp_path / "run" / "model" / "model.safetensors"
    for content in (None, b"x"):
        weights.unlink()
        if content is not None:
            weights.write_bytes(content)
        for case in ("safetensors", "torchscript"):
            with pytest.raises(InputError) as refusal:
                export_model(tmp_path / "run", ExportOptions(format=case, images=[str(photos)]))
            assert refusal.value.field == str(weights)
        weights.touch()


def test_int8_is_measured_on_the_runs_own_images(tmp_path: Path) -> None:
    """The run directory was moved: its shard set is found beside it. Calibration is from the training split."""
    config = write_model_run(tmp_path / "old", DEPTHWISE, DIGITS)
    shutil.move(tmp_path / "old", tmp_path / "new")
    run = tmp_path / "new" / "runs" / "depthwise"
    shards = tmp_path / "new" / "datasets" / data_fingerprint(config.data)
    write_digits_set(shards, count=400)
    exported = export_model(run, ExportOptions(int8=True, calibration=20))
    assert exported.path == run / "export" / "model.int8.onnx"
    assert exported.agreement.source == f"{shards}/validation"
    assert exported.calibration == f"20 images of {shards}/train"
    rows = list(predict(exported.path, [f"{shards}/validation"]))
    accuracy = sum(row.label == row.classes[0] for row in rows) / len(rows)
    assert (exported.agreement.images, exported.agreement.top1) == (len(rows), pytest.approx(accuracy))
    assert f"top-1 {accuracy:.2%}" in exported.to_text()
    nodes = onnx.load(str(exported.path)).graph.node
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in nodes}
    initializers = {array.name: array for array in onnx.load(str(exported.path)).graph.initializer}
    scales = [
        initializers[node.input[1]].dims
        for node in nodes
        if node.op_type == "DequantizeLinear" and node.input[1] in initializers
    ]
    assert [8] in [list(dims) for dims in scales], "a scale for each of the 8 channels"


def test_a_file_that_differs_leaves_nothing(
    make_run: MakeRun, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = inference.build_inference_module

    def build_another(*arguments: Any, **options: Any) -> Any:
        module = build(*arguments, **options)
        with torch.no_grad():
            list(module.parameters())[-2].mul_(1.05)
        return module

    monkeypatch.setattr(inference, "build_inference_module", build_another)
    out = tmp_path / "a.torchscript"
    out.write_bytes(b"an earlier file")
    with pytest.raises(PodscaleError) as refusal:
        export_model(make_run(DEPTHWISE), options_of("torchscript", out, photos))
    assert refusal.value.field == str(out)
    assert not isinstance(refusal.value, InputError)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"an earlier file"]


def test_a_constant_batch_is_refused(tmp_path: Path, photos: Path) -> None:
    config = write_model_run(tmp_path, DEPTHWISE.replace("models:depthwise", "models:FixedBatch"))
    run = Path(config.run.workspace) / "runs" / config.run.id
    for case, suffix in (("torch-export", "pt2"), ("torchscript", "torchscript")):
        with pytest.raises(PodscaleError):
            export_model(run, options_of(case, tmp_path / f"a.{suffix}", photos))
        assert list(tmp_path.glob("*a.*")) == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (ExportOptions(format="tflite"), "--format"),
        (ExportOptions(format="torchscript", int8=True), "--int8"),
        (ExportOptions(format="safetensors", preprocessing=True), "--preprocessing"),
        (ExportOptions(format="onnx", out=Path("model.pt")), "--out"),
        (ExportOptions(format="onnx", out=Path("no/such/folder/model.onnx")), "--out"),
        (ExportOptions(format="torchscript", images=["no/such/folder"]), "no/such/folder"),
        (ExportOptions(limit=0), "--limit"),
        (ExportOptions(format="torchscript", repository=Path("models")), "--repository"),
        (ExportOptions(out=Path("model.onnx"), repository=Path("models")), "--repository"),
    ],
)
def test_unusable_options_are_refused(options: ExportOptions, field: str, make_run: MakeRun) -> None:
    with pytest.raises(InputError) as refusal:
        export_model(make_run(DEPTHWISE), options)
    assert refusal.value.field == field


def test_an_exported_file_is_not_exported_again(pixels_file: Export) -> None:
    with pytest.raises(InputError) as refusal:
        export_model(pixels_file.path)
    assert refusal.value.field == "MODEL"


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_names_the_extra(package: str, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError) as refusal:
        export_model(make_run(DEPTHWISE))
    assert "podscale[export]" in refusal.value.hint


def test_predictions_name_the_missing_runtime(
    pixels_file: Export, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError) as refusal:
        predict(pixels_file.path, [str(photos)])
    assert "podscale[export]" in refusal.value.hint


@pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".torchscript"])
def test_files_that_are_no_export_are_refused(suffix: str, pixels_file: Export, photos: Path, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    for content in (None, b"", pixels_file.path.read_bytes()[:2000]):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError) as refusal:
            predict(path, [str(photos)])
        assert refusal.value.field == str(path)


def test_a_foreign_or_newer_file_is_refused(pixels_file: Export, photos: Path, tmp_path: Path) -> None:
    file = onnx.load(str(pixels_file.path))
    values = {entry.key: entry.value for entry in file.metadata_props}
    preprocessing, architecture = (f"podscale:model.json/{name}" for name in ("preprocessing", "architecture"))
    for changed in (
        {},
        {**values, "podscale:format": "podscale-export-9"},
        {"podscale:format": "podscale-export-1"},
        {**values, preprocessing: "[]"},
        {**values, preprocessing: '{"crop_fraction": "wide"}'},
        {**values, architecture: '{"name": "no such network"}'},
        {**values, "podscale:model.json/classes": "3"},
    ):
        onnx.helper.set_model_props(file, changed)
        onnx.save(file, str(tmp_path / "a.onnx"))
        with pytest.raises(InputError) as refusal:
            predict(tmp_path / "a.onnx", [str(photos)])
        assert refusal.value.field == str(tmp_path / "a.onnx")
