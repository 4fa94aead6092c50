"""kfp's short cut keeps its errors, and it is in place."""

import inspect

import pytest
from kfp import dsl
from kfp.dsl import pipeline_task

from tests.support import kfp_stack


@dsl.component
def nothing() -> None:
    pass


@dsl.pipeline
def inner() -> None:
    nothing()


def test_the_error_of_kfp_names_the_method() -> None:
    """As by `inspect.stack`, which is replaced because kfp was imported before this test."""
    assert pipeline_task.inspect.stack is kfp_stack.caller_stack
    assert pipeline_task.inspect.signature is inspect.signature

    def outer() -> None:
        inner().set_memory_limit("1G")

    with pytest.raises(ValueError, match="set_memory_limit"):
        dsl.pipeline(outer)  # compiles it
