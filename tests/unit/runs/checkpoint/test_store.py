"""CheckpointStore: incomplete checkpoints are ignored, retention keeps some, those of another run are refused."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from podscale.config import RunConfig
from podscale.config.identity import result_values
from podscale.errors import PodscaleError
from podscale.runs.checkpoint import (
    CheckpointReport,
    CheckpointStore,
    Failed,
    Restored,
    Retention,
    RunIdentity,
    Saved,
    Skipped,
    Snapshot,
)
from podscale.runs.checkpoint.array_file import write_arrays
from podscale.runs.lease import LeaseLost
from tests.support.refusals import refused

IDENTITY = RunIdentity({"train.global_batch": 256, "run.seed": 1}, "c" * 64, "f" * 16)


def snapshot(step: int, value: float = 1.0) -> Snapshot:
    arrays = {
        "model/conv1.weight": np.full((8, 3, 3, 3), value + step, np.float32),
        "model/bn1.num_batches_tracked": np.array(step, np.int64),
        "optimizer/momentum/conv1.weight": np.full((8, 3, 3, 3), -value, np.float32),
    }
    return Snapshot(step, arrays, {"position": step, "loss_scale": 65536.0})


def checkpoints(directory: Path, identity: RunIdentity = IDENTITY, **options: object) -> CheckpointStore:
    retention = Retention(options.pop("keep_last", 2), options.pop("keep_best", 1))  # type: ignore[arg-type]
    return CheckpointStore(directory, identity, retention, **{"asynchronous": False, **options})  # type: ignore[arg-type]


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir())


def restored_step(directory: Path) -> int | None:
    restored = checkpoints(directory).restore("auto")
    return None if restored is None else restored.step


def assert_same(left: Snapshot, right: Snapshot) -> None:
    assert left.step == right.step
    assert left.meta == right.meta
    assert left.arrays.keys() == right.arrays.keys()
    for name, array in left.arrays.items():
        np.testing.assert_array_equal(array, right.arrays[name])
        assert (array.dtype, array.shape) == (right.arrays[name].dtype, right.arrays[name].shape)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_restores_what_was_saved(tmp_path: Path, asynchronous: bool) -> None:
    store = checkpoints(tmp_path, asynchronous=asynchronous)
    assert store.restore("auto") is None
    store.save(snapshot(10))
    store.close()
    restored = checkpoints(tmp_path).restore("auto")
    assert restored is not None
    assert_same(restored, snapshot(10))


def test_files_are_plain_safetensors_and_the_manifest_lists_them(tmp_path: Path) -> None:
    checkpoints(tmp_path).save(snapshot(10), top1=0.5)
    model = load_file(tmp_path / "step-10" / "model.safetensors")
    assert set(model) == {"model/conv1.weight", "model/bn1.num_batches_tracked"}
    assert model["model/bn1.num_batches_tracked"].shape == ()
    manifest = json.loads((tmp_path / "step-10" / "manifest.json").read_text())
    for file in manifest["files"]:
        path = tmp_path / "step-10" / file["name"]
        assert path.stat().st_size == file["bytes"]
        digest = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
        assert digest == file["sha256"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "uint8", "uint64", "bool"])
def test_array_files_are_read_by_the_library(tmp_path: Path, dtype: str) -> None:
    arrays = {
        "transposed": np.arange(24).reshape(4, 6).astype(dtype).T,
        "scalar": np.array(1).astype(dtype),
        "empty": np.zeros((0, 3), dtype),
    }
    write_arrays(tmp_path / "x.safetensors", arrays)
    loaded = load_file(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype


def test_asynchronous_save_returns_before_the_write_and_the_next_waits_for_it(tmp_path: Path) -> None:
    gate, entered = threading.Event(), threading.Event()

    def fence() -> None:
        entered.set()
        assert gate.wait(30)

    store = checkpoints(tmp_path, asynchronous=True, fence=fence)
    store.save(snapshot(1))
    assert entered.wait(30)
    assert restored_step(tmp_path) is None  # the writer still waits in the fence
    second = threading.Thread(target=store.save, args=(snapshot(2),))
    second.start()
    assert second.is_alive()
    gate.set()
    second.join()
    store.close()
    assert steps(tmp_path) == [1, 2]


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    store = checkpoints(tmp_path, keep_last=2, keep_best=1)
    for step, top1 in [(1, 0.1), (2, 0.9), (3, 0.5), (4, None), (5, 0.6)]:
        store.save(snapshot(step), top1=top1)
    assert steps(tmp_path) == [2, 4, 5]


def test_the_best_is_known_after_a_restart(tmp_path: Path) -> None:
    checkpoints(tmp_path, keep_last=1).save(snapshot(1), top1=0.9)
    later = checkpoints(tmp_path, keep_last=1)
    later.restore("auto")
    for step in (2, 3):
        later.save(snapshot(step), top1=0.5)
    assert [(entry.step, entry.top1) for entry in later.entries()] == [(3, 0.5), (1, 0.9)]


def test_leftovers_of_a_dead_writer_are_ignored_and_then_removed(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    store.save(snapshot(1))
    leftover = tmp_path / "step-7"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert restored_step(tmp_path) == 1
    assert steps(tmp_path) == [1, 7]  # reading removes nothing: another rank may be the writer
    store.save(snapshot(2))
    assert steps(tmp_path) == [1, 2]


def damage_manifest(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"position": 2', '"position": 3'))


def flip_bit(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(directory: Path) -> None:
    os.truncate(directory / "optimizer.safetensors", 100)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (damage_manifest, "manifest.json does not match its sha256"),
        (flip_bit, "model.safetensors does not match its sha256"),
        (truncate, "optimizer.safetensors has 100 bytes"),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda d: (d / "manifest.json").unlink(), "never finished"),
        (lambda d: os.truncate(d / "manifest.json", 50), "manifest.json is cut off"),
    ],
)
def test_restores_past_a_damaged_checkpoint_and_logs_the_reason(
    tmp_path: Path, damage: object, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = checkpoints(tmp_path)
    for step in (1, 2):
        store.save(snapshot(step), top1=step / 10)
    damage(tmp_path / "step-2")  # type: ignore[operator]
    events: list[CheckpointReport] = []
    again = checkpoints(tmp_path, keep_last=1, keep_best=1, listener=events.append)
    restored = again.restore("auto")
    assert restored is not None
    assert_same(restored, snapshot(1))
    passed, read = events
    assert isinstance(passed, Skipped)
    assert expected in passed.reason
    assert isinstance(read, Restored)
    assert read.step == 1
    assert read.seconds > 0
    assert expected in caplog.text
    # Retention does not count the damaged one, whatever its manifest says, and its step can be written again.
    assert [entry.step for entry in again.entries()] == [1]
    again.save(snapshot(2, value=5.0))
    restored = checkpoints(tmp_path).restore("auto")
    assert restored is not None
    assert_same(restored, snapshot(2, value=5.0))


def test_saving_the_same_step_again_only_adds_the_score(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    store.save(snapshot(3))
    before = (tmp_path / "step-3" / "model.safetensors").stat().st_ino
    store.save(snapshot(3), top1=0.7)
    assert (tmp_path / "step-3" / "model.safetensors").stat().st_ino == before
    restored = checkpoints(tmp_path)
    assert restored.restore("auto") is not None
    assert restored.entries()[0].top1 == 0.7


def test_a_score_that_cannot_be_added_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    events: list[CheckpointReport] = []
    store = checkpoints(tmp_path, listener=events.append)
    store.save(snapshot(3))
    monkeypatch.setattr("podscale.runs.checkpoint.format.write_atomically", refuse)
    with refused("step 3", os.strerror(errno.ENOSPC), kind=PodscaleError, field=str(tmp_path / "step-3")):
        store.save(snapshot(3), top1=0.7)
    assert isinstance(events[1], Failed)
    assert events[1].disk_full
    assert restored_step(tmp_path) == 3


def test_refuses_another_runs_checkpoint_with_the_differences(tmp_path: Path) -> None:
    checkpoints(tmp_path).save(snapshot(1))
    other = RunIdentity({"train.global_batch": 512, "run.seed": 1}, "d" * 64, "e" * 16)
    with refused("train.global_batch: ", "256", "512", "class map", "data fingerprint") as refusal:
        checkpoints(tmp_path, other).restore("auto")
    assert "run.seed" not in refusal.text


def test_a_run_of_an_older_version_has_later_options_at_their_defaults() -> None:
    phases = [{"start": 3.0, "schedule": {"learning_rate": 0.5}, "weight_decay": 0.25}]
    config = RunConfig.model_validate({"train": {"epochs": 5, "phases": phases}})
    now = result_values(config)
    older = {name: value for name, value in now.items() if name != "input.interpolation"}
    phase = {name: value for name, value in now["train.phases"][0].items() if name != "global_batch"}
    phase["schedule"] = {name: value for name, value in phase["schedule"].items() if name != "warmup_power"}
    saved = RunIdentity({**older, "train.phases": [phase]}, "c", "f")
    assert RunIdentity(now, "c", "f").conflicts(saved) == []
    assert RunIdentity({**now, "input.interpolation": "bicubic"}, "c", "f").conflicts(saved)
    assert RunIdentity(now, "c", "f").conflicts(RunIdentity({**now, "removed": 1}, "c", "f"))
    other = {**phase, "weight_decay": 0.5}
    assert RunIdentity(now, "c", "f").conflicts(RunIdentity({**older, "train.phases": [other]}, "c", "f"))


def test_resume_never_refuses_an_existing_checkpoint(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    assert store.restore("never") is None
    store.save(snapshot(1))
    with refused("run.id", field="checkpoint.resume", got="never"):
        checkpoints(tmp_path).restore("never")


def test_starts_from_a_named_directory_until_the_run_has_its_own(tmp_path: Path) -> None:
    source = tmp_path / "source" / "checkpoints"
    store = checkpoints(source)
    for step in (1, 2):
        store.save(snapshot(step))
    own = tmp_path / "own" / "checkpoints"
    for name, expected in [("source", 2), ("source/checkpoints", 2), ("source/checkpoints/step-1", 1)]:
        restored = checkpoints(own).restore(str(tmp_path / name))
        assert restored is not None
        assert restored.step == expected
    checkpoints(own).save(snapshot(5))
    restored = checkpoints(own).restore(str(source))
    assert restored is not None
    assert restored.step == 5


def test_a_named_checkpoint_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with refused(field="checkpoint.resume", got=str(tmp_path / "nowhere")):
        checkpoints(tmp_path / "own").restore(str(tmp_path / "nowhere"))
    store = checkpoints(tmp_path / "own")
    for step in (1, 2):
        store.save(snapshot(step))
    with refused("(step-2)", field="checkpoint.resume", got=str(tmp_path / "own" / "step-1")):
        checkpoints(tmp_path / "own").restore(str(tmp_path / "own" / "step-1"))
    flip_bit(tmp_path / "own" / "step-2")
    with refused("sha256", field="checkpoint.resume", got=str(tmp_path / "own" / "step-2")):
        checkpoints(tmp_path / "own").restore(str(tmp_path / "own" / "step-2"))


def test_a_launch_that_was_taken_over_leaves_the_checkpoint_of_the_newer_one(tmp_path: Path) -> None:
    """The newer launch saves the same step while the files of the older one are written."""
    calls = []

    def fence() -> None:
        calls.append(None)
        if len(calls) == 2:
            checkpoints(tmp_path).save(snapshot(1))
        if len(calls) >= 2:
            raise LeaseLost

    store = checkpoints(tmp_path, asynchronous=True, fence=fence)
    store.save(snapshot(1))
    with pytest.raises(LeaseLost):
        store.wait()
    store.close()  # the error was raised once
    assert restored_step(tmp_path) == 1


def test_the_listener_gets_bytes_and_seconds_of_a_save(tmp_path: Path) -> None:
    events: list[CheckpointReport] = []
    checkpoints(tmp_path, listener=events.append).save(snapshot(4), top1=0.25)
    (saved,) = events
    assert isinstance(saved, Saved)
    assert (saved.step, saved.top1) == (4, 0.25)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "step-4").glob("*.safetensors"))
    assert saved.bytes == on_disk
    assert saved.seconds > 0


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """Without rights to mount a tmpfs, a limit on the file size replaces the full disk: a real error of the kernel."""
    events: list[CheckpointReport] = []
    store = checkpoints(tmp_path, asynchronous=True, listener=events.append)
    store.save(snapshot(1))
    store.wait()
    large = Snapshot(2, {"model/w": np.zeros(100_000, np.float32)}, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        store.save(large)
        with refused("step 2", os.strerror(errno.EFBIG), kind=PodscaleError):
            store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert steps(tmp_path) == [1]
    assert restored_step(tmp_path) == 1
    assert [type(event) for event in events] == [Saved, Failed]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_that_cannot_be_removed_is_reported(
    tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    events: list[CheckpointReport] = []
    store = checkpoints(tmp_path, asynchronous=asynchronous, listener=events.append, keep_last=1, keep_best=0)
    store.save(snapshot(1))
    store.wait()
    monkeypatch.setattr("podscale.runs.checkpoint.store.remove_checkpoint", refuse)
    with refused("step 2 ", os.strerror(errno.EACCES), kind=PodscaleError, field=str(tmp_path / "step-1")):
        store.save(snapshot(2))
        store.close()
    assert [type(event) for event in events] == [Saved, Failed]
    assert restored_step(tmp_path) == 2


WRITER = """
import sys
from pathlib import Path
import numpy as np
from podscale.runs.checkpoint import CheckpointStore, Retention, RunIdentity, Snapshot
identity = RunIdentity({}, "c", "f")
store = CheckpointStore(Path(sys.argv[1]), identity, Retention(2, 0), asynchronous=True)
store.restore("auto")
step = 0
while True:
    step += 1
    store.save(Snapshot(step, {f"model/{i}": np.full(30_000, step, np.float32) for i in range(20)}, {"step": step}))
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_after_a_kill_at_any_moment_the_newest_checkpoint_is_complete(tmp_path: Path, seed: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 3 + seed:
            break
    threading.Event().wait(np.random.default_rng(seed).uniform(0, 0.03))
    process.kill()
    process.wait()
    process.stdout.close()
    restored = checkpoints(tmp_path, RunIdentity({}, "c", "f")).restore("auto")
    assert restored is not None
    assert restored.step >= 1 + seed  # at least the one before the save in flight
    assert restored.meta == {"step": restored.step}
    for array in restored.arrays.values():
        np.testing.assert_array_equal(array, np.full(30_000, restored.step, np.float32))
