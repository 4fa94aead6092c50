"""The Python API in a script without `if __name__ == "__main__"`, in a thread, and with errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys, threading
import podscale

workspace = sys.argv[1]
config = podscale.load(
    "digits",
    run={"workspace": workspace},
    model={"width": 4},
    train={"epochs": 1, "schedule": {"warmup_epochs": 0.5}},
    evaluate={"every_epochs": 0},
    launch={"processes": 2},
)
records = []

def train():
    global run
    shards = podscale.shard(config)
    run = podscale.train(config, shard_set=shards, progress=records.append)

thread = threading.Thread(target=train)
thread.start()
thread.join()
predictions = list(podscale.predict(run, podscale.shard(config).location + "/validation", limit=4, top=2))
errors = []
for call in (lambda: podscale.evaluate("absent.yaml"), lambda: podscale.train(config, train={"epochs": 2})):
    try:
        call()
    except podscale.InputError as error:
        errors.append([error.field, int(error.exit_code)])
print(json.dumps({
    "steps": [record["step"] for record in records if record["kind"] == "step"],
    "metrics": [record["step"] for record in run.metrics("step")],
    "classes": [len(one.classes) for one in predictions],
    "again": podscale.train(config).outcomes["train"].reused,
    "errors": errors,
    "loaded": sorted({"torch", "typer"} & set(sys.modules)),
}))
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> "subprocess.CompletedProcess[str]":
    folder = tmp_path_factory.mktemp("api")
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", str(folder / "work")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)


def test_stages_in_a_script_and_a_thread(done: "subprocess.CompletedProcess[str]") -> None:
    (line,) = done.stdout.splitlines()  # so nothing else was printed
    result = json.loads(line)
    assert result["steps"] == result["metrics"] != []
    assert result["classes"] == [2] * 4
    assert result["again"] is True
    assert result["loaded"] == ["torch"], "for the predictions"


def test_errors_are_exceptions_and_nothing_is_printed(
    done: "subprocess.CompletedProcess[str]",
) -> None:
    assert (done.returncode, done.stderr) == (0, "")
    (missing, other_document) = json.loads(done.stdout)["errors"]
    assert missing == ["absent.yaml", 2]
    assert other_document[0].endswith("runs/digits")
    assert other_document[1] == 2
    assert Path(other_document[0]).is_dir()
