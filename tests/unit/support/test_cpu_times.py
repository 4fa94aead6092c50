"""CPU times of test files include the processes that still run."""

import subprocess
import sys

from tests.support.cpu_times import Times

BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"


def test_a_running_process_counts_once() -> None:
    before = Times().cpu
    shell = ["sh", "-c", '"$@"; exit 0', "sh", sys.executable, "-c", BUSY]  # the busy process is a grandchild
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        running = Times().cpu - before
        process.communicate(b"\n")
    assert 0.25 < running < 5
    assert Times().cpu - before >= running - 0.05  # ticks of 10 ms
