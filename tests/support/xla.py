"""XLA options for tests on CPUs, which would otherwise spend most of their time in the compiler."""

from podscale.version import installed

QUICK_XLA = "--xla_backend_optimization_level=0"
if (installed("jaxlib") or "0.10").startswith("0.10."):  # later ones do not know the flag, which ends the process
    QUICK_XLA += " --xla_cpu_use_fusion_emitters=false"
