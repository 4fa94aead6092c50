"""Schedules: values at their defining points, and at every step by independent formulas."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.config import InputSection, RunConfig, TrainSection
from podscale.config.schedule import CropSection, PhaseSection, ScheduleSection
from podscale.data.step_positions import StepPositions, step_positions
from podscale.training import schedules


def train(**schedule: object) -> TrainSection:
    return TrainSection.model_validate(
        {"epochs": 90, "global_batch": 256, "schedule": {"learning_rate": 0.4, **schedule}}
    )


def positions(section: TrainSection, steps_per_epoch: float) -> StepPositions:
    return step_positions(section, round(steps_per_epoch * section.global_batch))


def learning_rate(section: TrainSection, step: int, steps_per_epoch: float) -> float:
    return float(schedules.hyperparameters_at(section, np.array([step]), positions(section, steps_per_epoch))[0, 0])


def test_total_steps_cover_every_image_of_the_last_epoch() -> None:
    assert schedules.total_steps(train(), 1_281_167) == math.ceil(90 * 1_281_167 / 256)
    assert schedules.total_steps(TrainSection(epochs=1, global_batch=10), 100) == 10
    assert schedules.total_steps(TrainSection(epochs=0.1, global_batch=10), 100) == 1
    assert schedules.total_steps(TrainSection(epochs=3, global_batch=7), 49) == 21


def test_warm_up_is_linear_from_its_start_to_the_peak() -> None:
    rates = [learning_rate(train(warmup_epochs=5, warmup_start=0.1), s, 10.0) for s in range(51)]
    assert rates[0] == 0.1
    assert rates[50] == pytest.approx(0.4)
    assert np.allclose(np.diff(rates[:51]), (0.4 - 0.1) / 50)


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_a_warm_up_rises_by_a_power_of_its_fraction(power: float) -> None:
    """Adya's scripts: 25 epochs from an initial rate to the maximum; TensorFlow's polynomial_decay of that power.

    polynomial_decay(a, t, T, b, p) = (a - b) (1 - t / T)^p + b falls from a to b. A rise to `peak` with the elapsed
    fraction's power is peak - (peak - start) (1 - (t / T)^p).
    """
    document = train(name="constant", learning_rate=1.6, warmup_epochs=25, warmup_start=0.001, warmup_power=power)
    rates = [learning_rate(document, step, 7.0) for step in range(180)]
    oracle = [1.6 - (1.6 - 0.001) * (1 - math.pow(step / 175, power)) for step in range(175)]
    assert np.allclose(rates, [*oracle, *[1.6] * 5], rtol=1e-12)
    assert rates[0] == 0.001
    below_line = 0.001 + 1.599 * 40 / 175 - rates[40]
    assert below_line < -0.3 if power < 1 else below_line > 0.2


def test_a_linear_warm_up_is_the_power_one_to_the_last_bit() -> None:
    document = train(warmup_epochs=7.3, warmup_start=0.013)
    rates = schedules.hyperparameters_at(document, np.arange(900), positions(document, 10.0))[:, 0]
    steps = np.arange(73)
    assert np.array_equal(rates[:73], 0.013 + (0.4 - 0.013) * (steps / 73.0))


def test_a_corrected_momentum_follows_a_warm_up_of_any_power() -> None:
    document = train(name="constant", warmup_epochs=5, warmup_start=0.1, warmup_power=0.5, momentum_correction=True)
    rows = schedules.hyperparameters_at(document, np.arange(60), positions(document, 10.0))
    assert rows[1:50, 1] == pytest.approx(0.9 * rows[1:50, 0] / rows[:49, 0], rel=1e-12)
    assert rows[0, 1] == rows[55, 1] == 0.9


def test_step_schedule_is_goyals() -> None:
    document = train(name="step", warmup_epochs=5)
    at = {epoch: learning_rate(document, epoch * 100, 100.0) for epoch in (10, 29, 30, 59, 60, 80, 89)}
    assert at == pytest.approx({10: 0.4, 29: 0.4, 30: 0.04, 59: 0.04, 60: 0.004, 80: 0.0004, 89: 0.0004})


def test_cosine_is_at_its_mean_half_way_and_at_its_end_rate_at_the_end() -> None:
    document = train(name="cosine", warmup_epochs=10, end_learning_rate=0.02)
    assert learning_rate(document, 100, 10.0) == pytest.approx(0.4)
    assert learning_rate(document, 500, 10.0) == pytest.approx(0.21)
    assert learning_rate(document, 900, 10.0) == pytest.approx(0.02)


def test_polynomial_is_mlperfs() -> None:
    document = train(name="polynomial", power=2.0, warmup_epochs=18, learning_rate=29.0, end_learning_rate=1e-4)
    half = 18 + (90 - 18) / 2
    assert learning_rate(document, round(half * 40), 40.0) == pytest.approx(1e-4 + (29 - 1e-4) * 0.25)


def test_the_table_has_a_row_for_every_step() -> None:
    document = train(warmup_epochs=3)
    table = schedules.step_table(document, 2560)
    assert table.dtype == np.float32
    assert table.shape == (900, len(schedules.COLUMNS))
    assert table[450, 0] == np.float32(learning_rate(document, 450, 10.0))


def test_a_decay_from_the_start_has_progressed_when_the_warm_up_ends() -> None:
    """Caffe: base * (1 - it / max_iter) ** power with the global iteration `it`, after a linear warm-up."""
    document = train(
        name="polynomial", power=1.0, learning_rate=4.8, warmup_epochs=5, warmup_start=0.1, decay_from="start"
    )
    table = schedules.step_table(document, 25_600)
    assert len(table) == 9000
    oracle = [0.1 + (4.8 - 0.1) * it / 500 if it < 500 else 4.8 * (1 - it / 9000) for it in range(9000)]
    assert np.allclose(table[:, 0], oracle, rtol=1e-6)
    assert table[499, 0] > table[500, 0] + 0.2, "the paper's rate drops at the end of the warm-up"


def test_a_cycle_is_cut_before_its_rate_is_zero() -> None:
    """The first two of five parts (init, cyc1) of Codreanu's 64-node run, in iterations, 312 to an epoch."""
    document = TrainSection.model_validate(
        {
            "epochs": 37,
            "global_batch": 4096,
            "schedule": {
                "name": "polynomial",
                "power": 1.0,
                "learning_rate": 1.6,
                "warmup_epochs": 5,
                "warmup_start": 0.1,
                "decay_from": "start",
                "decay_epochs": 60,
            },
            "phases": [
                {
                    "start": 25,
                    "schedule": {"name": "polynomial", "power": 2, "learning_rate": 1.02, "decay_epochs": 24},
                }
            ],
        }
    )
    table = schedules.step_table(document, 4096 * 312)
    init = [0.1 + 1.5 * it / 1560 if it < 1560 else 1.6 * (1 - it / 18_720) for it in range(7800)]
    cyc1 = [1.02 * (1 - it / 7488) ** 2 for it in range(3744)]
    assert np.allclose(table[:, 0], [*init, *cyc1], rtol=1e-6)
    assert table[-1, 0] > 0.2, "cut at half way"


