"""kfp's short cut keeps its errors."""

import inspect

import pytest

from tests.support import kfp_stack


def test_the_error_of_kfp_names_the_method() -> None:
    from kfp import dsl
    from kfp.dsl import pipeline_task

    kfp_stack.pytest_runtest_setup()  # as before the next test
    assert pipeline_task.inspect.stack is kfp_stack.caller_stack
    assert pipeline_task.inspect.signature is inspect.signature

    @dsl.component
    def nothing() -> None:
        pass

    @dsl.pipeline
    def inner() -> None:
        nothing()

    def outer() -> None:
        inner().set_memory_limit("1G")

    with pytest.raises(ValueError, match="set_memory_limit"):
        dsl.pipeline(outer)  # compiles it
