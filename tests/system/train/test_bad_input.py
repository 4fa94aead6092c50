"""Wrong input through the command line: one message at the end of standard error, exit code 2 or a quarantine entry.

Nothing is lost or half written. Commands run in this process if they exit before another one would start, which is part
of the test: bad input is found before torch or kfp is imported.
"""

import io
import json
import os
import re
import shutil
import socket
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from podscale.cli import main
from tests.support.commands import podscale, set_options

DOCUMENT = """
run: {id: r, workspace: work}
data: {source: photos, max_reject_rate: 0.5, validation_fraction: 0.3, stratify: true}
input: {image_size: 16, loader: reference}
model: {name: resnet18, stem: small, width: 4}
train: {epochs: 1, global_batch: 4}
launch: {processes: 1, shard_workers: 1}
"""


def jpeg(seed: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


def picture(form: str, size: tuple[int, int] = (20, 20)) -> bytes:
    out = io.BytesIO()
    Image.new("1", size).save(out, form)
    return out.getvalue()


def photos(folder: Path, classes: tuple[str, ...] = ("ant", "bee"), count: int = 8) -> None:
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.jpg").write_bytes(jpeg(100 * label + number))


@dataclass
class WorkFolder:
    """Empty folder with a run document, in which commands run."""

    path: Path
    capsys: pytest.CaptureFixture[str]

    def run(self, *arguments: str) -> tuple[int, str]:
        """Return exit code and standard error."""
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        return code, self.capsys.readouterr().err

    def refuses(self, *arguments: str, field: object) -> str:
        """Return the one message, the only output besides the metrics address of a stage that had started.

        Args:
            arguments: arguments of the command.
            field: field that the message must name; a location in a document may precede it.
        """
        before = self.files()
        code, err = self.run(*arguments)
        assert code == 2, err
        err = re.sub(r"^metrics at \S+\n", "", err)
        assert err.startswith("podscale: ")
        assert err.count("podscale: ") == 1
        about = re.escape(str(field))
        assert re.search(rf"(?m)^(podscale: |  - )(\S+:\d+: |--set .*: )?{about}: ", err), err
        assert "Traceback" not in err
        assert {name: content for name, content in self.files().items() if name in before} == before, "something lost"
        return err

    def files(self) -> dict[str, bytes]:
        """Return the files by name, except the records of outcomes."""
        return {
            str(path.relative_to(self.path)): path.read_bytes() if path.exists() else b""
            for path in self.path.rglob("*")
            if not path.is_dir() and not path.name.endswith("outcome.json") and path.name != ".lease"
        }

    def made(self) -> list[str]:
        """Return the files under the workspace."""
        return [name for name in self.files() if name.startswith("work/")]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> WorkFolder:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(DOCUMENT)
    return WorkFolder(tmp_path, capsys)


def empty(folder: Path) -> None:
    folder.mkdir()


def class_missing_in_validation(folder: Path) -> None:
    photos(folder / "train")
    photos(folder / "val", ("ant",))


def class_of_one_image(folder: Path) -> None:
    photos(folder)
    photos(folder, ("cow",), 1)


def loop_of_links(folder: Path) -> None:
    photos(folder)
    (folder / "ant" / "up").symlink_to("..")


def mostly_broken(folder: Path) -> None:
    photos(folder)
    for number in range(20):
        (folder / "bee" / f"x{number}.jpg").write_bytes(b"no image")


@pytest.mark.parametrize(
    ("make", "field", "expected"),
    [
        (empty, "data.source", "train/ and val/"),
        (class_missing_in_validation, "data.source", "'bee'"),
        (class_of_one_image, "data.source", "'cow'"),
        (loop_of_links, "data.source", "ant/up"),
        (mostly_broken, "data.max_reject_rate", "20 of 36 images"),
    ],
)
def test_a_source_that_cannot_be_used(
    work: WorkFolder, make: Callable[[Path], None], field: str, expected: str
) -> None:
    make(work.path / "photos")
    assert expected in work.refuses("shard", "run.yaml", field=field)
    assert not [name for name in work.made() if name.endswith("manifest.json")]


def test_the_error_of_the_packer_is_the_last_line_of_a_run(work: WorkFolder) -> None:
    class_missing_in_validation(work.path / "photos")
    ended = podscale(work.path, "run", "run.yaml")
    assert ended.code == 2
    assert ended.last.startswith("podscale in stage shard: data.source: ")
    assert "'bee'" in ended.last
    for noise in ("Traceback", "Executing task", "KFP", "kfp"):
        assert noise not in ended.err + ended.out


def test_unusable_images_are_quarantined_and_the_rest_is_kept(work: WorkFolder) -> None:
    photos(work.path / "photos")
    ants = work.path / "photos" / "ant"
    broken = {
        "cut.jpg": (jpeg(1)[:-200], "corrupt"),
        "zero.jpg": (b"", "empty"),
        "really_a_gif.jpg": (picture("GIF"), "unusable_format"),
        "bomb.png": (picture("PNG", (20_000, 20_000)), "too_many_pixels"),
    }
    for name, (content, _) in broken.items():
        (ants / name).write_bytes(content)
    reasons = {name: reason for name, (_, reason) in broken.items()}
    (ants / "gone.jpg").symlink_to("nowhere.jpg")
    (ants / "itself.jpg").symlink_to("itself.jpg")
    reasons |= {"gone.jpg": "unreadable", "itself.jpg": "unreadable"}
    odd = ["two\nlines.jpg", os.fsdecode(b"\xff\xfe.jpg")]
    for number, name in enumerate(odd):
        (ants / name).write_bytes(jpeg(50 + number))
    code, err = work.run("shard", "run.yaml")
    assert code == 0, err
    (shard_set,) = (path.parent for path in work.path.glob("work/datasets/*/manifest.json"))
    rejects = [json.loads(line) for line in (shard_set / "rejects.jsonl").read_text().splitlines()]
    assert {Path(entry["source"]).name: entry["reason"] for entry in rejects} == reasons
    counts = {
        name: split["count"] for name, split in json.loads((shard_set / "manifest.json").read_text())["splits"].items()
    }
    assert sum(counts.values()) == 18
    sources = b"".join((shard_set / split / "sources").read_bytes() for split in counts)
    assert all(os.fsencode(name) in sources for name in odd)


def test_an_image_that_may_not_be_read(work: WorkFolder) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    photos(work.path / "photos")
    (work.path / "photos" / "ant" / "0.jpg").chmod(0)
    assert work.run("shard", "run.yaml")[0] == 0
    (rejects,) = work.path.glob("work/datasets/*/rejects.jsonl")
    assert json.loads(rejects.read_text())["reason"] == "unreadable"


def test_a_tar_with_the_same_key_twice(work: WorkFolder) -> None:
    with tarfile.open(work.path / "twice.tar", "w") as tar:
        for name in ("x.jpg", "x.cls", "y.jpg", "y.cls", "x.jpg", "x.cls"):
            member = tarfile.TarInfo(name)
            content = jpeg(1) if name.endswith(".jpg") else b"1"
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    message = work.refuses("shard", "run.yaml", "--set", "data.source=twice.tar", field="data.source")
    assert "key x " in message
    assert "(got 'twice.tar')" in message


@pytest.mark.parametrize(
    ("document", "field", "expected"),
    [
        ("train: {epcohs: 3}", "train.epcohs", "train.epochs"),
        ("run: {id: a}\nrun: {id: b}", "run", "wrong.yaml:2: run: given twice, first on line 1"),
        ("train: {schedule: {learning_rate: .nan}}", "train.schedule.learning_rate", "(got nan)"),
        ("train: {schedule: {learning_rate: .inf}}", "train.schedule.learning_rate", "(got inf)"),
    ],
)
@pytest.mark.parametrize("command", ["run", "shard", "train"])
def test_a_document_that_cannot_be_used(
    work: WorkFolder, document: str, field: str, expected: str, command: str
) -> None:
    (work.path / "wrong.yaml").write_text(document)
    assert expected in work.refuses(command, "wrong.yaml", field=field)
    assert sorted(path.name for path in work.path.iterdir()) == ["run.yaml", "wrong.yaml"], "nothing was made"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with photos, the document and its shard set; copy it before you change it."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "run.yaml").write_text(DOCUMENT)
    photos(folder / "photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["shard", "run.yaml"]) == 0
    return folder


@pytest.fixture
def sharded(packed: Path, work: WorkFolder) -> WorkFolder:
    shutil.copytree(packed, work.path, dirs_exist_ok=True)
    return work


@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        (["train.global_batch=64"], "train.global_batch", "split of 12 images (got 64)"),
        (["launch.processes=6", "train.global_batch=12"], "launch.processes", "12 training and 4 validation images"),
        (["train.global_batch=5", "launch.processes=2"], "train.global_batch", "= 2 x 1 (got 5)"),
        (["input.image_size=16", "model.stem=imagenet"], "model.stem", "16 px"),
        (["train.epochs=1", "train.schedule.warmup_epochs=2"], "train.schedule.warmup_epochs", "1 epochs (got 2.0)"),
        (
            ["launch.processes=4", "train.all_reduce.algorithm=torus2d", "train.all_reduce.row=3"],
            "train.all_reduce.row",
            "4 ranks of the run (got 3)",
        ),
        (["launch.processes=2", "model.batch_norm.group=3"], "model.batch_norm.group", "2 ranks of the run (got 3)"),
        (["launch.processes=2", "model.batch_norm.span=3"], "model.batch_norm.span", "multiple of the 2 images"),
        (["model.batch_norm.span=3"], "model.batch_norm.span", "divide the 4 images of one rank and pass"),
        (["train.all_reduce.bucket_mb=1e-6"], "train.all_reduce.bucket_mb", "(4 bytes) (got 1e-06)"),
        (["train.all_reduce.wire_row=bf16"], "train.all_reduce.wire_row", "flat"),
        (
            ["train.all_reduce.algorithm=ddp", "train.all_reduce.wire_column=bf16"],
            "train.all_reduce.wire_column",
            "ddp",
        ),
        (["train.all_reduce.backend=nccl"], "train.all_reduce.backend", "(got 'nccl')"),
        (["train.recipe=mlperf-lasr"], "train.recipe", "(got 'mlperf-lasr'). Known: mlperf-lars"),
        (["train.recipe=mlperf-lars"], "train.global_batch", "from 816 to 65,536 (got 4)"),
        (["train.precision=fp16", "train.loss_scale=1"], "train.loss_scale", "fp16"),
        (["train.weight_gather=bf16"], "train.weight_gather", "train.weight_update=sharded"),
        (["train.weight_update=sharded", "train.all_reduce.algorithm=ddp"], "train.all_reduce.algorithm", "ddp"),
        (["train.optimizer.name=lamb", "train.optimizer.nesterov=true"], "train.optimizer.nesterov", "is lamb"),
        (["train.cuda_graph=true"], "train.cuda_graph", "GPU"),
        (["model.name=alexnet"], "model.stem", "alexnet"),
        (["train.phases=[{start: 3}]"], "train.phases.0.start", "after 1.0 epochs (got 3.0)"),
        (["train.engine=jax", "train.precision=fp16"], "train.precision", "Set train.precision=bf16"),
        (["train.engine=jax", "launch.processes=2", "train.global_batch=5"], "train.global_batch", "= 2 x 1 (got 5)"),
        (["train.engine=jax", "train.all_reduce.row=3"], "train.all_reduce.row", "1 ranks of the run (got 3)"),
        (["train.engine=jax", "launch.hardware=tpu-v5e-4x4"], "launch.hardware", "tpu-v5e-4x4"),
        (["train.spatial_partitions=[2, 1]"], "train.spatial_partitions", "Set train.engine=jax"),
        (["launch.processes=9000", "train.global_batch=9000"], "launch.processes", "of memory"),
    ],
)
@pytest.mark.parametrize("command", ["run", "train"])
def test_a_training_that_cannot_be_is_refused_before_torch(
    sharded: WorkFolder, options: list[str], field: str, expected: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "podscale.launch.worker_spec.WorkerSpec.start", lambda *arguments: pytest.fail("a process was started")
    )
    assert expected in sharded.refuses(command, "run.yaml", *set_options(*options), field=field)
    assert not list(sharded.path.glob("work/runs/*/metrics.jsonl"))


def test_a_port_in_use(sharded: WorkFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        for command in ("run", "train"):
            changes = ("--set", f"telemetry.port={port}", "--set", "telemetry.required=true")
            assert f"(got {port})" in sharded.refuses(command, "run.yaml", *changes, field="telemetry.port")


def test_the_run_directory_of_another_document(sharded: WorkFolder) -> None:
    other = sharded.path / "work" / "runs" / "r"
    other.mkdir(parents=True)
    (other / "config.yaml").write_text(DOCUMENT.replace("epochs: 1", "epochs: 2"))
    before = sharded.files()
    for command in ("run", "train", "evaluate", "report"):
        message = sharded.refuses(command, "run.yaml", field="work/runs/r")
        assert re.search(r"train\.epochs\b.*2\.0.*1\.0", message)
    assert sharded.files() == before
