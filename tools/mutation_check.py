"""Change one formula or constant at a time and check that a test fails: `python -m tools.mutation_check [PART ...]`.

Each mutation replaces a text of one module as a forked child imports it, and runs the tests that should notice. No
source file changes. Tests of several ranks do not notice, because their ranks are no children of it. A mutation that no
test notices is reported, and the exit code is 1. The outcomes are kept in `tests/support/mutation_outcomes.md`, with
the first test that failed.
Constants of presets are changed, one at a time, by `test_preset_trajectories.py` in `tests/distributed/pytorch` and
`tests/jax`.

Args (of the command):
    PART: run only the mutations whose name contains one of these.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch  # noqa: F401 (imported once, before the forks)

ROOT = Path(__file__).resolve().parents[1]
OPTIM, EXTREME = "tests/unit/pytorch/optim/test_optim.py", "tests/unit/pytorch/optim/test_extreme.py"
PARITY, JAX_OPTIM = "tests/unit/pytorch/optim/test_torch_parity.py", "tests/jax/optim/test_optim.py"
SCHEDULES = "tests/unit/training/test_schedules.py"
PYTORCH, JAX = "podscale/pytorch/optim", "podscale/jax/optim"
NLCG_RATES = "podscale/training/nlcg_rates.py"
SHAMPOO, SECOND_ORDER = "tests/unit/pytorch/optim/test_shampoo.py", "tests/jax/optim/test_second_order.py"
MUON, MUON_TESTS = "podscale/training/muon.py", "tests/unit/pytorch/optim/test_muon.py"


class Mutation(NamedTuple):
    """Replacement of `old`, which occurs once in `path`, and the tests that notice it, as arguments of pytest."""

    name: str
    path: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "rate inside the buffer in the scaled form",
        f"{PYTORCH}/sgd.py",
        "return torch.ones_like(rate), rate * ratio",
        "return rate * ratio, torch.ones_like(rate)",
        f"{OPTIM} -k googles",
    ),
    Mutation(
        "rate inside the buffer in the scaled form, JAX",
        f"{JAX}/sgd.py",
        "return jnp.ones_like(rate), rate * ratio",
        "return rate * ratio, jnp.ones_like(rate)",
        f"{JAX_OPTIM} -k googles",
    ),
    Mutation(
        "rate outside of the buffer in the unscaled form",
        f"{PYTORCH}/sgd.py",
        "return rate * ratio, torch.ones_like(rate)",
        "return torch.ones_like(rate), rate * ratio",
        f"{OPTIM} -k sgd_with_the_rate",
    ),
    Mutation(
        "decay of the ratio missing with l2_in_loss",
        f"{PYTORCH}/lars.py",
        'if self._trust != "norm_of_sum":',
        'if self._trust == "sum_of_norms":',
        f"{OPTIM} -k googles",
    ),
    Mutation(
        "decay of the ratio missing with l2_in_loss, JAX",
        f"{JAX}/lars.py",
        'if self.trust != "norm_of_sum":',
        'if self.trust == "sum_of_norms":',
        f"{JAX_OPTIM} -k googles",
    ),
    Mutation(
        "norm of the gradient without the L2 term with l2_in_loss",
        f"{PYTORCH}/lars.py",
        'of_sum = self._trust != "sum_of_norms"',
        'of_sum = self._trust == "norm_of_sum"',
        f"{OPTIM} -k googles",
    ),
    Mutation(
        "norm of the gradient without the L2 term with l2_in_loss, JAX",
        f"{JAX}/lars.py",
        'gradients if self.trust == "sum_of_norms" else directions',
        'directions if self.trust == "norm_of_sum" else gradients',
        f"{JAX_OPTIM} -k googles",
    ),
    Mutation(
        "eps of LARS left out",
        f"{PYTORCH}/lars.py",
        "denominator = g + self._eps",
        "denominator = g",
        f"{OPTIM} -k googles",
    ),
    Mutation(
        "eps of LARS left out, JAX",
        f"{JAX}/lars.py",
        "denominator = g + self.eps",
        "denominator = g",
        f"{JAX_OPTIM} -k googles",
    ),
    Mutation(
        "decayed biases are scaled too",
        "podscale/training/param_layout.py",
        "adapts = is_treated or section.adapt_all",
        "adapts = decays or section.adapt_all",
        f"{OPTIM} -k neither_decay",
    ),
    Mutation(
        "biases decay without being asked",
        "podscale/training/param_layout.py",
        'section.decay_biases and parameter.role == "bias"',
        'parameter.role == "bias"',
        f"{OPTIM} -k neither_decay",
    ),
    Mutation(
        "released NLCG by the true displacement",
        f"{PYTORCH}/nlcg.py",
        'hyper.learning_rate * self.scalars["base_rate"] if self._is_released else self._old_rate',
        "self._old_rate",
        f"{EXTREME} -k released",
    ),
    Mutation(
        "released NLCG keeps the direction after it is taken back",
        f"{PYTORCH}/nlcg.py",
        "        if self._is_released:\n            self._move_and",
        "        if False:\n            self._move_and",
        f"{EXTREME} -k released",
    ),
    Mutation(
        "online compares before it updates",
        f"{PYTORCH}/nlcg.py",
        "average if self._updates_first else self._average",
        "self._average",
        f"{EXTREME} -k released",
    ),
    Mutation("c of Newton-Schulz negative", MUON, "-4.7750, 2.0315)", "-4.7750, -2.0315)", MUON_TESTS),
    Mutation("Muon scales wide matrices", MUON, "rows / columns))", "columns / rows))", MUON_TESTS),
    Mutation(
        "Muon decays at the matrices' rate",
        f"{PYTORCH}/muon.py",
        "1.0 - rates * hyper.weight_decay",
        "1.0 - hyper.learning_rate * hyper.weight_decay",
        MUON_TESTS,
    ),
    Mutation(
        "Muon orthogonalises the ends",
        MUON,
        "matrices if section.ends else matrices[1:-1]",
        "matrices",
        "tests/unit/training/test_muon.py",
    ),
    Mutation("decay of NLCG's loss 0.9 for 0.7", NLCG_RATES, "LOSS_DECAY = 0.7", "LOSS_DECAY = 0.9", EXTREME),
    Mutation(
        "NLCG compares every 4 steps",
        NLCG_RATES,
        "COMPARE_EVERY_STEPS = 5",
        "COMPARE_EVERY_STEPS = 4",
        EXTREME,
    ),
    Mutation("eps of NLCG 1e-4 for 1e-8", NLCG_RATES, "EPS = 1e-8", "EPS = 1e-4", f"{EXTREME} -k nlcg"),
    Mutation(
        "eps of TensorFlow's RMSProp beside the root",
        f"{PYTORCH}/adaptive.py",
        'if self._variant == "torch":\n            roots',
        "if True:\n            roots",
        f"{PARITY} -k rmsprop",
    ),
    Mutation(
        "TensorFlow's RMSProp begins at 0",
        f"{PYTORCH}/adaptive.py",
        'shard.zeros() if variant == "torch" else torch.ones_like(shard.zeros())',
        "shard.zeros()",
        f"{PARITY} -k rmsprop",
    ),
    Mutation(
        "Neumann moves by the previous buffer",
        f"{PYTORCH}/neumann.py",
        'if section.moves_by == "previous":',
        'if section.moves_by == "current":',
        f"{EXTREME} -k nesterov",
    ),
    Mutation(
        "gamma of Neumann swapped with 1 - gamma",
        f"{PYTORCH}/neumann.py",
        "1.0 - section.gamma, 0.0)",
        "section.gamma, 0.0)",
        f"{EXTREME} -k neumann_follows",
    ),
    Mutation(
        "momentum correction inverted",
        "podscale/training/schedules.py",
        "momenta * rates / np.where(corrected, rates_before, 1.0)",
        "momenta * rates_before / np.where(corrected, rates, 1.0)",
        f"{SCHEDULES} -k correction",
    ),
    Mutation(
        "decay from the start of the schedule",
        "podscale/training/schedules.py",
        'begin = warmup if schedule.decay_from == "warmup" else 0.0',
        "begin = 0.0",
        "tests/unit/pipelines/test_presets.py -k yings_runs",
    ),
    Mutation(
        "running statistics keep 0.1 of the old",
        "podscale/pytorch/batch_norm/layer.py",
        "self.training, self.momentum, self.eps)",
        "self.training, 1 - self.momentum, self.eps)",
        "tests/distributed/pytorch/test_preset_trajectories.py -k adya2018-cifar100-16k",
    ),
    Mutation(
        "Adam's mean without its correction",
        f"{PYTORCH}/adaptive.py",
        "torch._foreach_mul_(group.gradients, first)",
        "torch._foreach_mul_(group.gradients, 1.0)",
        f"{PARITY} -k adam",
    ),
    Mutation(
        "Adam's root without its correction",
        f"{PYTORCH}/adaptive.py",
        "torch._foreach_mul_(group.gradients, second)",
        "torch._foreach_mul_(group.gradients, 1.0)",
        f"{PARITY} -k adam",
    ),
    Mutation(
        "AdamW decays inside of the moments",
        f"{PYTORCH}/adaptive.py",
        "if not self._decoupled:",
        "if True:",
        f"{PARITY} -k adam",
    ),
    Mutation(
        "Adam's mean without its correction, JAX",
        f"{JAX}/adaptive.py",
        "divide_or_zero(first * mean,",
        "divide_or_zero(mean,",
        f"{JAX_OPTIM} -k adam_of",
    ),
    Mutation(
        "AdamW decays inside of the moments, JAX",
        f"{JAX}/adaptive.py",
        "if not self.decoupled:",
        "if True:",
        f"{JAX_OPTIM} -k adam_of",
    ),
    Mutation(
        "LAMB's ratio inverted",
        f"{PYTORCH}/adaptive.py",
        "torch.where((w > 0) & (u > 0), w / u, 1.0)",
        "torch.where((w > 0) & (u > 0), u / w, 1.0)",
        f"{OPTIM} -k lamb",
    ),
    Mutation(
        "LAMB scales batch norm and biases",
        f"{PYTORCH}/adaptive.py",
        "torch.where(self._shard.uses_trust_ratio, ratio, 1.0)",
        "ratio",
        f"{OPTIM} -k lamb",
    ),
    Mutation(
        "LAMB also lengthens short gradients",
        f"{PYTORCH}/adaptive.py",
        "factor = 1.0 / (total / self._clip_norm).clamp(min=1.0)",
        "factor = 1.0 / (total / self._clip_norm)",
        f"{OPTIM} -k lamb",
    ),
    Mutation(
        "LAMB's ratio inverted, JAX",
        f"{JAX}/adaptive.py",
        "jnp.where((w > 0) & (u > 0), w / u, 1.0)",
        "jnp.where((w > 0) & (u > 0), u / w, 1.0)",
        f"{JAX_OPTIM} -k lamb_follows",
    ),
    Mutation(
        "LAMB scales batch norm and biases, JAX",
        f"{JAX}/adaptive.py",
        "jnp.where(shard.uses_trust_ratio, ratio, 1.0)",
        "ratio",
        f"{JAX_OPTIM} -k lamb_follows",
    ),
    Mutation(
        "TensorFlow's RMSProp begins at 0, JAX",
        f"{JAX}/adaptive.py",
        '1.0 if self.variant == "tensorflow" else 0.0',
        "0.0",
        f"{JAX_OPTIM} -k rmsprop_of",
    ),
    Mutation(
        "Shampoo's length of the graft inverted",
        f"{PYTORCH}/shampoo.py",
        "torch.where(norms > 0, graft_norms / norms, 1.0)",
        "torch.where(norms > 0, norms / graft_norms, 1.0)",
        f"{SHAMPOO} -k oracle",
    ),
    Mutation(
        "Shampoo's statistics keep 1 - beta2",
        f"{PYTORCH}/shampoo_factors.py",
        "beta=beta2, alpha=weight)",
        "beta=weight, alpha=beta2)",
        f"{SHAMPOO} -k oracle",
    ),
    Mutation(
        "Shampoo's root of half the power",
        f"{PYTORCH}/shampoo_factors.py",
        "self._section.exponent or 2 * len(",
        "self._section.exponent or len(",
        f"{SHAMPOO} -k oracle",
    ),
    Mutation(
        "eps of Shampoo left out of the matrices",
        f"{PYTORCH}/shampoo_factors.py",
        "/ 2 + eps * torch.eye(",
        "/ 2 + 0.0 * torch.eye(",
        f"{SHAMPOO} -k oracle",
    ),
    Mutation(
        "Shampoo's length of the graft inverted, JAX",
        f"{JAX}/shampoo.py",
        "graft_norms / norms, 1.0)",
        "norms / graft_norms, 1.0)",
        f"{SECOND_ORDER} -k shampoo_follows",
    ),
    Mutation(
        "Shampoo's statistics keep 1 - beta2, JAX",
        f"{JAX}/shampoo_factors.py",
        "new = beta2 * old + weight *",
        "new = weight * old + beta2 *",
        f"{SECOND_ORDER} -k shampoo_follows",
    ),
    Mutation(
        "Neumann's time between resets does not double",
        f"{PYTORCH}/neumann.py",
        "copy_where_finite(reset, self._period, 2.0 * self._period)",
        "copy_where_finite(reset, self._period, self._period)",
        f"{EXTREME} -k neumann_follows",
    ),
    Mutation(
        "a reset of Neumann keeps the buffer",
        f"{PYTORCH}/neumann.py",
        "torch.where(is_neumann, torch.where(reset, 0.0, mu), 1.0)",
        "torch.where(is_neumann, mu, 1.0)",
        f"{EXTREME} -k neumann_follows",
    ),
    Mutation(
        "a held reset of Neumann moves the weights",
        f"{PYTORCH}/neumann.py",
        "moves, is_neumann = finite & ~held,",
        "moves, is_neumann = finite,",
        f"{EXTREME} -k neumann_follows",
    ),
    Mutation(
        "Neumann's regulariser acts at a reset",
        f"{PYTORCH}/neumann.py",
        "is_neumann & ~first & ~reset,",
        "is_neumann & ~first,",
        f"{EXTREME} -k neumann_follows",
    ),
    Mutation(
        "Neumann's beta without the number of variables",
        f"{PYTORCH}/neumann.py",
        "section.beta * sum(each.size for each in shard.param_slices)",
        "section.beta",
        f"{EXTREME} -k neumann_follows",
    ),
    Mutation(
        "Neumann's time between resets does not double, JAX",
        f"{JAX}/neumann.py",
        "jnp.where(reset, 2.0 * period, period)",
        "period",
        f"{SECOND_ORDER} -k neumann_follows",
    ),
    Mutation(
        "a reset of Neumann keeps the buffer, JAX",
        f"{JAX}/neumann.py",
        "jnp.where(reset, 0.0, mu) * m",
        "mu * m",
        f"{SECOND_ORDER} -k neumann_follows",
    ),
    Mutation(
        "gamma of Neumann swapped with 1 - gamma, JAX",
        f"{JAX}/neumann.py",
        "section.gamma * begun + (1.0 - section.gamma) * new",
        "(1.0 - section.gamma) * begun + section.gamma * new",
        f"{SECOND_ORDER} -k neumann_follows",
    ),
    Mutation(
        "Polak-Ribiere without the previous descent, JAX",
        f"{JAX}/nlcg.py",
        "(rho - r_s_old)",
        "rho",
        f"{SECOND_ORDER} -k nlcg_follows",
    ),
    Mutation(
        "released NLCG by the true displacement, JAX",
        f"{JAX}/nlcg.py",
        'hyper.learning_rate * scalars["base_rate"] if is_released else scalars["moved"]',
        'scalars["moved"]',
        f"{SECOND_ORDER} -k nlcg_follows",
    ),
    Mutation(
        "Muon decays at the matrices' rate, JAX",
        f"{JAX}/muon.py",
        "1.0 - rates * hyper.weight_decay",
        "1.0 - hyper.learning_rate * hyper.weight_decay",
        "tests/jax/optim/test_muon.py -k oracle",
    ),
    Mutation(
        "Muon without Nesterov's form, JAX",
        f"{JAX}/muon.py",
        "if self.nesterov:",
        "if False:",
        "tests/jax/optim/test_muon.py -k oracle",
    ),
)


class MutatedSource(Loader, MetaPathFinder):
    """Finder and loader of one module, with a replacement in its source."""

    def __init__(self, mutation: Mutation) -> None:
        self._path = ROOT / mutation.path
        self._module = mutation.path.removesuffix(".py").replace("/", ".")
        text = self._path.read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, f"{mutation.name}: the text is not in {mutation.path} once"
        self._source = text.replace(mutation.old, mutation.new)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_loader(name, self, origin=str(self._path)) if name == self._module else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


class FirstFailure:
    """Plugin of pytest that writes the name of the first failing test to a file descriptor."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self._pipe, f"{report.nodeid}\n".encode())


