"""Reading of weights that Podscale did not train: files, Hugging Face repositories, torchvision, timm."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from podscale.config import RunConfig
from podscale.config.start import HUB_PATTERN
from podscale.data.manifest import classes_sha256
from podscale.errors import InputError
from podscale.pytorch.models.external import import_library
from podscale.runs.ensemble_members import MODEL_JSON
from podscale.runs.model_files import DESCRIPTION_PREFIX, WEIGHTS_FILE, read_model
from podscale.training.initial_weights import SourceWeights
from podscale.util.files import file_sha256
from podscale.util.formatting import first_line

FIELD = "train.start_from.weights"
NESTED_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict", "model_state", "params")
"""Keys under which training programs save the weights of a model, best first."""

HUB_FILES = ("model.safetensors", "pytorch_model.bin")
"""Usual names of the weights in a repository of Hugging Face, best first."""


def read_source(config: RunConfig) -> SourceWeights:
    """Read the weights that `train.start_from.weights` names.

    Raises InputError if they cannot be reached or are no weights.
    """
    name = config.train.start_from.weights
    assert name is not None
    if match := HUB_PATTERN.fullmatch(name):
        return _from_hub(name, match[1], match[2], match[3])
    if name.startswith("torchvision:"):
        return _from_torchvision(name)
    if name.startswith("timm:"):
        return _from_timm(name)
    path = Path(name).expanduser()
    if (path / MODEL_JSON).exists():
        return _from_file(path / WEIGHTS_FILE, name, classes_sha256(read_model(path).description["classes"]))
    return _from_file(path, name, _exported_classes(path))


def read_weight_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of a torch file, from which nothing but tensors is unpickled."""
    if not path.is_file():
        raise InputError("there is no such file", field=FIELD, got=str(path))
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except Exception as error:
            raise InputError(f"no safetensors file: {first_line(error)}", field=FIELD, got=str(path)) from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            "holds more than weights, and unpickling it could run any code",
            field=FIELD,
            got=str(path),
            hint="Save the model's state_dict() alone, best as safetensors.",
        ) from error
    except Exception as error:
        raise InputError(f"no file of torch weights: {first_line(error)}", field=FIELD, got=str(path)) from error
    return tensors_in(content, str(path))


def tensors_in(content: Any, name: str) -> dict[str, Tensor]:
    """Return the weights in the content of a torch file: a state_dict, or one under a usual key."""
    while isinstance(content, Mapping):
        nested = next((key for key in NESTED_KEYS if isinstance(content.get(key), Mapping)), None)
        if nested is None:
            break
        content = content[nested]
    tensors = {str(key): value for key, value in content.items()} if isinstance(content, Mapping) else {}
    tensors = {key: value for key, value in tensors.items() if isinstance(value, Tensor)}
    if not tensors:
        raise InputError("holds no weights by name", field=FIELD, got=name, hint="Save the model's state_dict().")
    return tensors


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Return tensors as fp32 arrays; those that are no numbers with a fraction are left out (counters, indices)."""
    return {name: t.detach().float().contiguous().numpy() for name, t in tensors.items() if t.is_floating_point()}


def _from_file(path: Path, name: str, classes: str | None = None, **origin: Any) -> SourceWeights:
    tensors = read_weight_file(path)
    return SourceWeights(as_arrays(tensors), {"source": name, "sha256": file_sha256(path), **origin}, classes)


def _exported_classes(path: Path) -> str | None:
    """Return the hash of the classes that `podscale export` recorded in a safetensors file; None for other files."""
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            return classes_sha256(json.loads((file.metadata() or {})[f"{DESCRIPTION_PREFIX}classes"]))
    except Exception:  # no metadata of ours; a damaged file is reported when its tensors are read
        return None


def _from_hub(name: str, repository: str, commit: str, file: str | None) -> SourceWeights:
    hub: Any = import_library("huggingface_hub", "hub", field=FIELD)
    files = [file] if file else list(HUB_FILES)
    for candidate in files:
        try:
            path = Path(hub.hf_hub_download(repository, candidate, revision=commit))
        except Exception as error:
            if isinstance(error, hub.errors.EntryNotFoundError) and candidate != files[-1]:
                continue
            problem = f"cannot be fetched: {type(error).__name__}: {first_line(error)}"
            hint = "Name a file of the repository, or download it and give its path."
            raise InputError(problem, field=FIELD, got=name, hint=hint) from error
        return _from_file(path, name, revision=commit, file=candidate)
    raise AssertionError(files)


def _from_torchvision(name: str) -> SourceWeights:
    models: Any = import_library("torchvision", "torch", field=FIELD).models
    try:
        weights = models.get_weight(name.partition(":")[2])
    except (ValueError, KeyError, AttributeError) as error:
        hint = "Write torchvision:ENUM.MEMBER, for example torchvision:ResNet50_Weights.IMAGENET1K_V2."
        raise InputError(f"no weights of torchvision: {first_line(error)}", field=FIELD, got=name, hint=hint) from error
    try:
        tensors = weights.get_state_dict(progress=False, check_hash=True)
    except Exception as error:
        raise _unreachable(name, error, f"{weights.url} and give the path of the file") from error
    return SourceWeights(as_arrays(tensors), {"source": name, "url": weights.url})


def _from_timm(name: str) -> SourceWeights:
    timm: Any = import_library("timm", "timm", field=FIELD)
    tag = name.partition(":")[2]
    if tag not in timm.list_pretrained():
        hint = (
            f"List the tags with `python -c 'import timm; print(timm.list_pretrained(\"{tag.partition('.')[0]}*\"))'`"
        )
        raise InputError("timm has no such weights", field=FIELD, got=name, hint=hint)
    try:
        network = timm.create_model(tag, pretrained=True)
    except Exception as error:
        raise _unreachable(name, error, "its file from the model's repository and give the path") from error
    listed = {
        key: str(network.pretrained_cfg.get(key)) for key in ("hf_hub_id", "url") if network.pretrained_cfg.get(key)
    }
    return SourceWeights(as_arrays(network.state_dict()), {"source": name, **listed})


def _unreachable(name: str, error: Exception, advice: str) -> InputError:
    problem = f"cannot be fetched: {type(error).__name__}: {first_line(error)}"
    return InputError(problem, field=FIELD, got=name, hint=f"Download {advice}.")
