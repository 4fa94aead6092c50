"""A pipeline's launcher in contrast to `podscale submit --wait`."""

import pytest

from podscale import config
from podscale.kubernetes import run_stage as module
from podscale.kubernetes.retry import RetryPolicy


@pytest.mark.parametrize(("pipeline", "seconds"), [(True, 7200.0), (False, 1800.0)])
def test_a_pipelines_launcher_bears_an_outage_as_long_as_its_stage_may_take(
    monkeypatch: pytest.MonkeyPatch, pipeline: bool, seconds: float
) -> None:
    policies: list[RetryPolicy] = []

    def connect(choice: object, *, policy: RetryPolicy, notify: object) -> None:
        policies.append(policy)
        raise ConnectionError

    monkeypatch.setattr(module, "connect_cluster", connect)
    with pytest.raises(ConnectionError):
        module.run_stage(config.load(None, ["launch.time_limit_hours=2"]), "train", pipeline=pipeline)
    assert [policy.deadline for policy in policies] == [seconds]
