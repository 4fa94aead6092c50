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
        "PodscaleThroughputRegressed: minimum fraction of the run's own median. Five-minute windows of a healthy "
        "run differ by a few percent. A loss of a fifth means a slower link, clock or volume.",
    ),
    Threshold(
        "dataWaitShare",
        0.2,
        "PodscaleDataStarved: maximum fraction of a rank's time spent waiting for images. With a loader that keeps "
        "up it is near 0. At 0.2, a fifth of the chips' cost is wasted.",
    ),
    Threshold(
        "stragglerRatio",
        1.25,
        "PodscaleStraggler: maximum busy time of a rank over the lower quartile of all ranks. All ranks wait for the "
        "slowest, so 1.25 costs a run up to a fifth of its throughput.",
    ),
    Threshold(
        "checkpointIntervals",
        2,
        "PodscaleCheckpointStale: maximum age of the newest checkpoint, in intervals of the run document. One save "
        "may be late or skipped. Two lose more work than the document allows.",
    ),
    Threshold(
        "nonfiniteShare",
        0.01,
        "PodscaleNonFiniteSteps: maximum fraction of steps with a non-finite loss or gradient. Loss scaling of fp16 "
        "causes one in about two thousand.",
    ),
    Threshold(
        "skippedStepsShare",
        0.1,
        "PodscaleStepsSkippedHigh: maximum fraction of masked steps. Above a tenth, the run no longer follows its "
        "learning-rate schedule.",
    ),
    Threshold(
        "restartsPerHour",
        3,
        "PodscaleRestartLoop: restarts within an hour. Two can come from one bad node and the node that replaced it.",
    ),
    Threshold(
        "goodputShare",
        0.7,
        "PodscaleGoodputLow: minimum fraction of an hour spent on steps that were kept. Start, compilation, "
        "evaluations and checkpoints of a long run take a tenth or less.",
    ),
    Threshold(
        "skippedSamplesShare",
        0.0005,
        "PodscaleSamplesSkippedHigh: maximum fraction of images that could not be decoded. Sharding decoded all of "
        "them, so each one is a sign of damage. At `input.max_bad_rate` (0.001) the run fails.",
    ),
    Threshold(
        "diskFullHours",
        4,
        "PodscaleDiskFilling: hours until a volume is full at the rate of the last hour. Four hours are enough to "
        "free space during a night.",
    ),
    Threshold(
        "diskFreeShare",
        0.05,
        "PodscaleDiskFilling: minimum free fraction of a volume, at any rate. A checkpoint needs twice its own size "
        "while it is written.",
    ),
    Threshold(
        "seriesPerTarget",
        5000,
        "PodscaleSeriesLimitExceeded: maximum series of one pod. A pod of eight ranks exports about 150 for each rank.",
    ),
    Threshold(
        "gpuCelsius",
        85,
        "PodscaleGPUThermal: maximum temperature of a GPU, degrees Celsius. A few degrees above it, data-centre GPUs "
        "lower their clocks. `nvidia-smi -q -d TEMPERATURE` prints the limits of your GPU.",
    ),
)
DEFAULT_THRESHOLDS = {threshold.name: threshold.default for threshold in THRESHOLDS}
