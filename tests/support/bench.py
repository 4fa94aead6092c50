"""`podscale bench allreduce` in this process, with options for a quick measurement."""

from pathlib import Path
from typing import Any

from podscale.cli.bench import allreduce


def run_allreduce(out: Path | None = None, **changes: Any) -> None:
    values: dict[str, Any] = {
        "ranks": 2,
        "algorithms": "flat,torus2d",
        "sizes": "4K,256K",
        "wire": "fp32",
        "row": 1,
        "bucket_mb": 1.0,
        "seconds": 0.02,
        "model": "",
        "side": 32,
        "batch": 2,
        "time_limit": 120.0,
        "out": out,
        "as_json": True,
    }
    allreduce(**(values | changes))
