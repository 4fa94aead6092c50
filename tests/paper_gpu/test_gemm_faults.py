"""Kernels of 1x1 convolutions in Triton's interpreter: planted faults, and a training."""

import json

import pytest
import torch

from tests.support.triton_kernels import interpret
from tests.unit.pytorch.batch_norm.test_gemm import is_exact


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.timeout(900)
def test_planted_faults_are_found() -> None:
    errors = json.loads(interpret("-m", "tests.support.gemm_mutants"))
    assert len(errors) == 24
    for mutant, cases in errors.items():
        found = [case for case, error in cases.items() if not is_exact(case, error)]
        assert bool(found) is (mutant != "none"), mutant


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.timeout(900)
def test_twenty_steps_on_the_digits_follow_separate_operations() -> None:
    """In fp32 to 5e-6; in bf16 as close as separate operations in bf16 are to those in fp32."""
    found = json.loads(interpret("-m", "tests.support.gemm_digits"))
    losses = {name: torch.tensor(values) for name, values in found.items()}
    assert (losses["fp32, kernels"] - losses["fp32"]).abs().max() < 5e-6
    rounding = (losses["bf16"] - losses["fp32"]).abs().max()
    assert 0 < (losses["bf16, kernels"] - losses["bf16"]).abs().max() < 1.5 * rounding
    assert losses["fp32"][-5:].mean() < losses["fp32"][:5].mean()