def noticing_test(mutation: Mutation) -> str:
    """Return the first test that fails with the mutation, which only a forked child sees; "" if none does."""
    finder = MutatedSource(mutation)
    arguments = ["-q", "-x", "-n0", "-p", "no:cacheprovider", *mutation.tests.split()]
    if mutation.tests.startswith("tests/jax/"):
        arguments.append("--noconftest")  # its conftest runs tests in a process that would import the original
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        sys.meta_path.insert(0, finder)
        with Path(os.devnull).open("w", encoding="utf-8") as sink, redirect_stdout(sink), redirect_stderr(sink):
            code = pytest.main(arguments, plugins=[FirstFailure(writer)])
        os._exit(int(code))
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        failures = pipe.read().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), f"{mutation.name}: pytest {mutation.tests} ended with exit code {code}"
    return failures[0] if failures else ""


OUTCOMES = ROOT / "tests" / "support" / "mutation_outcomes.md"
OUTCOMES_HEAD = """# Outcomes of the mutation check

Each formula that was changed, and the first test that failed with the change. `make mutation-check` runs all and writes
this list; `python -m tools.mutation_check PART` runs those whose names contain PART.

| mutation | file | noticed by |
|---|---|---|
"""
NOT_RUN, MISSED = "not run yet", "**no test**"


def read_outcomes() -> dict[str, str]:
    """Return the last outcome of each mutation by name."""
    lines = OUTCOMES.read_text(encoding="utf-8").splitlines() if OUTCOMES.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {name: noticed for name, _, noticed in rows[1:]}


def outcomes_page(outcomes: Mapping[str, str]) -> str:
    rows = (f"| {each.name} | `{each.path}` | {outcomes.get(each.name, NOT_RUN)} |\n" for each in MUTATIONS)
    return OUTCOMES_HEAD + "".join(rows)


def main(parts: list[str]) -> int:
    """Run the mutations, print and keep each one's outcome, and return the exit code."""
    chosen = [each for each in MUTATIONS if not parts or any(part in each.name for part in parts)]
    missed, outcomes = 0, read_outcomes()
    for mutation in chosen:
        test = noticing_test(mutation)
        missed += not test
        outcomes[mutation.name] = f"`{test}`" if test else MISSED
        OUTCOMES.write_text(outcomes_page(outcomes), encoding="utf-8")
        print(f"{'noticed' if test else 'MISSED '}  {mutation.name} ({test or mutation.tests})", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
