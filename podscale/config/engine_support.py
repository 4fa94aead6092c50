"""Options that only one engine supports, and the options and smallest images of each network."""

import json
from importlib.util import find_spec
from typing import NamedTuple

from podscale.config.fields import changed_options, conflict_error
from podscale.config.ranks import devices_per_rank
from podscale.config.run import RunDocument
from podscale.errors import format_error

TPU_RESOURCE = "google.com/tpu"
"""Resource name of TPU chips in Kubernetes."""
GPU_RESOURCE = "nvidia.com/gpu"
"""Resource name of NVIDIA GPUs in Kubernetes."""


def has_cuda_plugin() -> bool:
    """Return True if JAX's plugin for CUDA is installed."""
    return any(find_spec(f"jax_cuda{version}_plugin") for version in (13, 12))


def requests_tpus(config: RunDocument) -> bool:
    return _requests(config, "tpu", TPU_RESOURCE)


def requests_gpus(config: RunDocument) -> bool:
    return _requests(config, "nvidia", GPU_RESOURCE)


def _requests(config: RunDocument, prefix: str, resource: str) -> bool:
    """Return True if pods get an accelerator, by the prefix of the hardware's name or by its resource."""
    hardware, resources = config.launch.hardware, config.launch.resources
    if hardware is not None:
        return hardware.strip().lower().startswith(prefix)
    return bool(resources.accelerators) and resources.accelerator == resource


def check_engine_support(config: RunDocument) -> None:
    """Raise if an option needs the other engine."""
    if config.train.engine == "jax":
        _check_jax_support(config)
    elif devices_per_rank(config) > 1:
        raise conflict_error(
            "train.spatial_partitions",
            "only the JAX engine cuts images over devices",
            got=config.train.spatial_partitions,
            hint="Set train.engine=jax, or leave it out.",
        )
    elif config.train.steps_per_call != 1:
        raise conflict_error(
            "train.steps_per_call",
            "only the JAX engine runs more than one step per call",
            got=config.train.steps_per_call,
            hint="Set train.engine=jax, or train.steps_per_call=1.",
        )


def _check_jax_support(config: RunDocument) -> None:
    if option := find_unsupported_option(config):
        hint = f"Set {option.key}={option.instead}, or train.engine=pytorch."
        raise conflict_error(option.key, option.problem, hint=hint)


class UnsupportedOption(NamedTuple):
    """Option that an engine does not have; `instead` is the value to set, as YAML."""

    key: str
    problem: str
    instead: str

    @property
    def message(self) -> str:
        return format_error(self.problem, field=self.key, hint=f"Set {self.key}={self.instead}")


def find_unsupported_option(config: RunDocument) -> UnsupportedOption | None:
    """Return the first option of a document that the JAX engine does not have."""
    return next(
        (
            UnsupportedOption(key, f"the JAX engine {behaviour}", instead)
            for key, (is_set, behaviour, instead) in _options_of_pytorch(config).items()
            if is_set
        ),
        None,
    )


def _options_of_pytorch(config: RunDocument) -> dict[str, tuple[bool, str, str]]:
    """Return for each option whether the document sets it, what the JAX engine does, and the value to set."""
    train, reduce = config.train, config.train.all_reduce
    return {
        "train.cuda_graph": (train.cuda_graph, "compiles every step into one program anyway", "false"),
        "train.compile": (train.compile != "off", "compiles every step anyway", "off"),
        "train.fused_kernels": (train.fused_kernels != "off", "leaves fusing to XLA", "off"),
        "train.channels_last": (not train.channels_last, "computes only in NHWC", "true"),
        "train.deterministic": (train.deterministic, "has no switch for it", "false"),
        "train.precision": (train.precision not in ("fp32", "bf16"), "computes in fp32 or bf16", "bf16"),
        "train.weight_gather": (train.weight_gather != "fp32", "gathers weights in fp32", "fp32"),
        "train.ema.decay": (train.ema.decay is not None, "keeps no running average of the weights", "null"),
        "train.loss": (train.loss != "cross_entropy", "has cross entropy", "cross_entropy"),
        "train.mix": (train.mix.is_enabled, "does not mix images", "{mixup: 0, cutmix: 0}"),
        "train.start_from.weights": (
            train.start_from.weights is not None,
            "starts from runs of Podscale",
            "null, and train.start_from.run",
        ),
        "train.optimizer.name": (train.optimizer.is_plugin, "takes no optimizers of plug-ins", "sgd"),
        "train.freeze": (bool(train.freeze), "trains all parameters", "[]"),
        "train.learning_rate_scale": (bool(train.learning_rate_scale), "has one learning rate", "{}"),
        "train.layer_decay": (train.layer_decay is not None, "has one learning rate", "null"),
        "model.stochastic_depth": (config.model.stochastic_depth > 0, "leaves out no blocks", "0"),
        "train.phases": (
            len(set(config.training_sizes)) > 1,
            "compiles its program for one size of training images",
            "[] or phases without image_size",
        ),
        "model.name": (
            config.model.name.startswith("inception") or config.model.is_external,
            "has the catalogue's residual networks and AlexNet",
            "resnet50",
        ),
        "train.all_reduce.algorithm": (
            reduce.algorithm not in ("flat", "torus2d"),
            "has flat (XLA's own) and torus2d",
            "flat",
        ),
        "train.all_reduce.wire_row": (reduce.wire_row != "fp32", "averages gradients in fp32", "fp32"),
        "train.all_reduce.wire_column": (reduce.wire_column != "fp32", "averages gradients in fp32", "fp32"),
        "train.all_reduce.overlap": (not reduce.overlap, "leaves overlapping to XLA", "true"),
        "train.all_reduce.backend": (reduce.backend != "auto", "leaves communication to XLA", "auto"),
        "input.loader": (
            config.input.loader in ("dali", "nvjpeg"),
            "gets its images from the host, and decoders on GPUs give theirs to PyTorch",
            "auto",
        ),
        "launch.cluster.min_nodes": (
            config.launch.cluster.min_nodes is not None,
            "continues with all pods or none",
            "null",
        ),
    }


