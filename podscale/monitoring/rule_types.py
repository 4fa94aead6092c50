"""Types of recording and alert rules, and the thresholds of the alerts with their reasons.

In texts, `@name@` is a threshold or the runbooks' address. In expressions, `@1h@` is that duration in seconds.
`podscale rules export --threshold` and the chart set thresholds.

All rules work on Prometheus 2.42 (Debian 12), the oldest supported version. Every rule is grouped by namespace and run,
so that runs do not mix. Outside Kubernetes the namespace is empty, which PromQL treats as absent.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AlertSeverity = Literal["critical", "warning"]
RUNBOOKS_TOKEN = "@runbooks@"
_TOKEN = re.compile(r"@([a-zA-Z]\w*)@")


@dataclass(frozen=True)
class RecordingRule:
    """Precomputed series, named `level:podscale_what:operation`; `meaning` describes it, with its unit."""

    name: str
    expr: str
    meaning: str


@dataclass(frozen=True)
class AlertRule:
    """Condition that needs an operator; `hold_for` is Prometheus' `for`."""

    name: str
    expr: str
    hold_for: str
    severity: AlertSeverity
    summary: str
    description: str

    @property
    def runbook(self) -> str:
        """File name in docs/runbooks/."""
        return f"{self.name}.md"


@dataclass(frozen=True)
class Threshold:
    """Site-specific limit of an alert; the chart has a value of the same name."""

    name: str
    default: float
    meaning: str


@dataclass(frozen=True)
class RuleGroup:
    """Rules that are evaluated together, in order."""

    name: str
    rules: tuple[RecordingRule | AlertRule, ...]


def fill_tokens(text: str, values: Mapping[str, str]) -> str:
    """Replace every `@name@` in the text. Raises KeyError for a name that is not in `values`."""
    return _TOKEN.sub(lambda token: values[token[1]], text)


def find_tokens(text: str) -> set[str]:
    return set(_TOKEN.findall(text))


THRESHOLDS = (
    Threshold(
        "throughputShare",
        0.8,
        "PodscaleThroughputRegressed: least share of the run's own median. Windows of five minutes of a healthy run "
        "differ by a few percent; a fifth is a slower link, clock or volume.",
    ),
    Threshold(
        "dataWaitShare",
        0.2,
        "PodscaleDataStarved: most time that a rank may wait for images. A loader that keeps up costs none; at a fifth "
        "every fifth chip is paid for nothing.",
    ),
    Threshold(
        "stragglerRatio",
        1.25,
        "PodscaleStraggler: most busy time of a rank over that of the lower quartile of the ranks. All wait for the "
        "slowest, so 1.25 costs a run up to a fifth of its throughput.",
    ),
    Threshold(
        "checkpointIntervals",
        2,
        "PodscaleCheckpointStale: most age of the newest checkpoint, in intervals of the run document. One save may be "
        "late or passed over; two cost more than the document allows.",
    ),
    Threshold(
        "nonfiniteShare",
        0.01,
        "PodscaleNonFiniteSteps: most steps with a non-finite loss or gradient. Loss scaling of fp16 provokes one in "
        "about two thousand.",
    ),
    Threshold(
        "skippedStepsShare",
        0.1,
        "PodscaleStepsSkippedHigh: most steps that are masked. Beyond a tenth the schedule of the learning rate is "
        "no longer the one that was asked for.",
    ),
    Threshold(
        "restartsPerHour",
        3,
        "PodscaleRestartLoop: restarts within an hour. Two can be one bad node, and the node that took its place.",
    ),
    Threshold(
        "goodputShare",
        0.7,
        "PodscaleGoodputLow: least share of an hour that went into steps that last. Start, compilation, evaluations "
        "and checkpoints of a long run take a tenth or less.",
    ),
    Threshold(
        "skippedSamplesShare",
        0.0005,
        "PodscaleSamplesSkippedHigh: most images that could not be decoded. Sharding has decoded every one of them, so "
        "any is a sign of damage; at `input.max_bad_rate` (0.001) the run ends.",
    ),
    Threshold(
        "diskFullHours",
        4,
        "PodscaleDiskFilling: a volume that would be full within so many hours at the last hour's pace. Time enough "
        "for somebody to free space during a night.",
    ),
    Threshold(
        "diskFreeShare",
        0.05,
        "PodscaleDiskFilling: least free share of a volume, whatever the pace. A checkpoint needs its own size twice "
        "while it is written.",
    ),
    Threshold(
        "seriesPerTarget",
        5000,
        "PodscaleSeriesLimitExceeded: most series of one pod. Eight ranks have about 150 each.",
    ),
    Threshold(
        "gpuCelsius",
        85,
        "PodscaleGPUThermal: highest temperature of a GPU. A few degrees above it data-centre GPUs lower their clocks; "
        "`nvidia-smi -q -d TEMPERATURE` tells the limits of yours.",
    ),
)
DEFAULT_THRESHOLDS = {threshold.name: threshold.default for threshold in THRESHOLDS}
