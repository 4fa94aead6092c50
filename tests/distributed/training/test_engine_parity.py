"""Both engines train equally: the same weights on the same batches of digits, on four ranks each.

benchmarks/parity runs more cases; benchmarks/results/parity-digits.md has its table.
"""

from pathlib import Path

import pytest

from benchmarks.parity.__main__ import ResultStore, train_missing
from benchmarks.parity.cases import TASKS, Case
from benchmarks.parity.engines import ENGINES
from benchmarks.parity.table import TOLERANCE, relative_differences, table
from tests.support.xla import QUICK_XLA

STEPS = 6
CASES = [
    pytest.param(Case("sgd", 1, sharded=False), marks=pytest.mark.slow),  # tests/jax/test_trainer.py has plain steps
    Case("lars", 4, sharded=True),
]


@pytest.mark.timeout(900)  # JAX compiles a step, PyTorch starts four processes
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_losses_of_the_first_steps_agree(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", QUICK_XLA)
    store = ResultStore(tmp_path, "digits", STEPS, "code")

    def train() -> None:
        train_missing(TASKS["digits"], [case], 1, STEPS, tmp_path, "digits", store)

    train()
    torchs, jaxs = (store.get(case, engine, 0) for engine in ENGINES)
    assert torchs is not None
    assert jaxs is not None
    assert len(torchs.losses) == STEPS
    assert len(set(torchs.losses)) == STEPS
    assert max(relative_differences(torchs, jaxs)) < TOLERANCE
    assert jaxs.top1 == pytest.approx(torchs.top1, abs=0.02)
    assert any(f"| {case.group} |" in line for line in table({case: {"pytorch": [torchs], "jax": [jaxs]}}))

    monkeypatch.setattr("benchmarks.parity.__main__.ENGINES", dict.fromkeys(ENGINES))
    train()  # stored results are not trained again
