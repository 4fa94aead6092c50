"""Common parts of the dashboards: PromQL helpers, variables, links, annotations and rows.

Metric names come from the catalogue. Every selector uses the variables, which match by regular expression: `.*` for all
namespaces also matches series without that label, as from a Prometheus beside a local run. No query needs recording
rules.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.models import dashboard as model

from podscale.monitoring.dashboards.panels import DATASOURCE, Panel
from podscale.monitoring.rule_types import RUNBOOKS_TOKEN
from podscale.telemetry.catalogue import CATALOGUE, FIRST_LAUNCH

with warnings.catch_warnings():  # see panels
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import dashboard

TAG = "podscale"
EVENT_STEP = "15s"
BY_RUN = "namespace, run"
BY_RANK = "namespace, run, rank"
BY_STATE = "namespace, run, state"
RATE_INTERVAL = "$__rate_interval"
RANGE = "$__range"
RECENT_RANGE = "5m"
"""Longer than most restarts, because the time of a restart is exported when it is over."""


def series_selector(name: str, *matchers: str, suffix: str = "", ranks: bool = False) -> str:
    """Return the selector of a catalogue metric for the selected runs and, with `ranks`, the selected ranks."""
    variables = ['namespace=~"$namespace"', 'run=~"$run"', *(['rank=~"$rank"'] if ranks else [])]
    return f"{CATALOGUE[name].series}{suffix}{{{', '.join([*variables, *matchers])}}}"


def rate_query(name: str, by: str, *matchers: str, suffix: str = "", ranks: bool = False) -> str:
    """Return a query for the summed per-second rate of a counter."""
    return f"sum by ({by}) (rate({series_selector(name, *matchers, suffix=suffix, ranks=ranks)}[{RATE_INTERVAL}]))"


def max_query(name: str, by: str, *matchers: str, ranks: bool = False) -> str:
    """Return a query for the maximum of a gauge that several ranks may export."""
    return f"max by ({by}) ({series_selector(name, *matchers, ranks=ranks)})"


def last_query(name: str, by: str) -> str:
    """Return a query for the last value of a gauge in the displayed time, also of finished runs."""
    return f"max by ({by}) (last_over_time({series_selector(name)}[{RANGE}]))"


def increase_query(name: str, by: str, *matchers: str, suffix: str = "") -> str:
    """Return a query for the summed increase of a counter over the displayed time, extrapolated."""
    return f"sum by ({by}) (increase({series_selector(name, *matchers, suffix=suffix)}[{RANGE}]))"


def integer_increase_query(name: str, by: str, *matchers: str) -> str:
    """Return a query for the increase of a counter over the displayed time, rounded to an integer."""
    return f"round({increase_query(name, by, *matchers)})"


def total_increase_query(name: str, by: str, window: str, *matchers: str) -> str:
    """Return a query for the increase of a total over all launches of a run, as maximum minus minimum.

    A restarted pod exports it as a new series, perhaps a heartbeat behind. `increase` would lose or repeat a part.
    """
    series = f"{series_selector(name, *matchers)}[{window}]"
    return f"max by ({by}) (max_over_time({series})) - min by ({by}) (min_over_time({series}))"


def fraction_query(name: str, by: str, of: str, *matchers: str, ranks: bool = False) -> str:
    """Return a query for the fraction of a counter's rate that `matchers` select, by `of` additional labels."""
    part = rate_query(name, ", ".join(filter(None, (by, of))), *matchers, ranks=ranks)
    total = rate_query(name, by, ranks=ranks)
    return f"{part} / on ({by}) group_left () ({total} > 0)" if of else f"{part} / ({total} > 0)"


def quantile_query(portion: float, name: str, by: str, *, ranks: bool = False) -> str:
    """Return a query for the quantile `portion` (0 to 1) of a histogram; it has no value without observations."""
    return f"histogram_quantile({portion}, {rate_query(name, f'{by}, le', suffix='_bucket', ranks=ranks)}) >= 0"


