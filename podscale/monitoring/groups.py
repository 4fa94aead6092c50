"""All rules, in the groups in which Prometheus evaluates them."""

from podscale.monitoring import alerts, recordings
from podscale.monitoring.rule import AlertRule, RecordingRule, RuleGroup

RULE_GROUPS = (
    RuleGroup("podscale-throughput", recordings.THROUGHPUT_RULES),
    RuleGroup("podscale-time", recordings.TIME_RULES),
    RuleGroup("podscale-state", recordings.STATE_RULES),
    RuleGroup("podscale-hardware", recordings.HARDWARE_RULES),
    RuleGroup("podscale-progress-alerts", alerts.PROGRESS_ALERTS),
    RuleGroup("podscale-numerics-alerts", alerts.NUMERICS_ALERTS),
    RuleGroup("podscale-lives-alerts", alerts.RESTART_ALERTS),
    RuleGroup("podscale-place-alerts", alerts.RESOURCE_ALERTS),
)
RECORDING_RULES = tuple(rule for group in RULE_GROUPS for rule in group.rules if isinstance(rule, RecordingRule))
ALERT_RULES = tuple(rule for group in RULE_GROUPS for rule in group.rules if isinstance(rule, AlertRule))
