"""Cases of the recording rules, with their expected values."""

from typing import Any

from podscale.telemetry.catalogue import GOODPUT_STATES, RESTART_CAUSES
from tests.rules.cases import DIGITS, Line, Recorded, Series, build_info, of, who
from tests.rules.cases_resources import gpu_of, volume, xid
from tests.rules.cases_restarts import launches, wall_seconds

FINE, SICK = who("fine", "fine"), who("sick", "sick")


def per_minute(name: str, by: float, **labels: Any) -> Series:
    """Return a counter that rises steadily for an hour."""
    return of(name, Line().rise(60, by=by), **labels)


def steady(name: str, value: float, **labels: Any) -> Series:
    """Return a gauge that is constant for an hour."""
    return of(name, Line(value).hold(60), **labels)


IMAGES = (per_minute("train_images", 600), per_minute("train_images", 600, rank=1))
WORLD = (steady("train_world_size", 2), steady("train_world_size", 2, rank=1))
PHASES = (
    per_minute("train_phase_seconds", 45, phase="forward_backward"),
    per_minute("train_phase_seconds", 15, phase="data_wait"),
    per_minute("train_phase_seconds", 60, phase="forward_backward", rank=1),
)
FLOPS = (per_minute("train_model_flops", 600), per_minute("train_model_flops", 600, rank=1))
PEAKS = (steady("train_peak_flops", 40), steady("train_peak_flops", 40, rank=1))
RATE, PER_CHIP = "run:podscale_train_images:rate5m", "run:podscale_train_images_per_chip:rate5m"

