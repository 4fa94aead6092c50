"""All rules, in the groups in which Prometheus evaluates them."""

from podscale.monitoring import alerts, recordings
from podscale.monitoring.rule import Alert, Group, Recording

GROUPS = (
    Group("podscale-throughput", recordings.THROUGHPUT),
    Group("podscale-time", recordings.TIME),
    Group("podscale-state", recordings.STATE),
    Group("podscale-hardware", recordings.HARDWARE),
    Group("podscale-progress-alerts", alerts.PROGRESS),
    Group("podscale-numerics-alerts", alerts.NUMERICS),
    Group("podscale-lives-alerts", alerts.LIVES),
    Group("podscale-place-alerts", alerts.PLACE),
)
RECORDINGS = tuple(rule for group in GROUPS for rule in group.rules if isinstance(rule, Recording))
ALERTS = tuple(rule for group in GROUPS for rule in group.rules if isinstance(rule, Alert))
