"""Metrics for the tests of the server's parts."""

import pytest
from prometheus_client import CollectorRegistry

from podscale.serving.metrics import ServingMetrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> ServingMetrics:
    return ServingMetrics(registry, model="small", process=0)
