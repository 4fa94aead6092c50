"""Named waits for other ranks: an error carries the name of its wait, and another thread can read the current one."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import podscale
from podscale.distributed import waits
from podscale.distributed.waits import current_wait, wait_of, waiting_for, waiting_for_bucket


def lose() -> None:
    raise RuntimeError("connection closed by peer")


def name_of(wait: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        wait()
    return wait_of(caught.value)


def test_an_error_carries_the_innermost_wait() -> None:
    def nested() -> None:
        with waiting_for(waits.OPTIMIZER):
            with waiting_for(waits.BARRIER):
                pass  # finished before the error
            with waiting_for(waits.CHECKPOINT):
                lose()

    assert name_of(nested) == waits.CHECKPOINT
    assert name_of(waiting_for(waits.STEP_STATUS)(lose)) == waits.STEP_STATUS
    assert name_of(lose) == ""
    assert current_wait() == ""


def test_an_error_of_a_helper_thread_keeps_its_name_in_the_thread_that_receives_it() -> None:
    def in_queue() -> None:
        with waiting_for_bucket(3):
            lose()

    def main() -> None:
        with ThreadPoolExecutor(1) as queue, waiting_for(waits.GRADIENTS):
            queue.submit(in_queue).result()

    assert name_of(main) == "the average of gradient bucket 3"


def test_an_error_of_an_autograd_hook_keeps_its_name_through_backward() -> None:
    def hook(parameter: torch.Tensor) -> None:
        with waiting_for(waits.BATCH_NORM):
            lose()

    weight = torch.ones(1, requires_grad=True)
    weight.register_post_accumulate_grad_hook(hook)

    def backward() -> None:
        with waiting_for(waits.GRADIENTS):
            (2 * weight).sum().backward()

    assert name_of(backward) == waits.BATCH_NORM


def test_another_thread_reads_what_the_main_thread_waits_for() -> None:
    with ThreadPoolExecutor(1) as heartbeat:
        with waiting_for(waits.EVALUATION):
            with waiting_for(waits.BARRIER):
                assert heartbeat.submit(current_wait).result() == waits.BARRIER
            assert heartbeat.submit(current_wait).result() == waits.EVALUATION
        assert heartbeat.submit(current_wait).result() == ""


def test_a_helper_threads_wait_is_read_while_the_main_thread_has_none() -> None:
    begun, over = threading.Event(), threading.Event()

    @waiting_for(waits.GRADIENTS)
    def wait() -> None:
        begun.set()
        over.wait(10)

    with ThreadPoolExecutor(1) as queue:
        queue.submit(wait)
        begun.wait(10)
        assert current_wait() == waits.GRADIENTS
        with waiting_for(waits.STEP_STATUS):
            assert current_wait() == waits.STEP_STATUS  # the main thread's comes first
        over.set()
    assert current_wait() == ""


@pytest.mark.parametrize("path", ["pytorch/control.py", "pytorch/allreduce/flat.py", "jax/world.py", "elsewhere.py"])
def test_a_wait_does_not_depend_on_file_names(path: str) -> None:
    """Only explicit names count, so that any module may be renamed or moved."""
    file = Path(podscale.__file__).parent / path
    names = {"lose": lose, "current_wait": current_wait, "waiting_for": waiting_for}
    code = "def unnamed():\n    assert current_wait() == ''\n    lose()\n\nnamed = waiting_for('a barrier')(lose)\n"
    exec(compile(code, str(file), "exec"), names)
    assert name_of(names["unnamed"]) == ""
    assert name_of(names["named"]) == "a barrier"


def test_a_wait_is_the_same_object_each_time() -> None:
    assert waiting_for("a barrier") is waiting_for("a barrier")
    assert waiting_for_bucket(1) is waiting_for_bucket(1)
