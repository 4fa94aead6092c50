"""All-reduce, weak scaling and sharded updates over shaped links between network namespaces of one machine.

    sudo .venv/bin/python -m benchmarks.network [PART ...]    all parts take about ten minutes
    sudo .venv/bin/python -m benchmarks.network --clean-up    remove leftovers of killed runs

Each part writes its own page. Needs root (network namespaces); changes nothing outside of its namespaces.
"""

import signal
import sys
import time

from benchmarks.harness import Options, exit_unavailable
from benchmarks.network import all_reduce, claims, train_steps
from benchmarks.network.netns_cluster import clean_up, unavailable_reason
from benchmarks.network.setting import Setting

PARTS = {
    "allreduce": all_reduce.allreduce,
    "tensors": all_reduce.tensors,
    "ratios": all_reduce.ratios,
    "auto": all_reduce.auto,
    "scaling": train_steps.scaling,
    "update": train_steps.update,
    "claims": claims.claims,
}


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--clean-up", action="store_true", help="remove leftovers of killed runs and exit")
    options = parser.read()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"PART: unknown part (got {unknown[0]}). Choose from {', '.join(PARTS)}.")
    if options.clean_up:
        print("\n".join(clean_up()) or "no leftovers")
        return
    if reason := unavailable_reason():
        exit_unavailable(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the cluster is removed
    for name in options.parts or PARTS:
        start = time.monotonic()
        PARTS[name](Setting(options.results, options.small))
        print(f"[{name}: {time.monotonic() - start:.0f} s]\n", flush=True)


if __name__ == "__main__":
    main()
