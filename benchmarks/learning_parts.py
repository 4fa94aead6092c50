"""The parts of the learning proof: which trainings each one compares.

Each part is a function from the records so far to the trials it asks for; as results come in, it may ask for more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trials import Record, Settings, Trial

Get = Callable[[Trial], Record | None]

SEED_OF_SWEEPS = 1
SEEDS = (11, 12, 13)
"""Of the figures that are reported: not the one by which learning rates were chosen."""

PHOTOGRAPHS: Settings = {
    "data.resize_short": 40,
    "data.quality": 95,
    "data.shard_bytes": 32 * 2**20,
    "input.image_size": 32,
    "input.crop": {"scale": [0.35, 1.0], "flip": 0.5},
    "model.name": "resnet18",
    "model.stem": "imagenet",
    "model.width": 16,
    "train.epochs": 12,
    "train.global_batch": 256,
    "train.label_smoothing": 0.1,
    "train.optimizer.name": "sgd",
    "train.optimizer.momentum": 0.9,
    "train.optimizer.weight_decay": 5e-4,
    "train.schedule.name": "polynomial",
    "train.schedule.power": 2.0,
    "train.schedule.learning_rate": 0.2,
    "train.schedule.warmup_epochs": 3,
    "evaluate.crop_fraction": 1.0,
    "evaluate.every_epochs": 2,
    "checkpoint.every_epochs": 0,
    "launch.processes": 1,
    "launch.threads": 1,
    "telemetry.enabled": False,
    "telemetry.log_every": 1,
}
DOCUMENTS = {"photographs": PHOTOGRAPHS}

BATCHES = (256, 1024, 2048, 4096)
REFERENCE_RATE = {"sgd": 0.2, "lars": 4.0}
"""Where a sweep begins, at batch 256: SGD's by the pilot runs, LARS's by its presets for batches from 816 to 4,096."""
WIDENINGS = 2
"""Times a sweep is widened where its best rate is at its edge."""


def photographs(seed: int, settings: Settings) -> Trial:
    """A training on photographs with these settings; those that the document has anyway make no other trial."""
    return Trial("photographs", {k: v for k, v in settings.items() if PHOTOGRAPHS.get(k) != v}, seed)


def repeated(settings: Settings) -> list[Trial]:
    """The same training with each of the seeds."""
    return [photographs(seed, settings) for seed in SEEDS]


@dataclass(frozen=True)
class Sweep:
    """Learning rates of one optimizer at one batch, by factors of two, with one seed.

    SGD begins at the linear rule and half and a quarter of it (a quarter at 16 times the batch is the square-root
    rule); LARS at the square-root rule, half and twice that. Where the best is at the edge, the sweep goes one further,
    twice at most: the same budget for both.
    """

    optimizer: str
    batch: int

    @property
    def times(self) -> float:
        """The batch over the reference's."""
        return self.batch / BATCHES[0]

    def settings(self, rate: float) -> Settings:
        return {
            "train.global_batch": self.batch,
            "train.optimizer.name": self.optimizer,
            "train.schedule.learning_rate": rate,
        }

    def trials(self, get: Get) -> dict[float, Trial]:
        """What to try, by ascending rate, as far as the records so far tell."""
        linear = self.optimizer == "sgd"
        centre = REFERENCE_RATE[self.optimizer] * (self.times if linear else self.times**0.5)
        factors = (0.25, 0.5, 1.0) if linear and self.times > 1 else (0.5, 1.0, 2.0)
        rates = [round(centre * factor, 4) for factor in factors]
        for _ in range(WIDENINGS):
            found = [accuracy(get(self._trial(rate))) for rate in rates]
            if None in found or 0 < found.index(max(found)) < len(rates) - 1:
                break
            if found.index(max(found)) == 0:
                rates.insert(0, round(rates[0] / 2, 4))
            else:
                rates.append(round(rates[-1] * 2, 4))
        return {rate: self._trial(rate) for rate in rates}

    def best(self, get: Get) -> float | None:
        """The rate with the best accuracy; None until all are tried."""
        found = {rate: accuracy(get(trial)) for rate, trial in self.trials(get).items()}
        return None if None in found.values() else max(found, key=lambda rate: found[rate] or 0.0)

    def _trial(self, rate: float) -> Trial:
        return photographs(SEED_OF_SWEEPS, self.settings(rate))


def accuracy(record: Record | None) -> float | None:
    """Top-1 of a finished training, 0 of one that diverged, None where there is no record."""
    return None if record is None else record.top1 or 0.0


@dataclass(frozen=True)
class Arm:
    """One row of a comparison: a name for people and the trainings behind it."""

    name: str
    trials: Sequence[Trial]


SWEEPS = [Sweep(optimizer, batch) for batch in BATCHES for optimizer in ("sgd", "lars")]


def large_batch(get: Get) -> dict[str, list[Arm]]:
    """Part (a), by batch: SGD by the linear rule, SGD and LARS with their best rates; arms that are known so far."""
    reference = Sweep("sgd", BATCHES[0]).best(get)
    found: dict[str, list[Arm]] = {}
    for batch in BATCHES:
        arms = found.setdefault(f"batch {batch:,}", [])
        if reference is not None:
            sweep = Sweep("sgd", batch)
            rate = round(reference * sweep.times, 4)
            arms.append(Arm(f"SGD, linear rule: {rate:g}", repeated(sweep.settings(rate))))
        for optimizer in ("sgd", "lars"):
            sweep = Sweep(optimizer, batch)
            best = sweep.best(get)
            if best is not None:
                arms.append(Arm(f"{optimizer.upper()}, best of sweep: {best:g}", repeated(sweep.settings(best))))
    return found


def due_large_batch(get: Get) -> Iterator[Trial]:
    """Every sweep, then every arm."""
    for sweep in SWEEPS:
        yield from sweep.trials(get).values()
    for arms in large_batch(get).values():
        for arm in arms:
            yield from arm.trials


@dataclass(frozen=True)
class Part:
    """due: trials that the part needs, given the records so far. families: of shard sets."""

    title: str
    due: Callable[[Get], Iterator[Trial]]
    families: tuple[str, ...] = ("photographs",)


PARTS = {"a": Part("Large batches: SGD and LARS", due_large_batch)}
