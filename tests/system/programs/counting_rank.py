"""Training without a framework, as a worker module: it trains one weight, saves it every few steps, and resumes.

It keeps a training's contract with the launcher, the supervisor and the run directory at the cost of an interpreter in
place of PyTorch's import: step lines, a final model, and on SIGTERM a save and exit code 75. So the weight and the
losses of a run that lost or repeated a step differ from those of an undisturbed run.

Started by the fault `count:<file>` of fault_injection/sitecustomize.py; each step sleeps while there is such a file.
"""

import json
import logging
import os
import signal
import time
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from podscale.distributed.worker_env import WorkerEnv
from podscale.errors import Preempted
from podscale.runs import RunDirectory
from podscale.telemetry.events import EventLog
from podscale.util.files import write_json

STEPS, SAVE_EVERY, STEP_SECONDS = 68, 5, 0.2


def trained(weight: float, step: int) -> float:
    """Return the weight after a step, which is also its loss."""
    return 0.9 * weight + 1 / step


def undisturbed() -> dict[str, NDArray[np.float64]]:
    """Return the final weight and the loss of each step of a training that nothing disturbed."""
    losses = list(accumulate(range(1, STEPS + 1), trained, initial=1.0))[1:]
    return {"weight": np.array(losses[-1:]), "losses": np.array(losses)}


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    worker_env = WorkerEnv.read()
    run = RunDirectory.for_config(worker_env.config)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    is_leader = worker_env.rank_env.rank == 0
    checkpoint, slow = run.path / "counted.json", Path(os.environ["INJECTED_FAULT"].partition(":")[2])
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "weight": 1.0}
    first, weight = state["step"], state["weight"]
    with EventLog(run.metrics if is_leader else Path(os.devnull)) as log:
        log.event("resumed" if first else "start", step=first, total_steps=STEPS)
        for step in range(first + 1, STEPS + 1):
            if slow.exists():
                time.sleep(STEP_SECONDS)
            weight = trained(weight, step)
            log.step(step, epoch=step / STEPS, loss=weight, learning_rate=0.1, images_per_second=1.0, phases={})
            if is_leader and (stopped or step % SAVE_EVERY == 0):
                write_json(checkpoint, {"step": step, "weight": weight})
            if stopped:
                raise Preempted(f"saved step {step} and stopped on request")
    if is_leader:
        run.model.mkdir(exist_ok=True)
        save_file({"weight": np.array([weight])}, run.model / "model.safetensors")
        write_json(run.model / "model.json", {})


if __name__ == "__main__":
    main()
