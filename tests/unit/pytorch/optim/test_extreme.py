"""NLCG and the Neumann optimizer follow float64 oracles, on one rank and on several with a sharded step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from podscale.config.optimizer import NeumannSection, NlcgSection
from podscale.pytorch.optim import LookaheadOptimizer, Neumann, Nlcg, Optimizer, ParamShard, Sgd
from podscale.pytorch.optim.nlcg import LossRateControl
from tests.support.extreme import NORMS, bowl, loss, ml_ncg_oracle, neumann_oracle, nlcg_oracle, table_row
from tests.support.flat_share import FlatArrays, hyper, in_turns
from tests.support.optimizer_oracles import DECAYS, EVERYTHING, STEPS, Values, rate, start

PER_EPOCH = 10.0
DECAY = 1e-2


def trained(
    build: Callable[[ParamShard], Optimizer], ranks: int, adapts: dict[str, bool] = DECAYS
) -> tuple[FlatArrays, list[Optimizer]]:
    """Return the arrays and each rank's optimizer after all steps on a quadratic loss."""
    arrays = FlatArrays(start(), DECAYS, adapts, norms=NORMS)
    rules = [build(share) for share in arrays.shares(ranks)]
    for step in range(STEPS):
        arrays.put(arrays.gradients, bowl(arrays.take(arrays.weights), step))
        row, here = hyper(rate(step), decay=DECAY, loss=loss(step)), torch.tensor(True)
        assert all(in_turns([partial(rule.step, row, here) for rule in rules]))
    return arrays, rules


def near(found: Values, want: Values, within: float) -> None:
    """Assert equality within a fraction of the largest change of each array."""
    begun = start()
    for name, value in want.items():
        scale = np.abs(value - begun[name]).max()
        np.testing.assert_allclose(found[name], value, rtol=0, atol=within * scale, err_msg=name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({}, {}),
        ({"beta": "polak_ribiere", "step": "online"}, {}),
        ({"step": "none", "restart_every": 7, "forget_every": 11}, {"restart": 7, "forget": 11}),
        (
            {"tolerance": 0.5, "lars_coefficient": 0.05, "norm_gradient_scale": 0.01},
            {"tolerance": 0.5, "lars": 0.05, "norm_scale": 0.01},
        ),
    ],
)
def test_nlcg_follows_its_oracle(options: dict[str, Any], own: dict[str, Any], ranks: int) -> None:
    section = NlcgSection(**options)
    arrays, rules = trained(lambda share: Nlcg(share, section), ranks)
    want, base = nlcg_oracle(DECAY, DECAYS, beta=section.beta, mode=section.step, **own)
    near(arrays.take(arrays.weights), want, 1e-3)
    for rule in rules:
        assert rule.scalars["base_rate"].item() == pytest.approx(base, rel=1e-5)
        assert all(torch.equal(rule.scalars[name], value) for name, value in rules[0].scalars.items())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("options", "adapts", "own"),
    [
        ({}, DECAYS, {}),
        ({"beta": "polak_ribiere", "step": "online"}, DECAYS, {"update_rule": "PR", "line_search": "Online"}),
        ({"step": "online", "lars_coefficient": 0.05}, EVERYTHING, {"line_search": "Online", "lars_lr": 0.05}),
    ],
)
def test_the_released_variant_of_nlcg_follows_the_authors_program(
    options: dict[str, Any], adapts: dict[str, bool], own: dict[str, Any], ranks: int
) -> None:
    """Over steps that change the rate, take directions back and restore the rate; it differs from our variant."""
    section = NlcgSection(variant="released", **options)
    arrays, rules = trained(lambda share: Nlcg(share, section), ranks, adapts)
    want, base = ml_ncg_oracle(DECAY, DECAYS, **own)
    near(arrays.take(arrays.weights), want, 1e-3)
    assert rules[0].scalars["base_rate"].item() == pytest.approx(base, rel=1e-5)
    assert base < 1.0
    ours, _ = trained(lambda share: Nlcg(share, section.model_copy(update={"variant": "displacement"})), 1, adapts)
    with pytest.raises(AssertionError):
        near(ours.take(ours.weights), want, 1e-2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"on_reset": "move", "momentum_time": "since_reset"},
        {"moves_by": "previous", "momentum_time": "epochs", "momentum_end": 0.6, "momentum_start": 0.4},
        {"sgd_epochs": 0.0, "beta": 0.0, "alpha": 0.0},
    ],
)
def test_neumann_follows_its_oracle(options: dict[str, Any], ranks: int) -> None:
    section = NeumannSection(
        **{"sgd_epochs": 0.5, "reset_epochs": 1.0, "alpha": 1e-3, "beta": 1e-3, "gamma": 0.9, **options}
    )
    arrays, rules = trained(lambda share: Neumann(share, section, PER_EPOCH), ranks)
    sgd_updates = 5 if section.sgd_epochs else 0
    want, reached = neumann_oracle(DECAY, DECAYS, section, sgd_updates, 10, PER_EPOCH)
    near(arrays.take(arrays.weights), want, 2e-5)
    point = torch.cat([rule.evaluation_weights() for rule in rules if isinstance(rule, LookaheadOptimizer)])
    near(arrays.take(point), reached, 2e-5)
    assert not np.allclose(arrays.take(point)["large"], want["large"], atol=1e-3)
    assert [rule.scalars["reset_at"].item() for rule in rules] == [71.0] * ranks  # at 1, 11 and 31
    assert not isinstance(Sgd(arrays.shares(1)[0], nesterov=False), LookaheadOptimizer)


