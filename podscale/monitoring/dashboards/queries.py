"""PromQL over the series of the catalogue: names come from there alone, and every selector obeys the variables.

The variables match by regular expression and `All` of namespaces is `.*`, so that series without that label (a
Prometheus beside a run on one machine) are found as well. No recording rule is used: the boards work without rules.
"""

from podscale.telemetry.catalogue import CATALOGUE

BY_RUN = "namespace, run"
BY_RANK = "namespace, run, rank"
BY_STATE = "namespace, run, state"
RATE_INTERVAL = "$__rate_interval"
RANGE = "$__range"
RECENT_RANGE = "5m"
"""Long enough for most restarts: what was lost is booked after them."""


def series_selector(name: str, *matchers: str, suffix: str = "", ranks: bool = False) -> str:
    """The selector of a metric of the catalogue, of the chosen runs and, with `ranks`, the chosen ranks alone."""
    chosen = ['namespace=~"$namespace"', 'run=~"$run"', *(['rank=~"$rank"'] if ranks else []), *matchers]
    return f"{CATALOGUE[name].series}{suffix}{{{', '.join(chosen)}}}"


def rate_query(name: str, by: str, *matchers: str, suffix: str = "", ranks: bool = False) -> str:
    """Growth of a counter a second, summed."""
    return f"sum by ({by}) (rate({series_selector(name, *matchers, suffix=suffix, ranks=ranks)}[{RATE_INTERVAL}]))"


def max_query(name: str, by: str, *matchers: str, ranks: bool = False) -> str:
    """A gauge that every rank may export alike."""
    return f"max by ({by}) ({series_selector(name, *matchers, ranks=ranks)})"


def last_query(name: str, by: str) -> str:
    """A gauge as it was last seen in the time shown: of runs that have ended, too."""
    return f"max by ({by}) (last_over_time({series_selector(name)}[{RANGE}]))"


def increase_query(name: str, by: str, *matchers: str, suffix: str = "") -> str:
    """Growth of a counter over the time shown, summed, as `increase` extrapolates it."""
    return f"sum by ({by}) (increase({series_selector(name, *matchers, suffix=suffix)}[{RANGE}]))"


def integer_increase_query(name: str, by: str, *matchers: str) -> str:
    """Growth of a counter over the time shown, as a whole number."""
    return f"round({increase_query(name, by, *matchers)})"


def total_increase_query(name: str, by: str, window: str, *matchers: str) -> str:
    """Growth of a total that is kept over all lives of a run.

    A pod that starts again exports it under a new address, perhaps a heartbeat behind: `increase` would lose what was
    booked between, or count it all again. The span between least and most cannot be misled.
    """
    found = f"{series_selector(name, *matchers)}[{window}]"
    return f"max by ({by}) (max_over_time({found})) - min by ({by}) (min_over_time({found}))"


def fraction_query(name: str, by: str, of: str, *matchers: str, ranks: bool = False) -> str:
    """Growth of the part of a counter that `matchers` choose, by `of` more labels, over that of all of it."""
    part = rate_query(name, ", ".join(filter(None, (by, of))), *matchers, ranks=ranks)
    whole = rate_query(name, by, ranks=ranks)
    return f"{part} / on ({by}) group_left () ({whole} > 0)" if of else f"{part} / ({whole} > 0)"


def quantile_query(portion: float, name: str, by: str, *, ranks: bool = False) -> str:
    """A quantile of a histogram; nothing, instead of NaN, where nothing was observed."""
    return f"histogram_quantile({portion}, {rate_query(name, f'{by}, le', suffix='_bucket', ranks=ranks)}) >= 0"


PRODUCTIVE = 'state="productive"'
UNPRODUCTIVE = 'state!="productive"'
IMAGES = rate_query("train_images", BY_RUN)
IMAGES_PER_RANK = f"{IMAGES} / {max_query('train_world_size', BY_RUN)}"
FLOPS = rate_query("train_model_flops", BY_RUN)
MFU = f"{FLOPS} / sum by ({BY_RUN}) ({series_selector('train_peak_flops')})"
STEPS = f"max by ({BY_RUN}) (rate({series_selector('train_steps')}[{RATE_INTERVAL}]))"
SECONDS_LEFT = (
    f"({max_query('train_planned_steps', BY_RUN)} - {max_query('train_completed_steps', BY_RUN)}) / ({STEPS} > 0)"
    f" unless on ({BY_RUN}) {max_query('train_done', BY_RUN)} == 1"
)
PROGRESS = f"{max_query('train_completed_steps', BY_RUN)} / {max_query('train_planned_steps', BY_RUN)}"
DATA_WAIT = fraction_query("train_phase_seconds", BY_RUN, "", 'phase="data_wait"')
WALL_SECONDS = f"(sum by ({BY_RUN}) ({total_increase_query('train_wall_seconds', BY_STATE, RANGE)}) > 0)"
GOODPUT = (
    f"sum by ({BY_RUN}) ({total_increase_query('train_wall_seconds', BY_STATE, RANGE, PRODUCTIVE)}) / {WALL_SECONDS}"
)
RECENT_WALL_SECONDS = f"(sum by ({BY_RUN}) ({total_increase_query('train_wall_seconds', BY_STATE, RECENT_RANGE)}) > 0)"
RECENT_GOODPUT = f"sum by ({BY_RUN}) ({total_increase_query('train_wall_seconds', BY_STATE, RECENT_RANGE, PRODUCTIVE)}) / {RECENT_WALL_SECONDS}"
RESTARTS = f"sum by ({BY_RUN}) (max by ({BY_RUN}, cause) ({series_selector('train_restarts')}))"
CHECKPOINT_AGE = f"time() - {max_query('train_checkpoint_last_success_timestamp_seconds', BY_RUN)}"
BUSY_FRACTION = (
    f"{rate_query('train_busy_seconds', BY_RANK, ranks=True)} / ({rate_query('train_steps', BY_RANK, ranks=True)} > 0)"
)
