"""Page about the losses and the accuracy of both engines."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.measure import MeanInterval
from benchmarks.parity.cases import Case, TrainingResult

SeedResults = Sequence[TrainingResult | None]
"""Result of each seed; None if it was not trained."""
Results = Mapping[Case, Mapping[str, SeedResults]]
"""Results by case and engine."""
STARTS, TOLERANCE = (5, 10), 1e-4
"""Numbers of first steps to compare, and relative tolerance of their losses."""

TEXT = [
    "Both engines train in fp32 from the same weights on the same batches: 64 images, 16 on each of four ranks, with",
    "the run's loader, order and schedule. PyTorch runs on four gloo processes, JAX on four simulated devices.",
    "Gradients are averaged on a 2 x 2 torus. Rounding differs from the first sum on, and training amplifies it, so",
    "only the first losses can agree in digits; at the end the accuracies must agree.",
    "",
    "- `group`: ranks that share the statistics of batch norm.",
    "- `update`: `sharded` updates half of the weights on each rank and gathers the rest.",
    "- `n`: seeds; a seed changes weights, order and crops.",
    "- `apart`: |loss of JAX - loss of PyTorch| / loss of PyTorch, maximum over the seeds: in the first step, in the",
    f"  first {STARTS[0]}, in the first {STARTS[1]}, and in all.",
    f"- `agree`: steps until the losses are {TOLERANCE:g} apart, in the first and in the last seed that differs.",
    "- `difference`: top-1 of JAX minus top-1 of PyTorch, mean over seeds with half its 95 % interval, in points.",
    "- `noise`: standard deviation of PyTorch's top-1 over seeds, in points.",
    "",
]


def table(results: Results) -> list[str]:
    """Return the page below its head, without cases and seeds that were not trained."""
    lines = [
        f"| optimizer | group | update | n | apart: first | first {STARTS[0]} | first {STARTS[1]} | all | agree | "
        "top-1 PyTorch | JAX | difference | noise |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows = [row for case, engines in results.items() if (row := _row(case, engines))]
    return [*TEXT, *lines, *rows, "", *_self_agreement(results), *_conclusion(results)]


def relative_differences(first: TrainingResult, second: TrainingResult) -> list[float]:
    """Return the difference of the losses of each step, as a fraction of the first's."""
    return [abs(a - b) / a for a, b in zip(first.losses, second.losses, strict=True)]


def _pairs(engines: Mapping[str, SeedResults]) -> list[tuple[TrainingResult, TrainingResult]]:
    pairs = zip(engines["pytorch"], engines["jax"], strict=True)
    return [(torch, jax) for torch, jax in pairs if torch is not None and jax is not None]


def _row(case: Case, engines: Mapping[str, SeedResults]) -> str:
    pairs = _pairs(engines)
    if not pairs:
        return ""
    curves = [relative_differences(*pair) for pair in pairs]
    maxima = " | ".join(f"{max(max(curve[:count]) for curve in curves):.0e}" for count in (1, *STARTS, None))
    torch_top1, jax_top1 = ([100 * pair[engine].top1 for pair in pairs] for engine in (0, 1))
    update = "sharded" if case.sharded else "replicated"
    noise = f"{statistics.stdev(torch_top1):.2f}" if len(pairs) > 1 else "-"
    return (
        f"| {case.rule.upper()} | {case.group} | {update} | {len(pairs)} | {maxima} | {_agreement(curves)} | "
        f"{statistics.mean(torch_top1):.2f} | {statistics.mean(jax_top1):.2f} | "
        f"{MeanInterval.of(_top1_differences(pairs)).format()} | {noise} |"
    )


def _agreement(curves: Sequence[Sequence[float]]) -> str:
    """Return the numbers of steps with equal losses, in the first and in the last seed that differs."""
    counts = [next((n for n, value in enumerate(curve) if value > TOLERANCE), len(curve)) for curve in curves]
    return f"{min(counts)} to {max(counts)}"


def _self_agreement(results: Results) -> list[str]:
    """Compare each engine with itself in another order of summation, as a scale for the table."""
    sentences = []
    for engine in ("pytorch", "jax"):
        curves = []
        for case, engines in results.items():
            sharded = results.get(replace(case, sharded=True), {}).get(engine, ())
            if case.rule == "lars" and not case.sharded:
                pairs = zip(engines[engine], sharded, strict=False)
                curves += [relative_differences(a, b) for a, b in pairs if a and b]
        if curves:
            sentences.append(f"{engine}: {_agreement(curves)}")
    if not sentences:
        return []
    return [
        "For scale, each engine is compared with itself, since LARS with a sharded update sums its norms in another "
        f"order. Steps in which a seed's replicated and sharded training agree: {', '.join(sentences)}.",
        "",
    ]


def _top1_differences(pairs: Sequence[tuple[TrainingResult, TrainingResult]]) -> list[float]:
    return [100 * (jax.top1 - torch.top1) for torch, jax in pairs]


def _conclusion(results: Results) -> list[str]:
    pairs = [pair for engines in results.values() for pair in _pairs(engines)]
    if not pairs:
        return ["Nothing was trained yet."]
    differences = _top1_differences(pairs)
    sentences = []
    for count in STARTS:
        largest = max(max(relative_differences(*pair)[:count]) for pair in pairs)
        relation = "within" if largest <= TOLERANCE else "beyond"
        sentences.append(f"at most {largest:.1e} apart in the first {count} steps, {relation} {TOLERANCE:g}")
    repeated = any(len(_pairs(engines)) > 1 for engines in results.values())
    closing = (
        "Differences smaller than an interval are not excluded."
        if repeated
        else "One seed gives no interval, so it does not show whether accuracies agree."
    )
    return [
        f"Over all {len(pairs)} pairs losses are {', and '.join(sentences)}; accuracy differs by "
        f"{statistics.mean(differences):+.2f} points on average, {max(map(abs, differences)):.2f} at most. "
        f"{closing}",
    ]
