"""What every board shares: variables, links, annotations, and the grid's rows."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.models import dashboard as model

from podscale.monitoring.dashboards.panels import DATASOURCE, Panel
from podscale.monitoring.dashboards.queries import BY_RUN, max_query, series_selector
from podscale.monitoring.rule import RUNBOOKS_TOKEN
from podscale.telemetry.catalogue import FIRST_LAUNCH

with warnings.catch_warnings():  # see panels
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import dashboard

TAG = "podscale"
EVENT_STEP = "15s"


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. rows: heading and panels, in their order. runs: whether several runs may be shown at once."""

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
    """The board in Grafana's terms."""
    built = dashboard.Dashboard(f"Podscale / {board.title}").uid(board.uid).description(board.description)
    built.tags([TAG]).readonly().timezone("browser").time(board.span, "now").refresh("30s")
    built.tooltip(model.DashboardCursorSync.CROSSHAIR)
    built.variables(
        [
            _datasource_variable(),
            _namespace_variable(),
            _run_variable(several=board.runs),
            *([_rank_variable()] if board.ranks else []),
        ]
    )
    built.links([_dashboard_links(), _runbooks_link()])
    if board.events:
        built.annotations([*_event_annotations()])
    for heading, panels in board.rows.items():
        built.with_row(dashboard.Row(heading))
        for panel in panels:
            built.with_panel(panel)
    done = built.build()
    for place, item in enumerate(done.panels or [], start=1):
        item.id_val = place
    return done


def _datasource_variable() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _query_variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    asked: dict[str, object] = {"query": query, "refId": name}
    variable = dashboard.QueryVariable(name).label(label).datasource(DATASOURCE).query(asked).definition(query)
    variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return variable.sort(model.VariableSort.NATURAL_ASC)


def _allow_all(variable: dashboard.QueryVariable, value: str) -> dashboard.QueryVariable:
    chosen = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    return variable.multi(True).include_all(True).all_value(value).current(chosen)


def _namespace_variable() -> dashboard.QueryVariable:
    # Not `.+`: a Prometheus outside Kubernetes gives its series no such label, and `.*` matches that too.
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
    """Vertical marks at the times that gauges tell: exact, however seldom they are scraped."""
    first = f'cause!="{FIRST_LAUNCH}"'
    return [
        _event_annotation(
            "Restarts",
            "red",
            _event_times("train_launch_timestamp_seconds", first, by=f"{BY_RUN}, cause"),
            "{{run}}: started again after {{cause}}",
        ),
        _event_annotation(
            "Checkpoints",
            "blue",
            _event_times("train_checkpoint_last_success_timestamp_seconds"),
            "{{run}}: checkpoint complete",
        ),
        _event_annotation(
            "Evaluations", "green", _event_times("eval_last_timestamp_seconds"), "{{run}}: evaluation complete"
        ),
    ]


def _event_times(name: str, *matchers: str, by: str = BY_RUN) -> str:
    """What a gauge tells in milliseconds."""
    return f"{max_query(name, by, *matchers)} * 1000"


def _event_annotation(name: str, color: str, expression: str, text: str) -> dashboard.AnnotationQuery:
    """expression: its values are the times of the marks, in milliseconds since 1970."""
    event = (
        dashboard.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(color).expr(expression)
    )
    return event.step(EVENT_STEP).title_format(name).text_format(text).tag_keys("run").use_value_for_time(True)
