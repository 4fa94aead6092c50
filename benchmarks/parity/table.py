"""Page of Markdown on the trainings of both engines."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt

from benchmarks.parity.cases import Case, Trained
from podscale.study.seed_statistics import student_95

Found = Mapping[Case, Mapping[str, Sequence[Trained | None]]]
"""By case and engine, a training for each seed."""
STARTS, WITHIN = (5, 10), 1e-4
"""Updates that may count as the start, and how far apart losses may be there, as a share."""

TEXT = [
    "Both engines begin with the same weights and are given the same batches of 64 images, four ranks of 16, by the",
    "run's own loader, order and schedule, in fp32: PyTorch on four gloo processes, JAX on four simulated devices.",
    "Gradients are averaged on a 2 x 2 torus; `sharded` updates half of the weights on each rank and gathers the rest.",
    "`group` is that of batch norm, in ranks. Seeds (n of them) change weights, order and crops.",
    "",
    "`Apart`: |loss of JAX - loss of PyTorch| / loss of PyTorch, the largest over all seeds, of the first update, over",
    f"the first {STARTS[0]} and {STARTS[1]}, and over all. `Agree`: updates before losses are {WITHIN:g} apart, of the",
    "first seed to part to the last. Rounding differs from the first sum on, and training multiplies that, so only the",
    "start can agree in digits; at the end accuracy must: `difference` is the mean over seeds of JAX's top-1 minus",
    "PyTorch's, with half its 95 % interval; `noise` is the deviation of PyTorch's top-1 from seed to seed. In points.",
    "",
]


def table(found: Found) -> list[str]:
    """The page below its head; cases and seeds that were not trained are left out."""
    lines = [
        f"| optimizer | group | update | n | apart: first | first {STARTS[0]} | first {STARTS[1]} | all | agree | "
        "top-1 PyTorch | JAX | difference | noise |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows = [row for case, engines in found.items() if (row := _row(case, engines))]
    return [*TEXT, *lines, *rows, "", *_itself(found), *_verdict(found)]


def apart(one: Trained, other: Trained) -> list[float]:
    """Difference of the losses, update by update, as a fraction of the first's."""
    return [abs(a - b) / a for a, b in zip(one.losses, other.losses, strict=True)]


def _pairs(engines: Mapping[str, Sequence[Trained | None]]) -> list[tuple[Trained, Trained]]:
    both = zip(engines["pytorch"], engines["jax"], strict=True)
    return [(one, other) for one, other in both if one is not None and other is not None]


def _row(case: Case, engines: Mapping[str, Sequence[Trained | None]]) -> str:
    pairs = _pairs(engines)
    if not pairs:
        return ""
    curves = [apart(*pair) for pair in pairs]
    shares = " | ".join(f"{max(max(curve[:count]) for curve in curves):.0e}" for count in (1, *STARTS, None))
    torchs, jaxs = ([100 * pair[side].top1 for pair in pairs] for side in (0, 1))
    update = "sharded" if case.sharded else "whole"
    return (
        f"| {case.rule.upper()} | {case.group} | {update} | {len(pairs)} | {shares} | "
        f"{_agreement(curves)} | "
        f"{statistics.mean(torchs):.2f} | {statistics.mean(jaxs):.2f} | {_difference(pairs)} | {_deviation(torchs)} |"
    )


def _agreement(curves: Sequence[Sequence[float]]) -> str:
    """Updates for which the first and the last training to part agree."""
    counts = [next((n for n, share in enumerate(curve) if share > WITHIN), len(curve)) for curve in curves]
    return f"{min(counts)} to {max(counts)}"


def _itself(found: Found) -> list[str]:
    """Agreement of one engine with itself if only the order of sums differs: a scale for the table."""
    sentences = []
    for engine in ("pytorch", "jax"):
        curves = []
        for case, engines in found.items():
            other = found.get(replace(case, sharded=True), {}).get(engine, ())
            if case.rule == "lars" and not case.sharded:
                curves += [apart(a, b) for a, b in zip(engines[engine], other, strict=False) if a and b]
        if curves:
            sentences.append(f"{engine}: {_agreement(curves)}")
    if not sentences:
        return []
    return [
        "For scale, each engine against itself: LARS with a sharded update adds its norms up in another order, and a "
        f"seed's trainings, whole and sharded, agree for so many updates: {', '.join(sentences)}.",
        "",
    ]


def _difference(pairs: Sequence[tuple[Trained, Trained]]) -> str:
    differences = [100 * (other.top1 - one.top1) for one, other in pairs]
    mean, count = statistics.mean(differences), len(differences)
    if count < 2:
        return f"{mean:+.2f}"
    return f"{mean:+.2f} ± {student_95(count - 1) * statistics.stdev(differences) / sqrt(count):.2f}"


def _deviation(values: Sequence[float]) -> str:
    return f"{statistics.stdev(values):.2f}" if len(values) > 1 else "-"


def _verdict(found: Found) -> list[str]:
    pairs = [pair for engines in found.values() for pair in _pairs(engines)]
    if not pairs:
        return ["Nothing was trained yet."]
    differences = [100 * (other.top1 - one.top1) for one, other in pairs]
    sentences = []
    for count in STARTS:
        start = max(max(apart(*pair)[:count]) for pair in pairs)
        sentences.append(
            f"{start:.1e} apart at most in the first {count}, {'within' if start <= WITHIN else 'beyond'} {WITHIN:g}"
        )
    repeated = any(len(_pairs(engines)) > 1 for engines in found.values())
    closing = (
        "Differences smaller than an interval are not excluded."
        if repeated
        else "With one seed there is no interval: whether accuracies agree cannot be told."
    )
    return [
        f"Over all {len(pairs)} pairs losses are {', and '.join(sentences)}; accuracy differs by "
        f"{statistics.mean(differences):+.2f} points in the mean, {max(map(abs, differences)):.2f} at most. "
        f"{closing}",
    ]
