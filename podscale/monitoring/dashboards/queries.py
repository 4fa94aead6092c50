"""PromQL over the series of the catalogue: names come from there alone, and every selector obeys the variables.

The variables match by regular expression and `All` of namespaces is `.*`, so that series without that label (a
Prometheus beside a run on one machine) are found as well. No recording rule is used: the boards work without rules.
"""

from podscale.telemetry.catalogue import CATALOGUE

BY_RUN = "namespace, run"
BY_RANK = "namespace, run, rank"
SECONDS = "$__rate_interval"
SHOWN = "$__range"


def series(name: str, *matchers: str, suffix: str = "", ranks: bool = False) -> str:
    """The selector of a metric of the catalogue, of the chosen runs and, with `ranks`, the chosen ranks alone."""
    chosen = ['namespace=~"$namespace"', 'run=~"$run"', *(['rank=~"$rank"'] if ranks else []), *matchers]
    return f"{CATALOGUE[name].series}{suffix}{{{', '.join(chosen)}}}"


def rate(name: str, by: str, *matchers: str, suffix: str = "", ranks: bool = False) -> str:
    """Growth of a counter a second, summed."""
    return f"sum by ({by}) (rate({series(name, *matchers, suffix=suffix, ranks=ranks)}[{SECONDS}]))"


def grown(name: str, by: str, *matchers: str, ranks: bool = False) -> str:
    """Growth of a counter over the time shown, summed; whole, since `increase` extrapolates."""
    return f"round(sum by ({by}) (increase({series(name, *matchers, ranks=ranks)}[{SHOWN}])))"


def largest(name: str, by: str, *matchers: str, ranks: bool = False) -> str:
    """A gauge that every rank may export alike."""
    return f"max by ({by}) ({series(name, *matchers, ranks=ranks)})"


def share(name: str, by: str, of: str, *matchers: str, ranks: bool = False) -> str:
    """Growth of the part of a counter that `matchers` choose, by `of` more labels, over that of all of it."""
    part = rate(name, ", ".join(filter(None, (by, of))), *matchers, ranks=ranks)
    whole = rate(name, by, ranks=ranks)
    return f"{part} / on ({by}) group_left () {whole}" if of else f"{part} / {whole}"


def quantile(portion: float, name: str, by: str, *, ranks: bool = False) -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({portion}, {rate(name, f'{by}, le', suffix='_bucket', ranks=ranks)})"


IMAGES = rate("train_images", BY_RUN)
IMAGES_PER_RANK = f"{IMAGES} / {largest('train_world_size', BY_RUN)}"
FLOPS = rate("train_model_flops", BY_RUN)
MFU = f"{FLOPS} / sum by ({BY_RUN}) ({series('train_peak_flops')})"
STEPS = f"max by ({BY_RUN}) (rate({series('train_steps')}[{SECONDS}]))"
LEFT = (
    f"({largest('train_planned_steps', BY_RUN)} - {largest('train_completed_steps', BY_RUN)}) / ({STEPS} > 0)"
    f" unless on ({BY_RUN}) {largest('train_done', BY_RUN)} == 1"
)
PROGRESS = f"{largest('train_completed_steps', BY_RUN)} / {largest('train_planned_steps', BY_RUN)}"
DATA_WAIT = share("train_phase_seconds", BY_RUN, "", 'phase="data_wait"')
SPENT = f"sum by ({BY_RUN}) (increase({series('train_wall_seconds')}[{SHOWN}]))"
KEPT = series("train_wall_seconds", 'state="productive"')
GOODPUT = f"sum by ({BY_RUN}) (increase({KEPT}[{SHOWN}])) / {SPENT}"
CHECKPOINT_AGE = f"time() - {largest('train_checkpoint_last_success_timestamp_seconds', BY_RUN)}"
BUSY = f"{rate('train_busy_seconds', BY_RANK, ranks=True)} / {rate('train_steps', BY_RANK, ranks=True)}"
