"""Models from torchvision, timm, plug-ins or the user's own code (`model.name` with a prefix), with our batch norm.

Ours replaces theirs, because it follows the document's span and averages its statistics.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from podscale.config import ModelSection
from podscale.config.model import BatchNormSection, model_source
from podscale.errors import InputError
from podscale.pytorch.batch_norm import BatchNorm
from podscale.util.formatting import first_line, suggest_similar
from podscale.util.plugins import NamedCallable, find_plugin

RESERVED_OPTIONS = {
    "num_classes": "the shard set has the classes",
    **dict.fromkeys(
        ("weights", "weights_backbone", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path"),
        "initial weights are named by train.start_from",
    ),
    "features_only": "the model would be no classifier",
    **dict.fromkeys(("cache_dir", "progress"), "nothing is downloaded"),
}
"""Arguments that model.options may not have, and the reason."""
LISTS = {"torchvision": "torchvision.models.list_models(module=torchvision.models)", "timm": "timm.list_models()"}
"""Expressions that list the models of a library."""


@dataclass(frozen=True)
class ModelFactory:
    """Function that builds a model from elsewhere.

    Args:
        name: value of model.name.
        build: called with `num_classes` and the options.
        described_by: function with the signature of the options.
        passes_on: `described_by` passes other keywords to the class of the model.
        fixed: arguments that Podscale sets.
    """

    name: str
    build: Callable[..., Any]
    described_by: Callable[..., Any]
    passes_on: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, classes: int, options: Mapping[str, Any]) -> nn.Module:
        """Build the module, initialised from torch's current seed; raises InputError if that fails."""
        try:
            network = self.build(num_classes=classes, **self.fixed, **options)
        except Exception as error:
            field_name, got = ("model.options", dict(options)) if options else ("model.name", self.name)
            problem = f"{self.name} cannot be built: {type(error).__name__}: {first_line(error)}"
            raise InputError(problem, field=field_name, got=got) from error
        if not isinstance(network, nn.Module):
            problem = f"returns {type(network).__name__}, not a torch.nn.Module"
            raise InputError(problem, field="model.name", got=self.name)
        return network

    def on_meta(self, classes: int, options: Mapping[str, Any]) -> nn.Module:
        """Build the module without memory for its weights, on the meta device; torch's seed stays as it is."""
        with torch.random.fork_rng(devices=[]):
            try:
                with torch.device("meta"):
                    return self(classes, options)
            except InputError:  # an initialisation that reads values
                return self(classes, options).to("meta")

    @cached_property
    def option_names(self) -> frozenset[str] | None:
        """Names that model.options may have; None if the factory takes any name."""
        names, takes_any = _keywords(self.described_by)
        if takes_any and self.passes_on:
            class_names, takes_any = _keywords(type(self.on_meta(2, {})).__init__)
            names |= class_names
        return None if takes_any else frozenset(names - {"self"} - RESERVED_OPTIONS.keys())

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise InputError if a name in model.options is reserved or unknown."""
        for name in options:
            if reason := RESERVED_OPTIONS.get(name):
                raise InputError(f"not an option: {reason}", field=f"model.options.{name}", hint="Leave it out.")
        known = self.option_names if options else None
        for name in options:
            if known is not None and name not in known:
                hint = suggest_similar(name, known) or f"It has {', '.join(sorted(known)) or 'no options'}."
                raise InputError(f"{self.name} has no such option", field=f"model.options.{name}", hint=hint)


def build_external(model: ModelSection, classes: int) -> nn.Module:
    """Build a model from elsewhere, in fp32 on the CPU, initialised from torch's current seed; with our batch norm."""
    factory = find_factory(model.name)
    factory.check_options(model.options)
    return convert_batch_norm(factory(classes, model.options), model.batch_norm, model.name)


def find_factory(name: str) -> ModelFactory:
    """Return the factory of a model's name; raises InputError if its library does not have it."""
    source = model_source(name)
    assert source is not None, name
    match source.library:
        case "torchvision":
            return _torchvision_factory(source.name)
        case "timm":
            return _timm_factory(source.name)
        case "plugin":
            built_by = find_plugin("model.name", source.name).load()
            return ModelFactory(name, built_by, built_by)
        case _:
            built_by = NamedCallable("model.name", name).load()
            return ModelFactory(name, built_by, built_by)


