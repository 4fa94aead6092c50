"""The parts of the learning proof: which trainings each one compares.

Each part is a function from the records so far to the trials it asks for; as results come in, it may ask for more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from trials import Get, Settings, Trial

SEEDS = (1, 2, 3)
SEED_OF_SWEEPS = SEEDS[0]

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

REFERENCE: Settings = {
    "train.epochs": 8,
    "train.schedule.warmup_epochs": 2,
    "train.schedule.learning_rate": 0.4,
}
"""On top of the document in parts (b) to (e): shorter, with the best rate of SGD at batch 256, found in part (a)."""

BATCHES = (256, 1024, 4096)
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
        found = [record.top1 or 0.0 for rate in rates if (record := get(self._trial(rate))) is not None]
        return rates[found.index(max(found))] if len(found) == len(rates) else None

    def _trial(self, rate: float) -> Trial:
        return photographs(SEED_OF_SWEEPS, self.settings(rate))


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
    """

    title: str
    groups: Callable[[Get], Groups]
    sweeps: Sequence[Sweep] = ()
    x_name: str = ""
    families: Sequence[str] = ("photographs",)

    def rounds(self, get: Get) -> Iterator[list[Trial]]:
        """Every trial that the part needs, as far as the records so far tell: the sweeps, then a seed at a time."""
        yield [trial for sweep in self.sweeps for trial in sweep.trials(get).values()]
        arms = [arm.trials for arms in self.groups(get).values() for arm in arms]
        yield from map(list, zip(*arms, strict=True))


def due(parts: Sequence[Part], get: Get) -> Iterator[Trial]:
    """The trials of several parts, so ordered that each has its first seed before any has its second."""
    for rounds in zip_longest(*(part.rounds(get) for part in parts), fillvalue=()):
        for trials in rounds:
            yield from trials


def large_batch(get: Get) -> Groups:
    """SGD by the linear rule, and SGD and LARS with the best rate of their sweeps, at each batch."""
    reference = Sweep("sgd", BATCHES[0]).best(get)
    if reference is None:
        return {}
    found: Groups = {}
    for batch in BATCHES:
        sgd, lars = Sweep("sgd", batch), Sweep("lars", batch)
        linear, tuned, trust = round(reference * sgd.times, 4), sgd.best(get), lars.best(get)
        both = ("SGD, linear rule", *(("SGD, best rate",) if tuned == linear else ()))
        arms = [Arm(f"SGD, linear rule, rate {linear:g}", repeated(sgd.settings(linear)), both, batch)]
        if tuned is not None and tuned != linear:
            arms.append(Arm(f"SGD, best rate {tuned:g}", repeated(sgd.settings(tuned)), ("SGD, best rate",), batch))
        if trust is not None:
            arms.append(Arm(f"LARS, best rate {trust:g}", repeated(lars.settings(trust)), ("LARS, best rate",), batch))
        found[f"Batch {batch:,}"] = arms
    return found


def batch_norm_spans(get: Get) -> Groups:
    """Ranks of 4 images that share statistics: all 64 of them, 16, 4 and 1."""
    spans = {64: "16 ranks", 16: "4 ranks", 4: "1 rank"}
    smaller = [
        Arm(f"{name}: span {span}", repeated({**REFERENCE, "model.batch_norm.span": span}), ("top-1",), span)
        for span, name in spans.items()
    ]
    return {"": [Arm("all 64 ranks: span 256", repeated(REFERENCE), ("top-1",), 256), *smaller]}


def precision(get: Get) -> Groups:
    """Arithmetic of forward and backward."""
    return {"": [Arm("fp32", repeated(REFERENCE)), Arm("bf16", repeated({**REFERENCE, "train.precision": "bf16"}))]}


def decay_everywhere(get: Get) -> Groups:
    """Weight decay left off batch norm and biases, and applied to them."""
    everywhere = {**REFERENCE, "train.optimizer.decay_all": True}
    return {
        "": [
            Arm("decay on weights alone", repeated(REFERENCE)),
            Arm("decay on all parameters", repeated(everywhere)),
        ]
    }


COLLAPSE = 6.5
"""Epoch at which the last phase begins: 56 updates before the end. Their 4.5 epochs of 90 would be 15 updates here."""


def collapse(get: Get) -> Groups:
    """Codreanu's last phase against the run without it, against its crops alone, and after a decay that came to 0.

    As in their run on 448 nodes: a linear decay to the end of the run is cut; in the last phase it begins again at 0.95
    of what it had come down to and falls quadratically, weight decay doubles, and crops keep scale and aspect;
    evaluated on the centre 0.875.
    """
    base = {**REFERENCE, "train.schedule.power": 1.0, "evaluate.crop_fraction": 0.875}
    peak, warmup, end = (
        base[f"train.{name}"] for name in ("schedule.learning_rate", "schedule.warmup_epochs", "epochs")
    )
    rate = round(0.95 * peak * (end - COLLAPSE) / (end - warmup), 4)
    crop = {"crop": {"short_side": 0.875, "flip": 0.5}}
    whole = {**crop, "schedule": {"name": "polynomial", "power": 2.0, "learning_rate": rate}, "weight_decay": 1e-3}

    def ending(phase: Settings, **before: float) -> list[Trial]:
        cut = {f"train.schedule.{name}": value for name, value in before.items()}
        return repeated({**base, **cut, "train.phases": [{"start": COLLAPSE, **phase}]})

    return {
        "": [
            Arm("no collapse: linear decay to the end", repeated(base)),
            Arm("collapse", ending(whole, decay_epochs=end - warmup)),
            Arm("its crops alone", ending(crop)),
            Arm("collapse after a decay to 0", ending(whole)),
        ]
    }


SWEEPS = [Sweep(optimizer, batch) for batch in BATCHES for optimizer in ("sgd", "lars")]
PARTS = {
    "a": Part("Large batches: SGD by the linear rule, and LARS", large_batch, SWEEPS, "batch"),
    "b": Part("Batch norm over groups of small ranks", batch_norm_spans, x_name="images that share statistics"),
    "c": Part("bf16 and fp32", precision),
    "d": Part("Decay on batch norm and biases", decay_everywhere),
    "e": Part("The collapse phase", collapse),
}