def test_a_phase_changes_what_it_sets_and_nothing_else() -> None:
    crop = {"short_side": 0.875}
    document = train(name="cosine", warmup_epochs=5).model_copy(
        update={
            "phases": (
                PhaseSection(start=30, weight_decay=2e-4),
                PhaseSection(start=60.05, momentum=0.8, crop=CropSection.model_validate(crop)),
                PhaseSection(start=80, schedule=ScheduleSection(name="constant", learning_rate=0.01)),
            )
        }
    )
    plain = schedules.step_table(document.model_copy(update={"phases": ()}), 2560)
    until = schedules.step_table(document.model_copy(update={"phases": (), "epochs": 80.0}), 2560)
    table = schedules.step_table(document, 2560)
    assert np.array_equal(table[:800, 0], until[:, 0]), "the first schedule ends where the next one begins"
    assert (table[800:, 0] == np.float32(0.01)).all()
    assert not np.array_equal(plain[:800, 0], until[:, 0])
    assert (table[:300, 2] == np.float32(1e-4)).all()
    assert (table[300:, 2] == np.float32(2e-4)).all()
    assert (table[:601, 1] == np.float32(0.9)).all(), "epoch 60.05 is step 600.5, so the phase begins with step 601"
    assert (table[601:, 1] == np.float32(0.8)).all()
    config = RunConfig.model_construct(train=document, input=InputSection(image_size=160))
    assert [(first, size, crop.short_side) for first, size, crop in schedules.image_phases(config, 2560)] == [
        (0, 160, None),
        (300, 160, None),
        (601, 160, 0.875),
        (800, 160, 0.875),
    ]


