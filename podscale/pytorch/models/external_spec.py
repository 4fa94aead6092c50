"""Catalogue entry of a model from elsewhere, derived from its module on the meta device.

Roles follow from the types of the layers. FLOPs are those that torch's FlopCounterMode counts in the forward pass.
Backward of all parameters is taken as twice the forward pass, because the counter ignores groups there. Elements for
backward are those that autograd saves. A trial step in training mode finds models that Podscale cannot train.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from podscale.config import ModelSection
from podscale.config.model import ModelSource, model_source
from podscale.errors import InputError
from podscale.models.spec import BufferSpec, ModelSpec, Normalisation, ParamSpec, Role
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.models.external import ModelFactory, convert_batch_norm, find_factory
from podscale.pytorch.models.state import running_statistics, untrained_arrays
from podscale.util.formatting import first_line

TRIAL_IMAGES = 2
"""Images of the trial step: batch norm needs more than one value of a channel."""
FLOAT_BYTES = 4
"""Bytes of an fp32 value."""
NORM_CLASSES = (BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase, _InstanceNorm)
EMBEDDING_NAMES = ("embed", "token", "position", "pos_")
"""Parts of the names of embeddings that are parameters of a network itself, such as pos_embed and class_token."""
SIZE_OPTIONS = ("img_size", "image_size", "input_size")
"""Names of the option with the side of the images, in models that have one."""


class Trial(NamedTuple):
    """Result of a trial step, for one image."""

    flops: int
    backward_flops: int
    """As the counter finds them, too many for convolutions in groups."""
    saved_elements: int
    largest_output: int
    """Elements of the largest output of a module."""


@dataclass(frozen=True)
class ExternalSpec(ModelSpec):
    """Entry of a model from elsewhere; `size_option` is the name of the option with the side of the images."""

    network: nn.Module = field(repr=False, compare=False)
    size_option: str
    unfrozen: "ExternalSpec | None" = field(default=None, repr=False)
    """Entry without frozen parameters; None: this one."""
    _trials: dict[int, Trial] = field(default_factory=dict, repr=False, compare=False)

    @property
    def constants(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.network.named_buffers()) - frozenset(running_statistics(self.network))

    def freeze(self, names: Collection[str]) -> Self:
        return replace(super().freeze(names), unfrozen=self.unfrozen or self, _trials={}) if names else self

    def flops(self, image_size: int) -> int:
        return self._trial(image_size).flops

    def training_flops(self, image_size: int) -> int:
        """Return the FLOPs of the forward pass and of backward: twice those of forward if all parameters are trained.

        Frozen parameters lessen backward by the fraction that the counter finds.
        """
        trial, whole = self._trial(image_size), (self.unfrozen or self)._trial(image_size)
        fraction = trial.backward_flops / whole.backward_flops if whole.backward_flops else 1.0
        return trial.flops + round(2 * trial.flops * fraction)

    def saved_elements(self, image_size: int) -> int:
        trial = self._trial(image_size)
        return max(trial.saved_elements, 2 * trial.largest_output)

    def check_image_size(self, image_size: int) -> None:
        self._trial(image_size)

    def _trial(self, image_size: int) -> Trial:
        if image_size not in self._trials:
            self._trials[image_size] = run_trial(self, image_size)
        return self._trials[image_size]


def external_spec(model: ModelSection, classes: int) -> ExternalSpec:
    """Return the entry of a model from elsewhere; raises InputError if it cannot be built or trained."""
    return _cached_spec(model.model_dump_json(include={"name", "options", "batch_norm"}), classes)


@lru_cache(maxsize=8)
def _cached_spec(model_json: str, classes: int) -> ExternalSpec:
    model = ModelSection.model_validate_json(model_json)
    factory = find_factory(model.name)
    factory.check_options(model.options)
    network = factory.on_meta(classes, model.options)
    published = _published_input(model_source(model.name), network)
    convert_batch_norm(network, model.batch_norm, model.name)
    parameters = tuple(_parameters(network))
    if not parameters:
        raise InputError("has no parameter to train", field="model.name", got=model.name)
    _check_dtypes(network, model.name)
    buffers = tuple(BufferSpec(name, tuple(array.shape)) for name, array in untrained_arrays(network).items())
    return ExternalSpec(
        model.name,
        classes,
        parameters,
        buffers,
        network.train(),
        _size_option(factory, model),
        published_input=published,
    )


def _parameters(network: nn.Module) -> Iterator[ParamSpec]:
    """Yield the trained parameters in the order of the module."""
    list_excluded: Any = getattr(network, "no_weight_decay", None)
    no_decay = set(list_excluded()) if callable(list_excluded) else set()
    owners = {
        f"{prefix}.{name}".removeprefix("."): module
        for prefix, module in network.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            yield ParamSpec(name, tuple(parameter.shape), role_of(owners[name], name, parameter, name in no_decay))


def role_of(owner: nn.Module, name: str, parameter: Tensor, is_excluded: bool) -> Role:
    """Return the role of a parameter, by the type of the layer that owns it.

    Args:
        owner: the layer.
        name: dotted name.
        parameter: the parameter, any shape.
        is_excluded: the model lists it among those without weight decay.
    """
    last = name.rpartition(".")[2]
    if isinstance(owner, NORM_CLASSES) or "norm" in type(owner).__name__.lower():
        return "norm_bias" if last.endswith("bias") else "norm_scale"
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or any(part in last for part in EMBEDDING_NAMES):
        return "embedding"
    if last.endswith("bias") or last.startswith("bias"):
        return "bias"
    if sum(length > 1 for length in parameter.shape) <= 1 and not isinstance(owner, nn.Conv2d | nn.Linear):
        return "norm_scale"  # a scale of each channel, such as LayerScale's
    return "embedding" if is_excluded else "weight"


def run_trial(spec: ExternalSpec, image_size: int) -> Trial:
    """Run a step of `TRIAL_IMAGES` images of side `image_size` on the meta device, in training mode.

    Raises InputError if the model does not take such images, or Podscale cannot train it.
    """
    network, trained = spec.network, {parameter.name for parameter in spec.parameters}
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trained)
    constants = _constants(network)
    own = {tensor.untyped_storage()._cdata for tensor in (*network.parameters(), *network.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}
    output_sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    def note_size(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            output_sizes.append(output.numel())

    images = torch.empty(TRIAL_IMAGES, 3, image_size, image_size, device="meta")
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            register_module_forward_hook(note_size),
            FlopCounterMode(display=False) as counter,
        ):
            outputs: Any = network(images)
    except Exception as error:
        hint = "Choose another size, or a model that takes this one."
        if spec.size_option:
            hint = f"Set model.options.{spec.size_option}={image_size}, or another image size."
        problem = f"{spec.name} does not take images of {image_size} px: {type(error).__name__}: {first_line(error)}"
        raise InputError(problem, field="input.image_size", got=image_size, hint=hint) from error
    _check_outputs(spec, outputs)
    _check_state(spec, constants)
    with FlopCounterMode(display=False) as backward_counter:
        outputs.float().sum().backward()
    _check_gradients(spec)
    saved_bytes = sum(storage.nbytes() for storage in saved.values())
    return Trial(
        counter.get_total_flops() // TRIAL_IMAGES,
        backward_counter.get_total_flops() // TRIAL_IMAGES,
        saved_bytes // FLOAT_BYTES // TRIAL_IMAGES,
        max(output_sizes) // TRIAL_IMAGES,
    )


def _check_outputs(spec: ExternalSpec, outputs: Any) -> None:
    expected = (TRIAL_IMAGES, spec.classes)
    if isinstance(outputs, Tensor) and tuple(outputs.shape) == expected:
        return
    shown = f"a tensor of {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
    raise InputError(
        f"returns {shown} in training, not logits of {list(expected)} (images, classes)",
        field="model.name",
        got=spec.name,
        hint="Choose a model with one output (model.options may turn another head off).",
    )


def _constants(network: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Return the buffers that are no statistics of batch norm, with their versions."""
    statistics = running_statistics(network)
    buffers = {name: buffer for name, buffer in network.named_buffers() if name not in statistics}
    return {name: (buffer, buffer._version) for name, buffer in buffers.items()}