def _torchvision_factory(name: str) -> ModelFactory:
    models = import_library("torchvision", "torch").models
    names = models.list_models(module=models)
    if name not in names:
        raise _unknown("torchvision", name, names)
    builder = models.get_model_builder(name)
    return ModelFactory(f"torchvision:{name}", builder, builder, passes_on=True, fixed={"weights": None})


def _timm_factory(name: str) -> ModelFactory:
    timm = import_library("timm", "timm")
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture) or (name != architecture and name not in timm.list_pretrained()):
        raise _unknown("timm", name, [*timm.list_models(), *timm.list_pretrained()])

    def build(**options: Any) -> Any:
        return timm.create_model(name, pretrained=False, **options)

    return ModelFactory(f"timm:{name}", build, timm.model_entrypoint(architecture), passes_on=True)


def import_library(name: str, extra: str, field: str = "model.name") -> Any:
    """Import an optional library; raises InputError with the extra that installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        hint = f"Run `pip install 'podscale[{extra}]'`, or use an image that has it."
        raise InputError(f"{name} is not installed", field=field, hint=hint) from error


def _unknown(library: str, name: str, names: Iterable[str]) -> InputError:
    """Return the error of a name that the library does not have, with a similar one of the library."""
    similar = suggest_similar(name, names, prefix=f"{library}:")
    hint = similar or f"List its names with `python -c 'import {library}; print({LISTS[library]})'`"
    return InputError(f"{library} has no such model", field="model.name", got=f"{library}:{name}", hint=hint)


def _keywords(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names that a function takes as keywords, and whether it takes any other."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind not in variadic}
    return names, any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)


PLAIN_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class FlattenedBatchNorm(BatchNorm):
    """Batch norm of inputs that are no images, [n, channels, ...], as images of one column."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(*x.shape[:2], -1, 1)).view(x.shape)


class ActivatedBatchNorm(BatchNorm):
    """Batch norm, then dropout and activation: timm's BatchNormAct2d."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.drop(super().forward(x)))
        return y


def convert_batch_norm(network: nn.Module, section: BatchNormSection, model_name: str) -> nn.Module:
    """Replace every batch norm in `network`, in place, with its weights and statistics; return the network.

    An epsilon or momentum of the document that differs from the default replaces the model's own.

    Raises InputError for a batch norm that ours cannot replace.
    """
    if isinstance(network, _BatchNorm):
        return _convert(network, section, model_name)
    for name, child in list(network.named_children()):
        if isinstance(child, _BatchNorm):
            setattr(network, name, _convert(child, section, model_name))
        else:
            convert_batch_norm(child, section, model_name)
    return network


def _convert(layer: _BatchNorm, section: BatchNormSection, model_name: str) -> BatchNorm:
    kind = type(layer)
    if not layer.affine or not layer.track_running_stats or layer.momentum is None:
        problem = "has a batch norm without scale, running statistics or momentum, which Podscale cannot group"
        raise InputError(problem, field="model.name", got=model_name, hint="Choose another model.")
    if kind in PLAIN_LAYERS:
        takes_images = kind in (nn.BatchNorm2d, nn.SyncBatchNorm)
        ours = (BatchNorm if takes_images else FlattenedBatchNorm)(layer.num_features)
    elif kind.__name__ == "BatchNormAct2d" and hasattr(layer, "act") and hasattr(layer, "drop"):
        ours = ActivatedBatchNorm(layer.num_features)
        ours.drop, ours.act = layer.get_submodule("drop"), layer.get_submodule("act")
    else:
        raise InputError(
            f"has a batch norm of a kind that Podscale does not know, {kind.__module__}.{kind.__qualname__}",
            field="model.name",
            got=model_name,
            hint="Use torch.nn.BatchNorm2d, or choose another model.",
        )
    default = BatchNormSection()
    ours.eps = layer.eps if section.eps == default.eps else section.eps
    ours.momentum = layer.momentum if section.momentum == default.momentum else section.momentum
    ours.weight, ours.bias = layer.weight, layer.bias
    ours.running_mean, ours.running_var = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
    return ours.train(layer.training)
