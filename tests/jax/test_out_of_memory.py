"""Advice about a step that does not fit the memory of a device, by the batch phase of the step."""

import jax
import pytest

from podscale.config import RunConfig
from podscale.config.batch_phases import batch_phases
from podscale.jax.out_of_memory import explain_training_memory
from tests.support.refusals import refused

SHORT = "Ran out of memory in memory space hbm. Used 20.00G of 10.00G hbm. Exceeded hbm capacity by 10.00G."
PHASES = ({"start": 2, "global_batch": 64}, {"start": 4, "accumulation": 2}, {"start": 6, "global_batch": 32})


@pytest.mark.parametrize(
    ("phase", "field", "words"),
    [
        (0, "train.global_batch", ["now 16, to about 8", "train.accumulation, now 1"]),
        (1, "train.phases.0.global_batch", ["now 64, to about 32", "train.accumulation, now 1"]),
        (2, "train.phases.0.global_batch", ["now 64, to about 32", "train.phases.1.accumulation, now 2"]),
        (3, "train.phases.2.global_batch", ["now 32, to about 16", "train.phases.1.accumulation, now 2"]),
    ],
)
def test_the_options_of_the_phase_are_named(phase: int, field: str, words: list[str]) -> None:
    config = RunConfig.model_validate({"train": {"global_batch": 16, "phases": PHASES}})
    with refused(field=field) as refusal, explain_training_memory(config, batch_phases(config.train)[phase], 4):
        raise jax.errors.JaxRuntimeError(SHORT)
    for word in words:
        assert word in refusal.error.hint
    assert f"Lower {field}, now" in refusal.error.hint
