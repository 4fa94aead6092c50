"""Podscale: train image classifiers at supercomputer scale on Kubernetes, and on this machine."""

from podscale.version import VERSION as __version__

__all__ = ["__version__"]
