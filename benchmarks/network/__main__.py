"""All-reduce, weak scaling and sharded updates over shaped links between network namespaces of one machine.

    sudo .venv/bin/python -m benchmarks.network [PART ...]    every part, or some; about ten minutes in all
    sudo .venv/bin/python -m benchmarks.network --clean-up    removes what a killed run left

Every part writes its own file to benchmarks/results, so a part may be repeated alone. Needs root (network namespaces);
the links and their limits are those of lab.py, and nothing outside the namespaces is touched.
"""

import argparse
import os
import signal
import sys
import time

from benchmarks.network import claims, parts
from benchmarks.network.lab import clean_up

PARTS = {
    "allreduce": parts.allreduce,
    "tensors": parts.tensors,
    "ratios": parts.ratios,
    "auto": parts.auto,
    "scaling": parts.scaling,
    "update": parts.update,
    "claims": claims.claims,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--clean-up", action="store_true", help="remove leftovers of killed runs and end")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    if options.clean_up:
        print("\n".join(clean_up()) or "nothing was left")
        return
    if os.geteuid() != 0:
        sys.exit("benchmarks.network needs root, because it makes network namespaces: start it with sudo")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the lab is taken down
    for name in options.parts or PARTS:
        begin = time.monotonic()
        PARTS[name]()
        print(f"[{name}: {time.monotonic() - begin:.0f} s]\n", flush=True)


if __name__ == "__main__":
    main()