def _check_state(spec: ExternalSpec, constants: dict[str, tuple[Tensor, int]]) -> None:
    """Raise if a forward pass changed a buffer that neither other ranks nor checkpoints know."""
    now = _constants(spec.network)
    changed = [
        name
        for name, (buffer, version) in constants.items()
        if name not in now or now[name][0] is not buffer or now[name][1] != version
    ]
    if changed:
        raise InputError(
            f"changes its buffer {changed[0]} in the forward pass, which ranks and checkpoints would not share",
            field="model.name",
            got=spec.name,
            hint="Only the running statistics of batch norm may change.",
        )


def _check_gradients(spec: ExternalSpec) -> None:
    network = spec.network
    unused = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    network.zero_grad(set_to_none=True)
    if unused:
        raise InputError(
            f"{len(unused)} of its parameters take no part in the logits, the first is {unused[0]}",
            field="model.name",
            got=spec.name,
            hint="Remove them, or set requires_grad=False.",
        )


def _check_dtypes(network: nn.Module, name: str) -> None:
    for parameter_name, parameter in network.named_parameters():
        if parameter.dtype != torch.float32:
            problem = f"its parameter {parameter_name} is {parameter.dtype}, and Podscale trains fp32 parameters"
            raise InputError(problem, field="model.name", got=name, hint="Set train.precision for another precision.")


def _size_option(factory: ModelFactory, model: ModelSection) -> str:
    """Return the name of the option with the side of the images; "" if the model has none."""
    known = factory.option_names or ()
    return next((name for name in SIZE_OPTIONS if name in known or name in model.options), "")


def _published_input(source: ModelSource | None, network: nn.Module) -> Normalisation | None:
    """Return the normalisation that the library lists for the model's weights."""
    config = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", None)
    if isinstance(config, dict) and config.get("mean"):
        return Normalisation(tuple(config["mean"]), tuple(config["std"]))
    if source is not None and source.library == "torchvision":
        import torchvision

        weights: Any = torchvision.models.get_model_weights(source.name)
        if default := getattr(weights, "DEFAULT", None):
            transform = default.transforms()
            return Normalisation(tuple(transform.mean), tuple(transform.std))
    return None
