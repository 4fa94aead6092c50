"""What a learning proof is made of: trainings, sweeps of learning rates, comparisons, and parts that ask for them.

Each part is a function from the records so far to the trials it asks for; as results come in, it may ask for more.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from trials import Get, Record, Settings, Trial

COMMON: Settings = {
    "model.name": "resnet18",
    "train.label_smoothing": 0.1,
    "train.optimizer.name": "sgd",
    "train.optimizer.momentum": 0.9,
    "train.optimizer.weight_decay": 5e-4,
    "train.schedule.name": "polynomial",
    "train.schedule.power": 2.0,
    "evaluate.crop_fraction": 1.0,
    "evaluate.every_epochs": 2,
    "checkpoint.every_epochs": 0,
    "launch.processes": 1,
    "launch.threads": 1,
    "telemetry.enabled": False,
    "telemetry.log_every": 1,
}
"""What the documents of all proofs say alike: one process with one thread, and a rate that falls to 0."""

SEEDS = (1, 2, 3)
SEED_OF_SWEEPS = SEEDS[0]
WIDENINGS = 2
"""Times a sweep is widened where its best rate is at its edge."""
SGD_AT_ITS_BEST = "SGD, best rate"
"""The line that others are set against."""


@dataclass(frozen=True)
class Base:
    """What trainings stand on: the name of their data and the document that settings are put on top of."""

    family: str
    document: Settings

    def trial(self, seed: int, settings: Settings) -> Trial:
        """A training with these settings; those that the document has anyway make no other trial."""
        return Trial(self.family, {k: v for k, v in settings.items() if self.document.get(k) != v}, seed)

    def repeated(self, settings: Settings) -> list[Trial]:
        """The same training with each of the seeds."""
        return [self.trial(seed, settings) for seed in SEEDS]


@dataclass(frozen=True)
class Rule:
    """An update rule in a comparison of batches.

    rate: where the sweep at the smallest batch begins. linear: at larger ones it begins at the linear rule and half and
    a quarter of it (a quarter at 16 times the batch is the square-root rule); otherwise at the square-root rule, half
    and twice that. settings: of its own.
    """

    name: str
    rate: float
    linear: bool = False
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """Learning rates of one rule at one batch, by factors of two, with one seed.

    times: the batch over the smallest of the comparison. Where the best is at the edge, the sweep goes one further,
    twice at most: the same budget for all rules.
    """

    base: Base
    rule: Rule
    batch: int
    times: float

    def settings(self, rate: float) -> Settings:
        return {
            "train.global_batch": self.batch,
            "train.optimizer.name": self.rule.name,
            "train.schedule.learning_rate": rate,
            **self.rule.settings,
        }

    def trials(self, get: Get) -> dict[float, Trial]:
        """What to try, by ascending rate, as far as the records so far tell."""
        centre = self.rule.rate * (self.times if self.rule.linear else self.times**0.5)
        factors = (0.25, 0.5, 1.0) if self.rule.linear and self.times > 1 else (0.5, 1.0, 2.0)
        rates = [round(centre * factor, 4) for factor in factors]
        for _ in range(WIDENINGS):
            best = self._best(rates, get)
            if best not in (rates[0], rates[-1]):
                break
            if best == rates[0]:
                rates.insert(0, round(rates[0] / 2, 4))
            else:
                rates.append(round(rates[-1] * 2, 4))
        return {rate: self._trial(rate) for rate in rates}

    def best(self, get: Get) -> float | None:
        """The rate with the best accuracy, that of a training that diverged being 0; None until all are tried."""
        return self._best(list(self.trials(get)), get)

    def _best(self, rates: list[float], get: Get) -> float | None:
        found = [_rank(record) for rate in rates if (record := get(self._trial(rate))) is not None]
        return rates[found.index(max(found))] if len(found) == len(rates) else None

    def _trial(self, rate: float) -> Trial:
        return self.base.trial(SEED_OF_SWEEPS, self.settings(rate))


def _rank(record: Record) -> tuple[float, float]:
    """Accuracy, and among equals the smaller loss."""
    return record.top1 or 0.0, -(record.loss if record.loss is not None else float("inf"))


@dataclass(frozen=True)
class Arm:
    """One row of a comparison: a name for people and the trainings behind it.

    lines, x: lines of the part's plot that it is a point of, and where.
    """

    name: str
    trials: Sequence[Trial]
    lines: tuple[str, ...] = ()
    x: float = 0.0


Groups = dict[str, list[Arm]]
"""Comparisons by their names; in each, arms are set against the first."""


@dataclass(frozen=True)
class Part:
    """One question to the trainings.

    groups: the comparisons that are known so far. sweeps: run before them. x_name: of the plot of all arms, if any.
    question, reading: what is said before and after the figures.
    """

    title: str
    groups: Callable[[Get], Groups]
    question: str
    reading: str
    sweeps: Sequence[Sweep] = ()
    x_name: str = ""

    def rounds(self, get: Get) -> Iterator[list[Trial]]:
        """Every trial that the part needs, as far as the records so far tell: the sweeps, then a seed at a time."""
        yield [trial for sweep in self.sweeps for trial in sweep.trials(get).values()]
        arms = [arm.trials for arms in self.groups(get).values() for arm in arms]
        yield from map(list, zip(*arms, strict=True))


@dataclass(frozen=True)
class Proof:
    """All parts on one set of images, which make one file of results.

    file: its name without ending, which those of its plots begin with. setting: what is said before the parts.
    """

    base: Base
    title: str
    file: str
    setting: Sequence[str]
    parts: Mapping[str, Part]


def due(parts: Sequence[Part], get: Get) -> Iterator[Trial]:
    """The trials of several parts, so ordered that each has its first seed before any has its second."""
    for rounds in zip_longest(*(part.rounds(get) for part in parts), fillvalue=()):
        for trials in rounds:
            yield from trials


@dataclass(frozen=True)
class Batches:
    """SGD by the linear rule, and each update rule with the best rate of its sweep, at batches from small to large.

    rules: SGD is the first.
    """

    base: Base
    sizes: Sequence[int]
    rules: Sequence[Rule]

    def sweep(self, rule: Rule, batch: int) -> Sweep:
        return Sweep(self.base, rule, batch, batch / self.sizes[0])

    def sweeps(self) -> list[Sweep]:
        return [self.sweep(rule, batch) for batch in self.sizes for rule in self.rules]

    def groups(self, get: Get) -> Groups:
        """One comparison for each batch, as soon as the reference's rate is known."""
        reference = self.sweep(self.rules[0], self.sizes[0]).best(get)
        if reference is None:
            return {}
        return {f"Batch {batch:,}": self._arms(batch, reference, get) for batch in self.sizes}

    def _arms(self, batch: int, reference: float, get: Get) -> list[Arm]:
        sgd, *others = (self.sweep(rule, batch) for rule in self.rules)
        linear, tuned = round(reference * sgd.times, 4), sgd.best(get)
        both = ("SGD, linear rule", *((SGD_AT_ITS_BEST,) if tuned == linear else ()))
        arms = [Arm(f"SGD, linear rule, rate {linear:g}", self.base.repeated(sgd.settings(linear)), both, batch)]
        for sweep in ([sgd] if tuned != linear else []) + others:
            if (rate := sweep.best(get)) is not None:
                line = f"{sweep.rule.name.upper()}, best rate"
                trials = self.base.repeated(sweep.settings(rate))
                arms.append(Arm(f"{line} {rate:g}", trials, (line,), batch))
        return arms