def test_neumann_without_resets_is_nesterov_momentum() -> None:
    """Lines 10 and 11 of algorithm 2, without regulariser: the fair baseline."""
    section = NeumannSection(
        alpha=0, beta=0, sgd_epochs=0, reset_epochs=1e6, on_reset="move", momentum_start=0.9, momentum_end=0.9
    )
    ours, nesterov = FlatArrays(start(), DECAYS), FlatArrays(start(), DECAYS)
    found = ours.train(Neumann(ours.share(), section, PER_EPOCH), DECAY)
    near(found, nesterov.train(Sgd(nesterov.share(), nesterov=True, form="unscaled"), DECAY, beta=0.9), 2e-5)


@pytest.mark.parametrize("mode", ["step", "online"])
@pytest.mark.parametrize("rise", [0.9, 1.009, 1.011, 1.03, 1.06, 1.08, 1.11, 1.13, 1.2])
def test_the_base_rate_follows_the_table(mode: Any, rise: float) -> None:
    """Starts from half the maximum base rate, so that it can grow."""
    rule, here = LossRateControl(mode, 1.0, torch.device("cpu")), torch.tensor(True)
    rule.scalars["base_rate"].fill_(0.5)
    rule.scalars["loss_average"].fill_(2.0)
    rule.scalars["loss_before"].fill_(2.0)
    now = 2.0 * rise if mode == "online" else (2.0 * rise - 0.7 * 2.0) / 0.3  # gives the average this rise
    base, taken_back = rule(torch.tensor(now), torch.tensor(5.0), here)
    factor, share = table_row(rise, 1.0, {"step": 1.05, "online": 1.02}[mode])
    assert (base.item(), taken_back.item()) == (pytest.approx(0.5 * factor), pytest.approx(share))
    if mode == "step":
        _, between = rule(torch.tensor(100.0), torch.tensor(6.0), here)
        assert (between.item(), base.item()) == (0.0, pytest.approx(0.5 * factor)), "only every fifth step compares"


def test_the_base_rate_has_a_minimum_and_a_maximum() -> None:
    rule, here = LossRateControl("online", 1.0, torch.device("cpu")), torch.tensor(True)
    rule(torch.tensor(1.0), torch.tensor(0.0), here)
    for number in range(1, 30):
        base, _ = rule(torch.tensor(10.0**number), torch.tensor(float(number)), here)
    assert base.item() == pytest.approx(1e-4)
    for number in range(30, 1000):
        base, _ = rule(torch.tensor(1.0), torch.tensor(float(number)), here)
    assert base.item() == 1.0


def test_taking_back_a_direction_works_at_a_learning_rate_of_zero() -> None:
    """As at the end of a decay, and at the start of a warm-up."""
    arrays = FlatArrays(start(), DECAYS)
    rule = Nlcg(arrays.share(), NlcgSection(step="online"))
    for step, (own_rate, own_loss) in enumerate([(0.0, 1.0), (0.1, 1.0), (0.0, 9.0), (0.1, 1.0)]):
        arrays.put(arrays.gradients, bowl(arrays.take(arrays.weights), step))
        assert rule.step(hyper(own_rate, loss=own_loss), torch.tensor(True))
    assert arrays.weights.isfinite().all()


def test_the_number_of_moments_per_weight() -> None:
    arrays = FlatArrays(start(), DECAYS)
    assert len(Nlcg(arrays.share(), NlcgSection()).moments) == 3, "only Polak-Ribiere needs s_old"
    assert len(Nlcg(arrays.share(), NlcgSection(beta="polak_ribiere")).moments) == 4
    assert len(Neumann(arrays.share(), NeumannSection(), PER_EPOCH).moments) == 2


@pytest.mark.parametrize("options", [{}, {"lars_coefficient": 0.01}])
def test_a_sharded_update_sends_two_small_messages(options: dict[str, Any]) -> None:
    sent = []

    def exchange(values: torch.Tensor) -> torch.Tensor:
        sent.append(len(values))
        return values

    arrays = FlatArrays(start(), DECAYS)
    whole = [(0, len(arrays.weights))]
    rule = Nlcg(arrays.share(whole, exchange), NlcgSection(**options))
    rule.step(hyper(0.1), torch.tensor(True))
    assert sent[-2:] == [1 + 3, 1 + 1]
    assert len(sent) == (3 if options else 2)
    sent.clear()
    Neumann(arrays.share(whole, exchange), NeumannSection(), PER_EPOCH).step(hyper(0.1), torch.tensor(True))
    assert sent == [2]
