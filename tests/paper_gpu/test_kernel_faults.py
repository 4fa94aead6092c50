"""Triton kernels in the interpreter: planted faults, and a training by the kernels of 1x1 convolutions."""

import json
from functools import cache

import pytest
import torch

from tests.support.kernel_mutants import MUTANTS
from tests.support.triton_kernels import interpret
from tests.unit.pytorch.batch_norm import test_gemm

LIMITS = {"norm": 2e-6, "pool": 2e-6, "momentum": 1e-6, "crops": 0.5}
"""Errors that the kernels without a fault stay below: relative, and of crops in grey levels, which are integers."""


@cache
def errors_of(subject: str) -> dict[str, dict[str, float]]:
    """Return the error of each case by mutant; computed for all mutants at once, because Triton starts slowly."""
    found: dict[str, dict[str, float]] = json.loads(interpret("-m", "tests.support.kernel_mutants", subject))
    return found


def is_exact(subject: str, case: str, error: float) -> bool:
    return test_gemm.is_exact(case, error) if subject == "gemm" else error < LIMITS[subject]


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("subject", "mutant"),
    [(subject, mutant) for subject, mutants in MUTANTS.items() for mutant in ("none", *mutants)],
)
def test_a_fault_of_a_kernel_is_found(subject: str, mutant: str) -> None:
    errors = errors_of(subject)[mutant]
    wrong = [case for case, error in errors.items() if not is_exact(subject, case, error)]
    assert bool(wrong) is (mutant != "none"), errors


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
