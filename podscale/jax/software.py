"""Versions of the libraries that must be the same on all ranks, and the capabilities of JAX for `podscale doctor`."""

import os
from dataclasses import dataclass, field

from podscale.config.engine_support import has_cuda_plugin
from podscale.util import host_info
from podscale.version import installed


@dataclass(frozen=True)
class Capabilities:
    """Version of JAX, kinds of its devices, and the `problem` if JAX cannot use them."""

    version: str
    platform: str = ""
    devices: list[str] = field(default_factory=list)
    problem: str = ""


def probe() -> Capabilities:
    """Return JAX's version and devices. JAX holds the TPUs until this process exits, and fails if another one does."""
    keep_to_cpu_without_gpus()
    import jax  # a worker asks for versions before it may import JAX

    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        return Capabilities(jax.__version__, problem=str(error).strip().splitlines()[0])
    return Capabilities(jax.__version__, devices[0].platform, [device.device_kind for device in devices])


def keep_to_cpu_without_gpus() -> None:
    """Set JAX_PLATFORMS=cpu, before JAX is imported, where its plugin for CUDA is installed and no GPU is.

    The plugin asks CUPTI for its version even there, and CUPTI 13.2 ends the process without a driver.
    """
    has_others = host_info.visible_gpus() > 0 or installed("libtpu") is not None
    if has_cuda_plugin() and not has_others:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


PACKAGES = ("jax", "jaxlib", "libtpu", "pillow", "simplejpeg")


def library_versions() -> dict[str, str]:
    """Return versions by name; "none" for a package that is not installed."""
    return {name: installed(name) or "none" for name in PACKAGES}