PRODUCTIVE = 'state="productive"'
UNPRODUCTIVE = 'state!="productive"'
IMAGES = rate_query("train_images", BY_RUN)
IMAGES_PER_RANK = f"{IMAGES} / {max_query('train_world_size', BY_RUN)}"
FLOPS = rate_query("train_model_flops", BY_RUN)
MFU = f"{FLOPS} / sum by ({BY_RUN}) ({series_selector('train_peak_flops')})"
SECONDS_LEFT = (
    f"{max_query('train_images_left', BY_RUN)} / ({IMAGES} > 0)"
    f" unless on ({BY_RUN}) {max_query('train_done', BY_RUN)} == 1"
)
PROGRESS = f"{max_query('train_completed_steps', BY_RUN)} / {max_query('train_planned_steps', BY_RUN)}"
DATA_WAIT = fraction_query("train_phase_seconds", BY_RUN, "", 'phase="data_wait"')
WALL_SECONDS = f"(sum by ({BY_RUN}) ({total_increase_query('train_wall_seconds', BY_STATE, RANGE)}) > 0)"
GOODPUT = (
    f"sum by ({BY_RUN}) ({total_increase_query('train_wall_seconds', BY_STATE, RANGE, PRODUCTIVE)}) / {WALL_SECONDS}"
)
RECENT_WALL_SECONDS = f"(sum by ({BY_RUN}) ({total_increase_query('train_wall_seconds', BY_STATE, RECENT_RANGE)}) > 0)"
RECENT_GOODPUT = (
    f"sum by ({BY_RUN}) ({total_increase_query('train_wall_seconds', BY_STATE, RECENT_RANGE, PRODUCTIVE)}) / "
    f"{RECENT_WALL_SECONDS}"
)
RESTARTS = f"sum by ({BY_RUN}) (max by ({BY_RUN}, cause) ({series_selector('train_restarts')}))"
CHECKPOINT_AGE = f"time() - {max_query('train_checkpoint_last_success_timestamp_seconds', BY_RUN)}"
BUSY_FRACTION = (
    f"{rate_query('train_busy_seconds', BY_RANK, ranks=True)} / ({rate_query('train_steps', BY_RANK, ranks=True)} > 0)"
)


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. `rows` are headings and panels; `runs` is True if several runs can be shown at once."""

    name: str
    title: str
    description: str
    rows: Mapping[str, Sequence[Panel]]
    runs: bool = True
    ranks: bool = False
    events: bool = True
    span: str = "now-3h"

    @property
    def uid(self) -> str:
        return f"podscale-{self.name}"


def build_dashboard(board: Dashboard) -> model.Dashboard:
    built = dashboard.Dashboard(f"Podscale / {board.title}").uid(board.uid).description(board.description)
    built.tags([TAG]).readonly().timezone("browser").time(board.span, "now").refresh("30s")
    built.tooltip(model.DashboardCursorSync.CROSSHAIR)
    variables = [_datasource_variable(), _namespace_variable(), _run_variable(several=board.runs)]
    built.variables([*variables, _rank_variable()] if board.ranks else variables)
    built.links([_dashboard_links(), _runbooks_link()])
    if board.events:
        built.annotations([*_event_annotations()])
    for heading, panels in board.rows.items():
        built.with_row(dashboard.Row(heading))
        for panel in panels:
            built.with_panel(panel)
    result = built.build()
    for number, item in enumerate(result.panels or [], start=1):
        item.id_val = number
    return result


def _datasource_variable() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _query_variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    model_query: dict[str, object] = {"query": query, "refId": name}
    variable = dashboard.QueryVariable(name).label(label).datasource(DATASOURCE).query(model_query).definition(query)
    variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return variable.sort(model.VariableSort.NATURAL_ASC)


def _allow_all(variable: dashboard.QueryVariable, value: str) -> dashboard.QueryVariable:
    current = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    return variable.multi(True).include_all(True).all_value(value).current(current)


def _namespace_variable() -> dashboard.QueryVariable:
    # `.*` also matches series without this label, as from a Prometheus outside Kubernetes; `.+` does not.
    return _allow_all(_query_variable("namespace", "Namespace", "label_values(podscale_build_info, namespace)"), ".*")


def _run_variable(*, several: bool) -> dashboard.QueryVariable:
    variable = _query_variable("run", "Run", 'label_values(podscale_build_info{namespace=~"$namespace"}, run)')
    return _allow_all(variable, ".+") if several else variable


def _rank_variable() -> dashboard.QueryVariable:
    return _allow_all(_query_variable("rank", "Rank", f"label_values({series_selector('train_images')}, rank)"), ".+")


def _dashboard_links() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Podscale").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.icon("external link").include_vars(True).keep_time(True).placement("")


def _runbooks_link() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Runbooks").type(model.DashboardLinkType.LINK).url(RUNBOOKS_TOKEN).target_blank(True)
    return link.icon("doc").tooltip("What each alert means and what to do").placement("")


def _event_annotations() -> Sequence[dashboard.AnnotationQuery]:
    """Return annotations at the times in gauges, which do not depend on the scrape interval."""
    restarts = max_query("train_launch_timestamp_seconds", f"{BY_RUN}, cause", f'cause!="{FIRST_LAUNCH}"')
    checkpoints = max_query("train_checkpoint_last_success_timestamp_seconds", BY_RUN)
    evaluations = max_query("eval_last_timestamp_seconds", BY_RUN)
    return [
        _event_annotation("Restarts", "red", restarts, "{{run}}: restarted after {{cause}}"),
        _event_annotation("Checkpoints", "blue", checkpoints, "{{run}}: checkpoint complete"),
        _event_annotation("Evaluations", "green", evaluations, "{{run}}: evaluation complete"),
    ]


def _event_annotation(name: str, color: str, seconds: str, text: str) -> dashboard.AnnotationQuery:
    """Return an annotation query; `seconds` is PromQL for the annotations' times, unix seconds."""
    event = dashboard.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(color)
    event.expr(f"{seconds} * 1000")
    return event.step(EVENT_STEP).title_format(name).text_format(text).tag_keys("run").use_value_for_time(True)
