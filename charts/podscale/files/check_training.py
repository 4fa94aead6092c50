"""Script of `helm test`: train the embedded digits in one pod, and read the metrics endpoint during training."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

WORKSPACE = Path(os.environ.get("PODSCALE_TEST_WORKSPACE", "/tmp/podscale"))
EPOCHS = int(os.environ.get("PODSCALE_TEST_EPOCHS", "8"))
PORT = 9464
TOP1 = 0.9  # 8 epochs reached 0.99 in our test
CHANGES = {
    "run.id": "helm-test",
    "run.workspace": str(WORKSPACE),
    "train.epochs": str(EPOCHS),
    "launch.processes": "2",
    "telemetry.address": "127.0.0.1",
    "telemetry.port": str(PORT),
}
IMAGES = re.compile(r"^podscale_train_images_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


def command(stage: str) -> list[str]:
    return ["podscale", stage, "digits", *(f"--set={name}={value}" for name, value in CHANGES.items())]


def images_served() -> float:
    """Return the images trained on by all ranks, from the endpoint; 0 while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5) as answer:
            return sum(float(value) for value in IMAGES.findall(answer.read().decode()))
    except OSError:
        return 0.0


def train() -> float:
    """Train, and return the largest number of images that the endpoint reported."""
    images = 0.0
    with subprocess.Popen(command("train")) as process:
        while process.poll() is None:
            images = max(images, images_served())
            time.sleep(0.2)
    done("train", process.returncode)
    return images


def done(stage: str, exit_code: int) -> None:
    if exit_code != 0:
        sys.exit(f"helm test: `podscale {stage}` failed with exit code {exit_code}. The log above has the reason.")


def main() -> None:
    done("shard", subprocess.call(command("shard")))
    images = train()
    if images == 0:
        sys.exit(f"port {PORT}: no trained image was reported. The metrics endpoint does not work in this image.")
    done("evaluate", subprocess.call(command("evaluate")))
    written = WORKSPACE / "runs" / "helm-test" / "evaluation.json"
    top1 = json.loads(written.read_text(encoding="utf-8"))["figures"]["top1"]
    print(json.dumps({"images_served": images, "top1": top1}))
    if top1 < TOP1:
        sys.exit(f"top-1 accuracy: below {TOP1} (got {top1:.3f}). Training does not work in this image.")


if __name__ == "__main__":
    main()
