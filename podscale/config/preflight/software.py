"""Preflight checks of installed packages: the engine, the loader and the trackers."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

from podscale.config.engine_support import TPU_RESOURCE, has_cuda_plugin, requests_tpus
from podscale.config.outside_code import plugin_problems
from podscale.config.run_config import RunConfig
from podscale.errors import InputError
from podscale.util import env, host_info
from podscale.util.formatting import join_words


def software_problems(document: RunConfig) -> Iterator[InputError]:
    yield from _jax_problems(document) if document.train.engine == "jax" else _pytorch_problems(document)
    if document.input.loader == "dali" and (find_spec("nvidia") is None or find_spec("nvidia.dali") is None):
        advice = _install_hint("Run `pip install 'podscale[gpu]'`", "podscale-gpu")
        hint = f"{advice}, or set input.loader=auto."
        yield InputError("DALI is not installed", field="input.loader", got="dali", hint=hint)
    yield from _export_problems(document)
    yield from _tracker_problems(document)
    yield from plugin_problems(document)


def _pytorch_problems(document: RunConfig) -> Iterator[InputError]:
    advice = _install_hint("Run `pip install 'podscale[torch]'`", "podscale-base or podscale-gpu")
    for module in ("torch", "torchvision"):
        if find_spec(module) is None:
            problem = f"the PyTorch engine needs {module}, which is not installed"
            yield InputError(problem, field="train.engine", hint=advice)
    yield from _model_problems(document)


def _model_problems(document: RunConfig) -> Iterator[InputError]:
    """Yield missing libraries of a model or of its weights."""
    weights = document.train.start_from.weights or ""
    for key, value, prefix, package, extra in (
        ("model.name", document.model.name, "timm:", "timm", "timm"),
        ("train.start_from.weights", weights, "timm:", "timm", "timm"),
        ("train.start_from.weights", weights, "hf://", "huggingface_hub", "hub"),
    ):
        if value.startswith(prefix) and not _is_installed(package):
            images = f"an image of your own, built on it, that adds {package}"
            advice = _install_hint(f"Run `pip install 'podscale[{extra}]'`", images)
            yield InputError(f"{package} is not installed", field=key, got=value, hint=f"{advice}.")


def _jax_problems(document: RunConfig) -> Iterator[InputError]:
    """Yield missing software and TPUs; without libtpu, JAX would train on the CPU without a warning."""
    advice = _install_hint("Install 'jax[tpu]' on a TPU host, 'podscale[tpu]' elsewhere", "podscale-tpu")
    if find_spec("jax") is None:
        if host_info.visible_gpus() and not host_info.tpu_chips():
            advice = _install_hint("Run `pip install 'podscale[jax-cuda]'`", "podscale-gpu-jax")
        yield InputError("the JAX engine needs jax, which is not installed", field="train.engine", hint=advice)
    elif _lacks_cuda_plugin():
        problem = "JAX does not find the GPUs of this machine without its plugin for CUDA, which is not installed"
        install = "Run `pip install 'podscale[jax-cuda]'`, or set JAX_PLATFORMS=cpu to train on the CPU"
        yield InputError(problem, field="train.engine", hint=_install_hint(install, "podscale-gpu-jax"))
    elif find_spec("libtpu") is None and (host_info.tpu_chips() or requests_tpus(document)):
        problem = "JAX does not find the TPUs of this machine without libtpu, which is not installed"
        yield InputError(problem, field="train.engine", hint=advice)
    if requests_tpus(document) and not host_info.tpu_chips():
        yield InputError(
            "this machine has no TPU",
            field="launch.hardware",
            got=document.launch.hardware or TPU_RESOURCE,
            hint="Leave it out to train on what is here, or submit the run to a cluster.",
        )


def _lacks_cuda_plugin() -> bool:
    """Return True if JAX should use GPUs and cannot."""
    if "JAX_PLATFORMS" in os.environ or host_info.tpu_chips() or not host_info.visible_gpus():
        return False
    return not has_cuda_plugin()


def _export_problems(document: RunConfig) -> Iterator[InputError]:
    """Yield missing packages of the export stage, so that they are not found missing after the training."""
    formats = document.export.formats
    needed = [
        "torch",
        *(("onnx", "onnxruntime", "onnxscript") if any(name.startswith(("onnx", "html")) for name in formats) else ()),
    ]
    if formats and (missing := [package for package in needed if not _is_installed(package)]):
        images = f"podscale-base or podscale-gpu, or an image of your own that adds {join_words(missing)}"
        advice = _install_hint("Run `pip install 'podscale[torch,export]'`", images)
        hint = f"{advice}, or set export.formats=[] and export elsewhere."
        problem = f"needs {join_words(missing)}, not installed here"
        yield InputError(problem, field="export.formats", got=list(formats), hint=hint)


def _tracker_problems(document: RunConfig) -> Iterator[InputError]:
    trackers = document.telemetry.trackers
    for name in ("wandb", "mlflow"):
        if name in trackers and not _is_installed(name):
            images = f"an image of your own, built on it, that adds {name}"
            advice = _install_hint(f"Run `pip install 'podscale[{name}]'`", images)
            yield InputError("not installed", field="telemetry.trackers", got=name, hint=f"{advice}, or remove it.")
    registers = document.export.mlflow_model is not None
    if registers and not _is_installed("mlflow"):
        advice = _install_hint("Run `pip install 'podscale[mlflow]'`", "an image of your own that adds mlflow")
        hint = f"{advice}, or remove it."
        yield InputError("mlflow is not installed", field="export.mlflow_model", hint=hint)
    if ("mlflow" in trackers or registers) and not (
        document.telemetry.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    ):
        yield InputError(
            "no tracking server is set",
            field="telemetry.trackers" if "mlflow" in trackers else "export.mlflow_model",
            got="mlflow" if "mlflow" in trackers else document.export.mlflow_model,
            hint="Set telemetry.mlflow.tracking_uri or MLFLOW_TRACKING_URI (in pods: launch.cluster.env), or remove "
            "it.",
        )


def _is_installed(package: str) -> bool:
    """Return True if a package is installed; a folder of that name, as wandb leaves, is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _install_hint(install: str, images: str) -> str:
    """Return the advice on missing software: in a container, another image."""
    image = os.environ.get(env.IMAGE)
    if not image:
        return install
    if image.partition(":")[0] in images.replace(",", " ").split():
        return f"{image} should contain it, so build that image again (docs/how-to/images.md)"
    return f"This is {image}, choose {images}"
