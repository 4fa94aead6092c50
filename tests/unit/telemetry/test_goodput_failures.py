"""Goodput of runs whose nodes fail at published rates, against the analytic value."""

import pytest

from benchmarks.failures.model import LLAMA_3, RSC_1, TOLERANCE, FakeRun
from benchmarks.failures.simulation import FleetResult, simulate, simulate_fleet

HOURS = 72.0


@pytest.fixture(scope="module", params=[6, 180], ids=["a checkpoint a minute", "two an hour"])
def large(request: pytest.FixtureRequest) -> FleetResult:
    """Six runs of 16,384 GPUs at the rate of Llama 3's training."""
    return simulate_fleet(FakeRun(2048, LLAMA_3, checkpoint_steps=request.param), 6, HOURS)


def test_goodput_is_the_analytic_value(large: FleetResult) -> None:
    assert large.failures > 100
    assert abs(large.difference) < TOLERANCE


def test_all_simulated_time_has_a_state(large: FleetResult) -> None:
    assert large.wall_seconds == pytest.approx(6 * HOURS * 3600)


def test_lost_work_and_gaps_are_counted(large: FleetResult) -> None:
    """A failure costs half a checkpoint interval on average, and the time until all pods run again."""
    run = large.run
    repeated = sum(state.redone_steps for state in large.states) * run.step_seconds
    assert repeated == pytest.approx(large.failures * run.checkpoint_steps * run.step_seconds / 2, rel=0.25)
    assert large.seconds("redo") + large.seconds("compile") == pytest.approx(repeated, rel=0.15)
    assert large.seconds("recovery") == pytest.approx(large.failures * run.replace_seconds, rel=0.1)


def test_every_failure_of_a_training_is_a_restart() -> None:
    state, simulation = simulate(FakeRun(64, RSC_1, checkpoint_steps=180), 30 * 24, seed=1)
    assert simulation.failures > 5
    assert state.launch == 1 + simulation.failures  # none of them fell into another's recovery
    assert state.restarts["lost_rank"] == simulation.failures


def test_a_run_without_failures_loses_only_its_start_and_its_saves() -> None:
    run = FakeRun(1, 1e-12)
    state, simulation = simulate(run, HOURS, seed=0)
    assert simulation.failures == 0
    saves = state.step // run.checkpoint_steps
    assert state.seconds["checkpoint_save"] == pytest.approx(saves * run.save_seconds)
    assert state.seconds["init"] == pytest.approx(run.start_seconds)
    assert state.seconds["redo"] == 0


def test_the_best_interval_is_better_than_others() -> None:
    run = FakeRun(2048, LLAMA_3)
    best = run.best_checkpoint_steps()
    goodputs = [
        FakeRun(2048, LLAMA_3, checkpoint_steps=steps).analytic_goodput() for steps in (best // 3, best, best * 3)
    ]
    assert max(goodputs) == goodputs[1]
