"""Files, repositories and libraries of weights: what they hold, without a network, and pickles that are no weights."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from podscale.config import RunConfig
from podscale.data.manifest import classes_sha256
from podscale.pytorch.weight_sources import as_arrays, read_source, read_weight_file, tensors_in
from podscale.training.model_weights import MODEL_FORMAT
from tests.support.refusals import refused

FIELD = "train.start_from.weights"
STATE = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.tensor([1.0, 2.0])}


def start(weights: object) -> RunConfig:
    return RunConfig.model_validate({"train": {"start_from": {"weights": str(weights)}}})


class RunsCode:
    """Object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "content", [STATE, {"state_dict": STATE}, {"epoch": 3, "model": STATE}, {"model": {"state_dict": STATE}}]
)
@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_torch_files_are_read(content: Any, suffix: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / f"w{suffix}")
    tensors = read_weight_file(tmp_path / f"w{suffix}")
    assert {name: t.tolist() for name, t in tensors.items()} == {name: t.tolist() for name, t in STATE.items()}


def test_safetensors_of_any_precision_are_read_with_their_hash(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(
        {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.float16), "n": torch.ones(1).int()},
        path,
    )
    source = read_source(start(path))
    assert {name: (str(a.dtype), a.tolist()) for name, a in source.arrays.items()} == {
        name: ("float32", [1.0, 1.0]) for name in ("a", "b")
    }
    assert source.origin["source"] == str(path)
    assert len(source.origin["sha256"]) == 64


def test_a_pickle_that_is_no_weights_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "w.pth"
    torch.save({"model": RunsCode(marker)}, path)
    with refused(field=FIELD, got=str(path)):
        read_weight_file(path)
    path.write_bytes(pickle.dumps(RunsCode(marker)))
    with refused(field=FIELD, got=str(path)):
        read_weight_file(path)
    assert not marker.exists()


def test_files_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    for name, content in (("a.safetensors", b"nothing"), ("b.pth", b"nothing"), ("c.pt", b"")):
        (tmp_path / name).write_bytes(content)
        with refused(field=FIELD, got=str(tmp_path / name)):
            read_weight_file(tmp_path / name)
    with refused(field=FIELD, got=str(tmp_path / "none.pth")):
        read_source(start(tmp_path / "none.pth"))
    for content in ({"epoch": 3}, [1.0], {"model": {"epoch": 1}}):
        with refused(field=FIELD):
            tensors_in(content, "w")


def test_a_model_directory_has_a_list_of_classes(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    description = {
        "format": MODEL_FORMAT,
        "run": "r",
        "architecture": {"name": "resnet18"},
        "classes": ["ant", "bee"],
        "training": {},
    }
    (tmp_path / "model.json").write_text(json.dumps(description))
    assert read_source(start(tmp_path)).classes_sha256 == classes_sha256(["ant", "bee"])


@pytest.mark.parametrize(
    ("metadata", "classes"), [({"podscale:model.json/classes": '["ant", "bee"]'}, ["ant", "bee"]), ({}, None)]
)
def test_an_exported_file_lists_its_classes(
    metadata: dict[str, str], classes: list[str] | None, tmp_path: Path
) -> None:
    save_file(STATE, tmp_path / "w.safetensors", metadata)
    expected = None if classes is None else classes_sha256(classes)
    assert read_source(start(tmp_path / "w.safetensors")).classes_sha256 == expected


def test_torchvisions_weights_come_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file lies where torchvision keeps its downloads."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    cache = tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.save(STATE, cache / "resnet18-f37072fd.pth")
    source = read_source(start("torchvision:ResNet18_Weights.IMAGENET1K_V1"))
    assert source.arrays.keys() == STATE.keys()
    assert source.origin["source"] == "torchvision:ResNet18_Weights.IMAGENET1K_V1"
    for name in ("torchvision:ResNet18_Weights.NONE", "torchvision:nothing", "torchvision:No_Weights.A"):
        with refused(field=FIELD, got=name):
            read_source(start(name))


def test_a_repository_is_read_at_its_commit_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files lie as huggingface_hub stores them; nothing is fetched."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (pip install 'podscale[hub]')")
    constants = pytest.importorskip("huggingface_hub.constants")
    commit = "0123456789abcdef" * 2 + "01234567"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--someone--net" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    save_file(STATE, snapshot / "model.safetensors")
    source = read_source(start(f"hf://someone/net@{commit}"))
    assert source.arrays.keys() == STATE.keys()
    assert source.origin["revision"] == commit
    with refused(field=FIELD):
        read_source(start(f"hf://someone/net@{commit}/other.safetensors"))
    with refused(field=FIELD):
        read_source(start(f"hf://someone/other@{commit}"))


def test_a_repository_with_a_torch_file_alone_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's answer on a missing file is a subclass of EntryNotFoundError."""
    hub = pytest.importorskip(
        "huggingface_hub", reason="huggingface_hub is not installed (pip install 'podscale[hub]')"
    )
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    missing = type("RemoteEntryNotFoundError", (hub.errors.EntryNotFoundError,), {})

    def download(repository: str, name: str, revision: str) -> str:
        if not (tmp_path / name).exists():
            raise missing(name)
        return str(tmp_path / name)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    name = f"hf://someone/net@{'0' * 40}"
    source = read_source(start(name))
    assert source.arrays.keys() == STATE.keys()
    assert source.origin["file"] == "pytorch_model.bin"
    (tmp_path / "pytorch_model.bin").unlink()
    with refused(field=FIELD, got=name):
        read_source(start(name))


def test_unknown_tags_of_timm_are_refused() -> None:
    pytest.importorskip("timm", reason="timm is not installed (pip install 'podscale[timm]')")
    with refused(field=FIELD, got="timm:resnet18.nothing"):
        read_source(start("timm:resnet18.nothing"))


def test_counters_and_indices_are_no_weights() -> None:
    assert as_arrays({"n": torch.tensor(3), "w": torch.ones(1)}).keys() == {"w"}
