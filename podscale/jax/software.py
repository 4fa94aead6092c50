"""Versions of the libraries that must be the same on all ranks, and the capabilities of JAX for `podscale doctor`."""

from dataclasses import dataclass, field

from podscale.version import installed


@dataclass(frozen=True)
class Capabilities:
    """Version and devices by kind; `problem`: why JAX cannot use them, empty where it can."""

    version: str
    platform: str = ""
    devices: list[str] = field(default_factory=list)
    problem: str = ""


def probe() -> Capabilities:
    """Asks JAX, which takes the TPUs of this machine until this process ends: another that has them keeps them."""
    import jax  # a worker asks for versions before it may import JAX

    try:
        found = jax.local_devices()
    except RuntimeError as error:
        return Capabilities(jax.__version__, problem=str(error).strip().splitlines()[0])
    return Capabilities(jax.__version__, found[0].platform, [device.device_kind for device in found])


PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "pillow", "simplejpeg")


def library_versions() -> dict[str, str]:
    """Versions by name; "none" where it is not there."""
    return {name: installed(name) or "none" for name in PACKAGES}