MIN_IMAGE_SIZE = {"alexnet": 63, "inception_v3": 75, "inception_resnet_v2": 75}
"""Minimal image size, pixels; below it, the window of a network's last pooling is larger than its input."""
MIN_IMAGE_SIZE_IMAGENET_STEM = 32
"""Minimal image size, pixels; below it, five halvings leave the last stage less than one pixel."""
MIN_IMAGE_SIZE_AUXILIARY = 299
"""Minimal size of training images, pixels; below it, the auxiliary head's 5x5 convolution is larger than its input."""


def check_model(config: RunDocument) -> None:
    """Raise if the network does not have an option, or the images are too small for it."""
    model = config.model
    if model.is_external:
        _check_external_options(config)
        return
    trained = min(config.training_sizes)
    smallest = min(trained, config.eval_image_size)
    if not model.is_residual:
        _check_residual_options(config)
        least = MIN_IMAGE_SIZE[model.name]
        if smallest < least:
            raise conflict_error(
                "input.image_size",
                f"too small for {model.name}, which needs {least} px",
                got=smallest,
                hint="Raise input.image_size and evaluate.image_size, or take a resnet.",
            )
    elif not model.small_stem and smallest < MIN_IMAGE_SIZE_IMAGENET_STEM:
        raise conflict_error(
            "model.stem",
            f"images of {smallest} px are too small for the imagenet stem, which needs {MIN_IMAGE_SIZE_IMAGENET_STEM}",
            got=model.stem,
            hint="Set model.stem=small.",
        )
    if model.has_auxiliary_head and trained < MIN_IMAGE_SIZE_AUXILIARY:
        raise conflict_error(
            "input.image_size",
            f"too small for the auxiliary head of inception_v3, which needs {MIN_IMAGE_SIZE_AUXILIARY} px in training",
            got=trained,
            hint="Raise input.image_size, or set model.inception.auxiliary=0.",
        )


def _check_external_options(config: RunDocument) -> None:
    """Raise if an option needs one of Podscale's own networks."""
    model, train = config.model, config.train
    for key, default in changed_options(model, "model."):
        if key not in ("model.name", "model.options") and not key.startswith("model.batch_norm."):
            problem = f"only the catalogue's networks have it, and {model.name} is none"
            hint = f"Set it to its default, {json.dumps(default)}; arguments of the model stand in model.options."
            raise conflict_error(key, problem, hint=hint)
    if train.stem_compute != "plain":
        problem = f"only the catalogue's networks have another first layer, and {model.name} is none"
        raise conflict_error("train.stem_compute", problem, got=train.stem_compute, hint="Set it to plain.")
    if train.precision == "bf16-pure":
        problem = f"needs a network of the catalogue, whose layers take bf16 and fp32 side by side, not {model.name}"
        raise conflict_error("train.precision", problem, got=train.precision, hint="Set it to bf16.")


def _check_residual_options(config: RunDocument) -> None:
    model = config.model
    if model.stem != "imagenet":
        raise conflict_error(
            "model.stem",
            f"{model.name} has no such stem",
            got=model.stem,
            hint="Set model.stem=imagenet, or take a resnet.",
        )
    options = {
        "block": model.block != "v1",
        "shortcut": model.shortcut,
        "blurpool": model.blurpool,
        "stochastic_depth": model.stochastic_depth,
    }
    if key := next((key for key, value in options.items() if value), None):
        problem = f"only residual networks have it, and {model.name} is none"
        raise conflict_error(f"model.{key}", problem, hint="Leave it out.")