THROUGHPUT = (
    Recorded(RATE, "two ranks with ten images a second each", IMAGES, {20: ((DIGITS, 20),)}),
    Recorded(
        RATE,
        "starts again in a new pod: only what it counted",
        (
            of("train_images", Line().rise(20, by=600).end()),
            of("train_images", Line(after=30).rise(20, by=600), launch=2),
        ),
        {20: ((DIGITS, 10),), 29: (), 45: ((DIGITS, 10),)},
    ),
    Recorded(
        RATE,
        "restarts in the same pod, from zero",
        (of("train_images", Line().rise(20, by=600).jump(0).rise(20, by=600)),),
        {35: ((DIGITS, 10),)},
    ),
    Recorded(
        RATE,
        "scrapes are lost: the same rate after them",
        (of("train_images", Line().rise(20, by=600).gap(10).jump(31 * 600).rise(10, by=600)),),
        {20: ((DIGITS, 10),), 29: (), 40: ((DIGITS, 10),)},
    ),
    Recorded(
        RATE,
        "two runs, two namespaces",
        (
            per_minute("train_images", 600, run="fine", namespace="fine"),
            per_minute("train_images", 60, run="sick", namespace="sick"),
        ),
        {20: ((FINE, 10), (SICK, 1))},
    ),
    Recorded(PER_CHIP, "half of twenty", (*IMAGES, *WORLD), {20: ((DIGITS, 10),)}),
    Recorded(
        "run:podscale_train_images_per_chip_updating:rate5m",
        "evaluations take half the time, so it is twice as fast while it trains; right from the first minutes on",
        (
            per_minute("train_images", 600),
            per_minute("train_phase_seconds", 30, phase="forward_backward"),
            per_minute("train_phase_seconds", 30, phase="evaluation"),
        ),
        {1: ((DIGITS, 20),), 20: ((DIGITS, 20),)},
    ),
    Recorded(
        "run:podscale_train_images_per_chip_updating:rate5m",
        "evaluates only",
        (
            per_minute("train_images", 0),
            per_minute("train_phase_seconds", 60, phase="evaluation"),
            per_minute("train_phase_seconds", 0, phase="forward_backward"),
        ),
        {20: ()},
    ),
    Recorded(
        "run:podscale_train_steps:rate5m",
        "ranks take part in the same steps",
        (per_minute("train_steps", 60), per_minute("train_steps", 60, rank=1)),
        {20: ((DIGITS, 1),)},
    ),
    Recorded(
        "run:podscale_train_seconds_left:rate5m",
        "a million images, ten a second on each of two, whatever the steps are",
        (*IMAGES, steady("train_images_left", 1_000_000)),
        {20: ((DIGITS, 50_000),)},
    ),
    Recorded(
        "run:podscale_train_seconds_left:rate5m",
        "stands still",
        (per_minute("train_images", 0), steady("train_images_left", 1_000_000)),
        {20: ()},
    ),
    Recorded("run:podscale_train_flops:rate5m", "ten a second on each of two", FLOPS, {20: ((DIGITS, 20),)}),
    Recorded("run:podscale_train_mfu:ratio_5m", "twenty of eighty", (*FLOPS, *PEAKS), {20: ((DIGITS, 0.25),)}),
    Recorded("run:podscale_train_mfu:ratio_5m", "no peak is known", FLOPS, {20: ()}),
    Recorded(
        "run:podscale_shard_images:rate5m",
        "both splits",
        (per_minute("shard_images", 540, split="train"), per_minute("shard_images", 60, split="validation")),
        {20: ((DIGITS, 10),)},
    ),
)
WAIT = "run_state:podscale_train_wall_seconds"
KILLED = (
    *wall_seconds(30, start={"productive": 3000.0}, productive=0.9, ends=True),
    *wall_seconds(
        60,
        start={"productive": 3000.0 + 1620 - 30, "idle": 180.0, "redo": 120.0, "recovery": 600.0},
        after=40,
        launch=2,
        productive=0.9,
    ),
)
TIME = (
    Recorded(
        "run_phase:podscale_train_phase:ratio_5m",
        "an eighth of both ranks' time",
        PHASES,
        {20: ((who(phase="forward_backward"), 0.875), (who(phase="data_wait"), 0.125))},
    ),
    Recorded("run_rank:podscale_train_data_wait:ratio_5m", "a quarter of one", PHASES, {20: ((who(rank="0"), 0.25),)}),
    Recorded(
        "run:podscale_train_data_wait:ratio_5m",
        "both ranks",
        (*PHASES, per_minute("train_phase_seconds", 0, phase="data_wait", rank=1)),
        {20: ((DIGITS, 0.125),)},
    ),
    Recorded(
        "run_rank:podscale_train_busy_seconds:rate5m",
        "two ranks",
        (per_minute("train_busy_seconds", 30), per_minute("train_busy_seconds", 45, rank=1)),
        {20: ((who(rank="0"), 0.5), (who(rank="1"), 0.75))},
    ),
    Recorded(
        f"{WAIT}:max",
        "over both launches",
        KILLED[:10],
        {
            20: tuple(
                (who(state=state), {"productive": 4080.0, "idle": 120.0}.get(state, 0.0)) for state in GOODPUT_STATES
            )
        },
    ),
    Recorded(
        f"{WAIT}:delta1h",
        "a new launch begins a heartbeat behind",
        tuple(one for one in KILLED if 'state="productive"' in one[0] or 'state="redo"' in one[0]),
        {35: (), 50: ((who(state="productive"), 2130.0), (who(state="redo"), 120.0))},
    ),
    Recorded(
        "run:podscale_train_goodput:ratio_1h",
        "nine tenths",
        wall_seconds(90, start={"init": 3000.0}, productive=0.9),
        {30: ((DIGITS, 0.9),), 85: ((DIGITS, 0.9),)},
    ),
    Recorded(
        "run:podscale_train_goodput:ratio_1h",
        "is over",
        wall_seconds(30, productive=0.9, ends=True),
        {29: ((DIGITS, 0.9),), 32: ()},
    ),
    Recorded(
        "run:podscale_train_goodput:ratio",
        "with its start, which was as long as the rest",
        wall_seconds(90, start={"init": 3600.0}, productive=0.9),
        {60: ((DIGITS, 0.45),)},
    ),
)
STATE = (
    Recorded(
        "run_cause:podscale_train_restarts:max",
        "of the newest launch",
        launches(0, 30, 40),
        {50: tuple((who(cause=cause), 2.0 if cause == "failed" else 0.0) for cause in RESTART_CAUSES)},
    ),
    Recorded(
        "run:podscale_train_launches:max",
        "of the newest launch, a new pod",
        (of("train_launches", Line(1).hold(20).end()), of("train_launches", Line(2, after=30).hold(20), launch=2)),
        {10: ((DIGITS, 1.0),), 25: (), 50: ((DIGITS, 2.0),)},
    ),
    Recorded(
        "run:podscale_train_checkpoint_age:seconds",
        "since minute 20",
        (
            of("train_checkpoint_last_success_timestamp_seconds", Line(1200, after=20).hold(30)),
            per_minute("train_phase_seconds", 60, phase="other"),
        ),
        {10: ((DIGITS, 600),), 30: ((DIGITS, 600),), 45: ((DIGITS, 1500),)},
    ),
    Recorded(
        "run_volume:podscale_disk_free:ratio",
        "the fuller of two pods",
        (*volume(Line(80).hold(60), "scratch"), *volume(Line(20).hold(60), "scratch", rank=1)),
        {20: ((who(volume="scratch"), 0.2),)},
    ),
)
OURS = {"pod": "digits-worker-0", **DIGITS}
GPU = {**OURS, "gpu": "3"}
HARDWARE = (
    Recorded(
        "pod_run:podscale_build_info:last30m",
        "is remembered for half an hour",
        (build_info(Line(1).hold(10).end()),),
        {5: ((OURS, 1),), 30: ((OURS, 1),), 42: ()},
    ),
    Recorded(
        "run_gpu:podscale_gpu_xid:max",
        "of our pod, not of others",
        (build_info(Line(1).hold(60)), xid(Line(79).hold(60)), xid(Line(48).hold(60), pod="theirs")),
        {20: ((GPU, 79),)},
    ),
    Recorded(
        "run_gpu:podscale_gpu_temperature_celsius:max",
        "the higher of two readings",
        (
            build_info(Line(1).hold(60)),
            of("gpu_temperature_celsius", Line(70).hold(60), gpu="3"),
            gpu_of("DCGM_FI_DEV_GPU_TEMP", Line(71).hold(60), honoured=False),
        ),
        {20: ((GPU, 71),)},
    ),
)
RECORDED = (*THROUGHPUT, *TIME, *STATE, *HARDWARE)
