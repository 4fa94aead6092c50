"""Queue of collectives, and the pipeline that uses it: order, errors and waits."""

import threading
import time
from functools import partial

import pytest
import torch

from podscale.pytorch.comm_queue import build_comm_queue, run_pipelined


def test_operations_run_in_order_and_a_wait_raises_the_error_of_its_operation() -> None:
    queue, done = build_comm_queue(torch.device("cpu")), list[int]()

    def operation(number: int) -> None:
        time.sleep(0.01 * (5 - number))
        done.append(number)
        if number == 2:
            raise BrokenPipeError

    waits = [queue.submit(partial(operation, number)) for number in range(5)]
    waits[0]()
    assert done[:1] == [0]
    with pytest.raises(BrokenPipeError):
        waits[2]()
    waits[4]()
    assert done == [0, 1, 2, 3, 4]
    queue.close()


@pytest.mark.parametrize("slices", [1, 2, 5])
def test_a_slice_runs_its_phases_in_order_and_the_axes_overlap(slices: int) -> None:
    calls: list[tuple[str, int]] = []
    second_inward = threading.Event()

    def inward(number: int) -> None:
        calls.append(("inward", number))
        if number == min(1, slices - 1):
            second_inward.set()

    def across(number: int) -> None:
        assert second_inward.wait(60)
        calls.append(("across", number))

    def outward(number: int) -> None:
        calls.append(("outward", number))

    queue = build_comm_queue(torch.device("cpu"))
    run_pipelined(queue, slices, inward, across, outward)
    for number in range(slices):
        assert [name for name, of_slice in calls if of_slice == number] == ["inward", "across", "outward"]
    for name in ("inward", "across", "outward"):
        assert [number for called, number in calls if called == name] == list(range(slices))
    calls.clear()
    run_pipelined(queue, slices, inward, across, None)
    assert calls[-1] == ("across", slices - 1), "run_pipelined returned before the last slice was done"
