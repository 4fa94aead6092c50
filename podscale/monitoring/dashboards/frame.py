"""What every board shares: variables, links, annotations, and the grid's rows."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podscale.monitoring.dashboards.panels import SOURCE, Panel
from podscale.monitoring.dashboards.queries import BY_RUN, largest, series
from podscale.monitoring.rule import RUNBOOKS
from podscale.telemetry.catalogue import FIRST

with warnings.catch_warnings():  # see panels
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as model

TAG = "podscale"
EVENT_STEP = "15s"


@dataclass(frozen=True)
class Board:
    """One dashboard. rows: heading and panels, in their order. runs: whether several runs may be shown at once."""

    name: str
    title: str
    text: str
    rows: Mapping[str, Sequence[Panel]]
    runs: bool = True
    ranks: bool = False
    events: bool = True
    span: str = "now-3h"

    @property
    def uid(self) -> str:
        return f"podscale-{self.name}"


def build(board: Board) -> model.Dashboard:
    """The board in Grafana's terms."""
    built = dashboard.Dashboard(f"Podscale / {board.title}").uid(board.uid).description(board.text)
    built.tags([TAG]).readonly().timezone("browser").time(board.span, "now").refresh("30s")
    built.tooltip(model.DashboardCursorSync.CROSSHAIR)
    built.variables([_source(), _namespace(), _run(several=board.runs), *([_rank()] if board.ranks else [])])
    built.links([_boards(), _runbooks()])
    if board.events:
        built.annotations([*_events()])
    for heading, panels in board.rows.items():
        built.with_row(dashboard.Row(heading))
        for panel in panels:
            built.with_panel(panel)
    done = built.build()
    for place, item in enumerate(done.panels or [], start=1):
        item.id_val = place
    return done


def _source() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _query(name: str, label: str, query: str) -> dashboard.QueryVariable:
    asked: dict[str, object] = {"query": query, "refId": name}
    variable = dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(asked).definition(query)
    variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return variable.sort(model.VariableSort.NATURAL_ASC)


def _all(variable: dashboard.QueryVariable, value: str) -> dashboard.QueryVariable:
    chosen = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    return variable.multi(True).include_all(True).all_value(value).current(chosen)


def _namespace() -> dashboard.QueryVariable:
    # Not `.+`: a Prometheus outside Kubernetes gives its series no such label, and `.*` matches that too.
    return _all(_query("namespace", "Namespace", "label_values(podscale_build_info, namespace)"), ".*")


def _run(*, several: bool) -> dashboard.QueryVariable:
    variable = _query("run", "Run", 'label_values(podscale_build_info{namespace=~"$namespace"}, run)')
    return _all(variable, ".+") if several else variable


def _rank() -> dashboard.QueryVariable:
    return _all(_query("rank", "Rank", f"label_values({series('train_images')}, rank)"), ".+")


def _boards() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Podscale").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.icon("external link").include_vars(True).keep_time(True).placement("")


def _runbooks() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Runbooks").type(model.DashboardLinkType.LINK).url(RUNBOOKS).target_blank(True)
    return link.icon("doc").tooltip("What each alert means and what to do").placement("")


def _events() -> Sequence[dashboard.AnnotationQuery]:
    """Vertical marks at the times that gauges tell: exact, however seldom they are scraped."""
    first = f'cause!="{FIRST}"'
    return [
        _event(
            "Restarts",
            "red",
            _times("train_launch_timestamp_seconds", first, by=f"{BY_RUN}, cause"),
            "{{run}}: started again after {{cause}}",
        ),
        _event(
            "Checkpoints",
            "blue",
            _times("train_checkpoint_last_success_timestamp_seconds"),
            "{{run}}: checkpoint complete",
        ),
        _event("Evaluations", "green", _times("eval_last_timestamp_seconds"), "{{run}}: evaluation complete"),
    ]


def _times(name: str, *matchers: str, by: str = BY_RUN) -> str:
    """What a gauge tells in milliseconds."""
    return f"{largest(name, by, *matchers)} * 1000"


def _event(name: str, color: str, expression: str, text: str) -> dashboard.AnnotationQuery:
    """expression: its values are the times of the marks, in milliseconds since 1970."""
    event = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(color).expr(expression)
    return event.step(EVENT_STEP).title_format(name).text_format(text).tag_keys("run").use_value_for_time(True)
