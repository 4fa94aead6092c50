"""XLA options for tests on CPUs, which would otherwise spend most of their time in the compiler."""

import re

from podscale.jax.aot.hlo import replica_groups
from podscale.version import installed

QUICK_XLA = "--xla_backend_optimization_level=0"
if (installed("jaxlib") or "0.10").startswith("0.10."):  # later ones do not know the flag, which ends the process
    QUICK_XLA += " --xla_cpu_use_fusion_emitters=false"


def list_groups(program: str) -> str:
    """Rewrite groups by mesh axes (jaxlib 0.11) in the text of a compiled program as lists, as jaxlib 0.10 does."""

    def listed(groups: re.Match[str]) -> str:
        return f"replica_groups={replica_groups(groups[0], 0).tolist()}".translate(str.maketrans("[]", "{}", " "))

    return re.sub(r"replica_groups=mesh\[[^\]]*\] \{[^}]*\}", listed, program)