def test_a_phase_may_begin_with_an_empty_buffer() -> None:
    document = train().model_copy(update={"phases": (PhaseSection(start=40, reset_momentum=True),)})
    momenta = schedules.step_table(document, 2560)[:, 1]
    assert momenta[400] == 0
    assert (np.delete(momenta, 400) == np.float32(0.9)).all()


def test_momentum_changes_linearly_between_start_peak_and_end() -> None:
    document = train(name="polynomial", warmup_epochs=10, momentum_start=0.95, momentum_end=0.97)
    momenta = schedules.step_table(document, 2560)[:, 1]
    oracle = [
        0.95 + (0.9 - 0.95) * step / 100 if step < 100 else 0.9 + (0.97 - 0.9) * (step - 100) / 800
        for step in range(900)
    ]
    assert np.allclose(momenta, oracle, rtol=1e-6)


@pytest.mark.parametrize("start", [0.0, 0.1])
def test_momentum_correction_makes_both_buffer_forms_equal_in_the_warm_up(start: float) -> None:
    """Goyal 2017, section 3: v = m (rate_t / rate_before) v + rate g equals rate times u = m u + g."""
    document = train(name="constant", warmup_epochs=5, warmup_start=start, momentum_correction=True)
    rows = schedules.hyperparameters_at(document, np.arange(100), positions(document, 10.0))
    rates, momenta = rows[:50, 0], rows[:50, 1]
    inside = outside = 0.0
    for rate, momentum, gradient in zip(rates, momenta, np.random.default_rng(0).normal(size=50), strict=True):
        inside = momentum * inside + rate * gradient
        outside = 0.9 * outside + gradient if rate else 0.0
        assert inside == pytest.approx(rate * outside, rel=1e-9)
    assert momenta[30] > 0.9
    assert (rows[50:, 1] == 0.9).all(), "only during the warm-up, as in the authors' solver"


def test_the_first_step_of_a_later_schedule_is_not_corrected() -> None:
    again = ScheduleSection(learning_rate=0.2, warmup_epochs=2, warmup_start=0.05, momentum_correction=True)
    document = train().model_copy(update={"phases": (PhaseSection(start=40, schedule=again),)})
    momenta = schedules.step_table(document, 2560)[:, 1]
    assert momenta[400] == np.float32(0.9)
    assert momenta[401] == pytest.approx(0.9 * (0.05 + 0.15 / 20) / 0.05)
    assert (momenta[420:] == np.float32(0.9)).all()


