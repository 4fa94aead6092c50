"""Stub of the CUDA driver and runtime, compiled for the tests, and processes that run on it."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("runtime.c")
ROOT = Path(__file__).resolve().parents[2]


def reason_to_skip() -> str:
    """Return what is missing for the stub; "" if nothing is."""
    if shutil.which("gcc") is None:
        return "needs gcc"
    if find_spec("torch") is None:
        return "needs torch"
    import torch

    if torch.version.cuda is None:
        return "needs a CUDA build of torch"
    return "" if _headers() else "needs CUDA's headers (of the wheels nvidia-cuda-runtime and triton)"


def _headers() -> list[Path]:
    """Return the folders of driver_types.h and of what it includes."""
    specs = [spec for name in ("nvidia", "triton") if (spec := find_spec(name))]
    places = [Path(place) for spec in specs for place in spec.submodule_search_locations or ()]
    found = {path.parent for place in places for path in place.glob("*/include/driver_types.h")}
    found |= {path.parent for place in places for path in place.glob("backends/nvidia/include/driver_types.h")}
    ordered = sorted(found, key=lambda folder: "triton" in folder.parts)
    return ordered if any((folder / "crt" / "host_defines.h").exists() for folder in ordered) else []


def build(folder: Path) -> dict[str, str]:
    """Compile the stub into `folder`. Returns the environment variables with which torch uses it."""
    import torch

    major, minor = map(int, str(torch.version.cuda).split("."))
    options = ["-shared", "-fPIC", "-O1", f"-DCUDART_VERSION_OF_BUILD={1000 * major + 10 * minor}"]
    options += [f"-I{folder}" for folder in _headers()]
    for name, more in (("runtime.so", []), ("libcuda.so.1", ["-Wl,-soname,libcuda.so.1"])):
        subprocess.run(["gcc", *options, *more, SOURCE, "-o", folder / name], check=True)
    return {"LD_LIBRARY_PATH": str(folder), "LD_PRELOAD": str(folder / "runtime.so"), "OMP_NUM_THREADS": "1"}


def run_code(stub: dict[str, str], code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code on the stub; its last line ends the process without CUDA's destructors."""
    environment = {**os.environ, **stub, **variables}
    ended = f"{code}\nimport os, sys; sys.stdout.flush(); os._exit(0)"
    command = [sys.executable, "-c", ended]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


class StepSession:
    """Process that runs training steps on paper, one case after the other (see `session`)."""

    def __init__(self, stub: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.paper_gpu.session"],
            env={**os.environ, **stub},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reports: dict[str, dict[str, Any]] = {}

    def run(self, **case: Any) -> dict[str, Any]:
        """Return the report of a case; a case that ran before is not repeated."""
        line = json.dumps(case, sort_keys=True)
        if line not in self._reports:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(line, file=self._process.stdin, flush=True)
            self._reports[line] = json.loads(self._process.stdout.readline())
        return self._reports[line]

    def close(self) -> None:
        self._process.communicate()
