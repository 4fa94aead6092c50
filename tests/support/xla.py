"""XLA options for tests on CPUs, which would otherwise spend most of their time in the compiler."""

from importlib.util import find_spec


def quick_options() -> str:
    """Return the options of this jaxlib, which exits at one that it does not know."""
    options = "--xla_backend_optimization_level=0"
    if find_spec("jaxlib"):
        from jaxlib.version import __version_info__  # imports nothing else

        if __version_info__ < (0, 11):
            options += " --xla_cpu_use_fusion_emitters=false"
    return options


QUICK_XLA = quick_options()
