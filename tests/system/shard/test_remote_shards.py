"""A run whose shards are behind a URL: trained, evaluated and reported through the node-local cache."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from podscale.data import native
from podscale.data.decode_index import SUFFIX
from tests.support.commands import set_options

OPTIONS = [
    "run.id=remote",
    "train.epochs=1",
    "train.schedule.warmup_epochs=0",
    "model.width=4",
    "launch.processes=1",
    "checkpoint.every_epochs=0",
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Log nothing: the test reads the output of podscale."""


def podscale(directory: Path, *arguments: str, options: list[str] = OPTIONS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "podscale", *arguments, *set_options(*options)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """URL and directory of a shard set of the digits."""
    home = tmp_path / "bucket"
    home.mkdir()
    done = podscale(home, "shard", "digits")
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.split()[-1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(home)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/{directory}", home / directory
    server.shutdown()


@pytest.mark.slow
def test_a_run_on_remote_shards(served: tuple[str, Path], tmp_path: Path) -> None:
    url, directory = served
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    options = [*OPTIONS, f"input.cache_dir={tmp_path / 'cache'}"]
    for stage in ("train", "evaluate", "report"):
        done = podscale(elsewhere, stage, "digits", "--shard-set", url, options=options)
        assert done.returncode == 0, done.stderr
    run = elsewhere / "runs" / "remote"
    assert json.loads((run / "evaluation.json").read_text())["figures"]["samples"] == 359
    assert (run / "report.html").exists()
    assert not (elsewhere / "datasets").exists()
    shards = sorted(path.name for path in directory.glob("*/*.tar"))
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*.tar")) == shards
    indexes = sorted(path.name for path in directory.glob(f"*/*{SUFFIX}"))
    assert sorted(path.name for path in (tmp_path / "cache").rglob(f"*{SUFFIX}")) == indexes
    assert bool(indexes) == native.is_installed()


def test_no_set_at_the_given_place(tmp_path: Path) -> None:
    done = podscale(tmp_path, "train", "digits", "--shard-set", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert str(tmp_path / "nothing") in done.stderr
    assert "--shard-set" in done.stderr
