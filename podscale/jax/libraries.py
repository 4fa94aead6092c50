"""The libraries with which this engine computes and communicates, by version: they must be the same on all ranks."""

from podscale.version import installed

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "pillow", "simplejpeg")


def library_versions() -> dict[str, str]:
    """Versions by name; "none" where it is not there."""
    return {name: installed(name) or "none" for name in PACKAGES}