@given(st.integers(7, 5000), st.integers(1, 64), st.floats(0.3, 9.0), st.floats(0.05, 0.95))
@settings(deadline=None)
def test_a_row_does_not_depend_on_the_other_steps(samples: int, batch: int, epochs: float, share: float) -> None:
    document = TrainSection.model_validate(
        {
            "epochs": epochs,
            "global_batch": min(batch, samples),
            "schedule": {"name": "polynomial", "warmup_epochs": epochs * share / 2, "momentum_correction": True},
            "phases": [{"start": epochs * share, "schedule": {"learning_rate": 0.02}}],
        }
    )
    table = schedules.step_table(document, samples)
    assert np.isfinite(table).all()
    assert (table[:, 0] >= 0).all()
    at = step_positions(document, samples)
    for step in {0, len(table) // 2, len(table) - 1}:
        row = schedules.hyperparameters_at(document, np.array([step]), at)[0]
        assert np.array_equal(table[step], row.astype(np.float32))
    first = at.first_step(epochs * share)
    assert first * document.global_batch >= epochs * share * samples - 1e-6, "all its images are beyond the boundary"
    assert (first - 1) * document.global_batch < epochs * share * samples


def growing(*changes: tuple[float, int], **schedule: object) -> TrainSection:
    """Return a run of 9 epochs whose batch is 40 at first and changes at the given epochs."""
    phases = [{"start": start, "global_batch": batch} for start, batch in changes]
    return TrainSection.model_validate({"epochs": 9.0, "global_batch": 40, "schedule": schedule, "phases": phases})


def test_a_change_of_batch_keeps_the_course_of_the_schedule() -> None:
    """The rate of a step is that of its first image, by the formulas of Goyal 2017 and MLPerf in images, in float64."""
    samples, peak, end = 1000, 3.0, 0.01
    document = growing(
        (2, 120), (5.5, 30), name="polynomial", learning_rate=peak, end_learning_rate=end, warmup_epochs=3
    )
    images, oracle = 0, []
    while images < 9 * samples:
        warm, done = images / (3 * samples), (images - 3 * samples) / (6 * samples)
        oracle.append(peak * warm if warm < 1 else end + (peak - end) * (1 - done) ** 2)
        images += 40 if images < 2 * samples else 120 if images < 5.5 * samples else 30
    table = schedules.hyperparameters_at(document, np.arange(len(oracle)), step_positions(document, samples))
    np.testing.assert_allclose(table[:, 0], oracle, rtol=1e-12)
    assert len(schedules.step_table(document, samples)) == len(oracle)
    kept = schedules.step_table(growing(), samples)
    assert len(oracle) != len(kept)


def test_milestones_are_epochs_whatever_the_batch() -> None:
    document = growing((2, 200), name="step", learning_rate=1.0, milestones=(4.0, 6.0), gamma=0.1)
    rates, at = schedules.step_table(document, 1000)[:, 0], step_positions(document, 1000)
    changes = [step for step in range(1, len(rates)) if rates[step] != rates[step - 1]]
    assert [at.epoch_before(step) for step in changes] == [4.0, 6.0]


def test_smith_replaces_decays_by_batches() -> None:
    """Smith 2018: the same noise scale rate / batch at every epoch as with a decaying rate, in fewer steps."""
    decaying = growing(name="step", learning_rate=0.1, milestones=(3.0, 6.0), gamma=0.2)
    increasing = growing((3, 200), (6, 1000), name="constant", learning_rate=0.1)
    noise = {}
    for name, document in (("decaying", decaying), ("increasing", increasing)):
        rates, at = schedules.step_table(document, 5000)[:, 0], step_positions(document, 5000)
        noise[name] = {round(at.epoch_before(step), 9): rates[step] / at.batch_at(step) for step in range(len(rates))}
    shared = sorted(noise["decaying"].keys() & noise["increasing"].keys())
    assert len(shared) > 400
    for epoch in shared:
        assert noise["increasing"][epoch] == pytest.approx(noise["decaying"][epoch], rel=1e-6)
    assert (len(noise["decaying"]), len(noise["increasing"])) == (1125, 375 + 75 + 15)


def test_momentum_correction_uses_the_rate_of_the_step_before_across_a_change() -> None:
    document = growing(
        (1, 160), name="constant", learning_rate=0.8, warmup_epochs=4, warmup_start=0.1, momentum_correction=True
    )
    rows = schedules.hyperparameters_at(document, np.arange(40), step_positions(document, 1000))
    warm = rows[:, 0] < 0.8
    assert warm.sum() > 25
    expected = 0.9 * rows[1:, 0] / rows[:-1, 0]
    assert rows[1:, 1][warm[1:]] == pytest.approx(expected[warm[1:]], rel=1e-12)


def test_the_plot_shows_the_batches() -> None:
    epochs, values = schedules.sample_for_plot(growing((2, 120)), 1000, points=20)
    assert {(batch, epoch < 2) for epoch, batch in zip(epochs, values[:, 3], strict=True)} == {(40, True), (120, False)}


def test_a_table_of_a_million_steps_can_be_computed() -> None:
    document = TrainSection(epochs=90, global_batch=96)
    assert schedules.step_table(document, 1_281_167).shape == (1_201_095, 3)


def test_the_points_of_a_plot_include_both_sides_of_every_jump() -> None:
    document = train(name="step", warmup_epochs=5, milestones=(20,)).model_copy(
        update={"phases": (PhaseSection(start=40.03, reset_momentum=True, weight_decay=2e-4),)}
    )
    epochs, rates = schedules.sample_for_plot(document, 25_600, points=10)
    every_rate = schedules.hyperparameters_at(document, np.arange(9000), positions(document, 100.0))
    at = np.rint(epochs * 100).astype(int)
    assert np.array_equal(rates[:, :3], every_rate[at])
    assert (rates[:, 3] == 256).all()
    assert {0, 499, 500, 1999, 2000, 4002, 4003, 4004, 8999} <= set(at.tolist())
    assert rates[at == 4003, 1] == 0
    assert (np.diff(epochs) > 0).all()
    assert len(epochs) < 20
