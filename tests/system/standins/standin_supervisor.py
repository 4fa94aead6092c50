"""Stand-in for the supervisor: its training is a counter in a file, and can fail, wait, stop and resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from podscale.launch.worker_group import StageResult
from podscale.runs import RunDirectory
from podscale.util.files import write_json

STEPS = 5


def supervise_stage(config, stage, shard_set, lease, output=None):
    run = RunDirectory.for_config(config)
    how = os.environ.get(f"STANDIN_{stage.upper()}", "")
    if how.startswith("fail"):
        _, code, message = how.split(":", 2)
        return StageResult(int(code), message)
    if how == "crash":
        raise RuntimeError("a bug in the stage")
    if how == "vanish":
        print("last words")
        sys.stdout.flush()
        os._exit(9)
    return train(config, run, how) if stage == "train" else evaluate(run)


def train(config, run, how):
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    position = run.path / "position"
    start = int(position.read_text()) if position.exists() else 0
    with run.metrics.open("a") as metrics:
        event = "resumed" if start else "start"
        metrics.write(json.dumps({"time": time.time(), "kind": "event", "event": event, "step": start}) + "\n")
    if how == "wait":
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import ctypes, time; ctypes.CDLL(None).prctl(1, 9); print(flush=1); time.sleep(600)",
            ],
            stdout=subprocess.PIPE,
        )
        child.stdout.readline()  # from now on it exits with its parent
        Path(os.environ["STANDIN_PIDS"]).write_text(f"{os.getpid()} {child.pid}")
    for step in range(start, STEPS):
        position.write_text(str(step + 1))
        with run.metrics.open("a") as metrics:
            line = {"kind": "step", "step": step, "epoch": 0.1 * step, "loss": 2.0, "learning_rate": 0.1}
            metrics.write(json.dumps({"time": time.time(), **line, "images_per_second": 50.0, "phases": {}}) + "\n")
        while how == "wait" and step == 2 and not stop:
            time.sleep(0.02)
        if stop:
            child.kill()
            return StageResult(75, "stopped after saving step 3")
    run.model.mkdir(exist_ok=True)
    (run.model / "model.safetensors").write_bytes(b"weights of " + str(config.run.seed).encode())
    write_json(run.model / "model.json", {})
    return StageResult(0, "")


def evaluate(run):
    run.predictions.write_bytes(b"predictions")
    return StageResult(0, "")
