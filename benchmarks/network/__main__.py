"""All-reduce, weak scaling and sharded updates over shaped links between network namespaces of one machine.

    sudo .venv/bin/python -m benchmarks.network [PART ...]    every part, or some; about ten minutes in all
    sudo .venv/bin/python -m benchmarks.network --clean-up    removes what a killed run left

Every part writes a page of its own, so a part may be repeated alone. Needs root (network namespaces); the links and
their limits are those of lab.py, and nothing outside the namespaces is touched.
"""

import signal
import sys
import time

from benchmarks.harness import Options, not_here
from benchmarks.network import claims, collectives, steps
from benchmarks.network.lab import clean_up, obstacle
from benchmarks.network.setting import Setting

PARTS = {
    "allreduce": collectives.allreduce,
    "tensors": collectives.tensors,
    "ratios": collectives.ratios,
    "auto": collectives.auto,
    "scaling": steps.scaling,
    "update": steps.update,
    "claims": claims.claims,
}


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--clean-up", action="store_true", help="remove leftovers of killed runs and exit")
    options = parser.read()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    if options.clean_up:
        print("\n".join(clean_up()) or "nothing was left")
        return
    if reason := obstacle():
        not_here(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the lab is taken down
    for name in options.parts or PARTS:
        begin = time.monotonic()
        PARTS[name](Setting(options.results, options.small))
        print(f"[{name}: {time.monotonic() - begin:.0f} s]\n", flush=True)


if __name__ == "__main__":
    main()
