"""Process on the stub of CUDA: reads a case a line and answers with its report, each from a fork of its own.

Later cases know the shapes that earlier ones computed (see `shape_cache`), and nothing else of them.
`python -m tests.paper_gpu.session`; the environment names the stub (see `stub`).
"""

import gc
import json
import os
import sys
import traceback
from typing import Any

import torch._dynamo  # noqa: F401 (fake tensors import it: once here takes less time than in every fork)

from tests.paper_gpu import shape_cache
from tests.paper_gpu.training import run_case
from tests.paper_gpu.usable import check_machine

KINDS = {"train": run_case, "machine": check_machine}


def _answer(case: dict[str, Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    new_shapes = shape_cache.recorder()
    if (child := os.fork()) == 0:
        try:
            os.close(reading)
            os.environ.update(case.pop("environment", {}))
            report = KINDS[case.pop("kind", "train")](case)
        except BaseException:
            report = {"error": traceback.format_exc()}
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(report).encode() + b"\n" + new_shapes())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text, shapes = pipe.readline(), pipe.read()
    _, status = os.waitpid(child, 0)
    shape_cache.add(shapes)
    return json.loads(text) if text else {"error": f"the case ended with status {status}"}


def main() -> None:
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
