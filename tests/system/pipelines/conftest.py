"""Fixture: a server that forks the stages of pipelines."""

from collections.abc import Iterator

import pytest

from tests.support.task_server import TaskServer, serving_tasks


@pytest.fixture(scope="session")
def task_server() -> Iterator[TaskServer]:
    with serving_tasks() as server:
        yield server
