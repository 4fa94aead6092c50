"""Catalogue of all metrics: name, type, labels, exporter and meaning.

Exporters create their families from these entries only. Tests compare docs/reference/metrics.md, rules and
dashboards with it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

PREFIX = "podscale_"
MetricKind = Literal["counter", "gauge", "histogram", "summary", "info"]
Exporter = Literal["every rank", "rank 0", "sharding", "supervisor", "server"]
FAMILIES: Mapping[MetricKind, Callable[..., Metric]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "summary": SummaryMetricFamily,
}
RANK_LABELS = ("run", "rank")
POD_LABELS = ("run",)
SERVER_LABELS = ("model", "process")
COMMON_LABELS: Mapping[Exporter, tuple[str, ...]] = {
    "every rank": RANK_LABELS,
    "rank 0": RANK_LABELS,
    "sharding": POD_LABELS,
    "supervisor": POD_LABELS,
    "server": SERVER_LABELS,
}


@dataclass(frozen=True)
class MetricSpec:
    """One metric; `name` is without prefix and `_total`."""

    name: str
    kind: MetricKind
    exporter: Exporter
    meaning: str
    unit: str = ""
    own_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Labels in addition to the common ones, with their values; an empty tuple stands for an open but bounded set."""

    @property
    def labels(self) -> tuple[str, ...]:
        return (*COMMON_LABELS[self.exporter], *self.own_labels)

    @property
    def series(self) -> str:
        """Name in PromQL, without the suffixes of a histogram or summary."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    def family(self) -> Metric:
        """Return an empty family; its samples have the values of `labels`, in that order."""
        assert self.kind != "info", "use info()"
        return FAMILIES[self.kind](f"{PREFIX}{self.name}", self.meaning, labels=self.labels)

    def info(self, labels: Mapping[str, str]) -> Metric:
        """Return the family of an info with its one sample; `labels` include the common ones.

        It is a gauge that is always 1, because the text format has no infos.
        """
        assert self.kind == "info"
        family = GaugeMetricFamily(f"{PREFIX}{self.name}", self.meaning, labels=[*labels])
        family.add_metric([*labels.values()], 1)
        return family


PHASE_LABEL = {
    "phase": (
        "data_wait",
        "h2d",
        "forward_backward",
        "allreduce_wait",
        "optimizer",
        "checkpoint",
        "evaluation",
        "other",
    )
}
GOODPUT_STATES = (
    "productive",
    "init",
    "compile",
    "data_wait",
    "checkpoint_save",
    "checkpoint_restore",
    "evaluation",
    "redo",
    "recovery",
    "idle",
)
"""States of a run's wall time; only `productive` counts as goodput."""
RESTART_CAUSES = ("preempted", "lost_rank", "hang", "failed")
FIRST_LAUNCH = "first"
LAUNCH_CAUSES = (FIRST_LAUNCH, "done", *RESTART_CAUSES)
"""Causes of a launch: the exit of the previous launch, or `first`."""
STARTUP_PARTS = (
    "scheduling",
    "pull",
    "supervisor",
    "imports",
    "rendezvous",
    "build",
    "restore",
    "first_batch",
    "compile",
)
"""Parts of the time from submission to the first step, in their order (see docs/explanation/startup.md)."""

SERVE_CODES = ("200", "400", "408", "413", "415", "499", "500", "503")
"""Codes of the answers of a prediction server."""

METRICS = (
    # throughput
    MetricSpec("train_images", "counter", "every rank", "Images this rank has trained on.", "images"),
    MetricSpec("train_steps", "counter", "every rank", "Steps this rank has taken part in.", "steps"),
    MetricSpec("train_step_duration_seconds", "histogram", "every rank", "Wall time of one step.", "seconds"),
    MetricSpec("train_phase_seconds", "counter", "every rank", "Wall time by phase.", "seconds", PHASE_LABEL),
    MetricSpec(
        "train_sampled_phase_seconds",
        "gauge",
        "every rank",
        "Device time of a phase in the newest sampled step of a CUDA graph.",
        "seconds",
        {"phase": ()},
    ),
    MetricSpec(
        "train_busy_seconds",
        "counter",
        "every rank",
        "Time in steps before this rank began to wait for other ranks; highest on a straggler.",
        "seconds",
    ),
    MetricSpec(
        "train_data_queue_depth",
        "gauge",
        "every rank",
        "Batches ready for the training loop. Absent with the loader dali, which does not report how many of its "
        "prefetched batches are done (see the phase data_wait), and with synthetic, which has no queue.",
        "batches",
    ),
    MetricSpec(
        "train_model_flops",
        "counter",
        "every rank",
        "Floating-point operations of the model for the images of this rank, forward and backward.",
        "operations",
    ),
    MetricSpec(
        "train_peak_flops",
        "gauge",
        "every rank",
        "Dense peak of this rank's device in the precision used; absent if the hardware table has none.",
        "operations per second",
    ),
    MetricSpec(
        "train_memory_bytes",
        "gauge",
        "every rank",
        "Memory of this rank's process, of its input caches (a part of that) and of its device. Of a decoded cache "
        "that the ranks of a node share, each rank reports an equal part.",
        "bytes",
        {
            "kind": (
                "resident",
                "cached_records",
                "cached_decoded",
                "device_allocated",
                "device_reserved",
                "device_peak",
            )
        },
    ),
    MetricSpec(
        "train_last_step_timestamp_seconds", "gauge", "every rank", "End of the last step.", "seconds since 1970"
    ),
    # the run
    MetricSpec("train_run_info", "info", "every rank", "Description of the run, as labels; always 1."),
    MetricSpec(
        "train_all_reduce_info",
        "info",
        "every rank",
        "Measurements and choice of all_reduce.algorithm: auto, as labels; always 1.",
    ),
    MetricSpec("train_world_size", "gauge", "every rank", "Ranks of the run.", "ranks"),
    MetricSpec("train_global_batch_size", "gauge", "every rank", "Images per step over all ranks.", "images"),
    MetricSpec("train_planned_steps", "gauge", "rank 0", "Steps of the whole run.", "steps"),
    MetricSpec(
        "train_completed_steps", "gauge", "rank 0", "Steps done since the run began, over all restarts.", "steps"
    ),
    MetricSpec("train_images_left", "gauge", "rank 0", "Images of the steps that the run still does.", "images"),
    MetricSpec(
        "train_target_images_per_second",
        "gauge",
        "rank 0",
        "Throughput in the run's claim; absent without a claim.",
        "images per second",
    ),
    MetricSpec("train_done", "gauge", "rank 0", "1 after the last step, 0 before."),
    # numerics
    MetricSpec("train_epoch", "gauge", "rank 0", "Passes over the training split so far.", "epochs"),
    MetricSpec("train_loss", "gauge", "rank 0", "Training loss of the last logged step."),
    MetricSpec("train_learning_rate", "gauge", "rank 0", "Learning rate of the last logged step."),
    MetricSpec(
        "train_grad_norm",
        "gauge",
        "rank 0",
        "Euclidean norm of the averaged gradient at the last logged step; absent if updates are sharded.",
    ),
    MetricSpec(
        "train_nonfinite_steps",
        "counter",
        "every rank",
        "Steps with a non-finite loss or gradient.",
        "steps",
        {"kind": ("loss", "grad")},
    ),
    MetricSpec(
        "train_steps_skipped",
        "counter",
        "every rank",
        "Steps skipped because of a non-finite loss or gradient on any rank.",
        "steps",
    ),
    MetricSpec(
        "train_samples_skipped",
        "counter",
        "every rank",
        "Records replaced by others, by reason.",
        "images",
        {"reason": ("decode",)},
    ),
    MetricSpec(
        "train_native_refusals",
        "counter",
        "every rank",
        "Training images that the native extension left to the reference path, by reason.",
        "images",
        {"reason": ("format", "size", "data", "index")},
    ),
    # checkpoints and launches
    MetricSpec(
        "train_checkpoint_duration_seconds",
        "summary",
        "rank 0",
        "Time to write (in the background) or read a checkpoint.",
        "seconds",
        {"op": ("save", "restore")},
    ),
    MetricSpec("train_checkpoint_bytes", "gauge", "rank 0", "Size of the newest checkpoint.", "bytes"),
    MetricSpec(
        "train_checkpoint_last_success_timestamp_seconds",
        "gauge",
        "rank 0",
        "Completion of the newest checkpoint.",
        "seconds since 1970",
    ),
    MetricSpec(
        "train_checkpoint_interval_seconds",
        "gauge",
        "rank 0",
        "Time between two checkpoints by the run document, at this launch's speed; absent if it requests none.",
        "seconds",
    ),
    MetricSpec(
        "train_checkpoint_failures",
        "counter",
        "rank 0",
        "Checkpoints not written, by reason.",
        "checkpoints",
        {"reason": ("disk_full", "other")},
    ),
    MetricSpec(
        "train_restarts",
        "counter",
        "rank 0",
        "Restarts of the run over all its launches, by the exit cause of the previous launch.",
        "launches",
        {"cause": RESTART_CAUSES},
    ),
    MetricSpec(
        "train_launch_timestamp_seconds",
        "gauge",
        "rank 0",
        "Start of this launch of the run, by the exit cause of the previous launch.",
        "seconds since 1970",
        {"cause": LAUNCH_CAUSES},
    ),
    MetricSpec(
        "train_startup_seconds",
        "gauge",
        "rank 0",
        "Time from the submission to the end of this launch's first step, by part; scheduling and pull only if a "
        "launcher (a pipeline's, or `podscale submit`) watched the pods.",
        "seconds",
        {"part": STARTUP_PARTS},
    ),
    MetricSpec(
        "train_wall_seconds",
        "counter",
        "rank 0",
        "Wall time of the run since its first launch, by goodput state.",
        "seconds",
        {"state": GOODPUT_STATES},
    ),
    # stragglers and hangs
    MetricSpec("train_straggler_rank", "gauge", "rank 0", "Rank with the longest busy time in the last interval."),
    MetricSpec(
        "train_straggler_ratio",
        "gauge",
        "rank 0",
        "Busy time of the slowest rank over that of the fastest in the last interval.",
        "ratio",
    ),
    MetricSpec(
        "train_hang_limit_seconds",
        "gauge",
        "every rank",
        "Time without a finished step after which this rank reports a hang.",
        "seconds",
    ),
    # evaluation
    MetricSpec("eval_top1_ratio", "gauge", "rank 0", "Top-1 accuracy of the newest evaluation.", "ratio"),
    MetricSpec("eval_top5_ratio", "gauge", "rank 0", "Top-5 accuracy of the newest evaluation.", "ratio"),
    MetricSpec(
        "eval_last_timestamp_seconds",
        "gauge",
        "rank 0",
        "Completion of the newest evaluation.",
        "seconds since 1970",
    ),
    MetricSpec("eval_images", "counter", "every rank", "Images this rank has evaluated.", "images"),
    # sharding
    MetricSpec(
        "shard_images", "counter", "sharding", "Images packed, by split.", "images", {"split": ("train", "validation")}
    ),
    MetricSpec(
        "shard_planned_images",
        "gauge",
        "sharding",
        "Images planned for this packer, by split.",
        "images",
        {"split": ("train", "validation")},
    ),
    MetricSpec("shard_shards", "counter", "sharding", "Shards finished.", "shards"),
    MetricSpec(
        "shard_bytes",
        "counter",
        "sharding",
        "Bytes read from the source and written to shards.",
        "bytes",
        {"direction": ("read", "written")},
    ),
    MetricSpec("shard_rejects", "counter", "sharding", "Images rejected, by reason.", "images", {"reason": ()}),
    MetricSpec(
        "shard_phase_seconds",
        "counter",
        "sharding",
        "Wall time by phase.",
        "seconds",
        {"phase": ("plan", "pack", "merge", "other")},
    ),
    # the pod
    MetricSpec("build_info", "info", "supervisor", "Version, engine and Python version, as labels; always 1."),
    MetricSpec(
        "disk_free_bytes",
        "gauge",
        "supervisor",
        "Free space of a volume.",
        "bytes",
        {"volume": ("workspace", "cache", "scratch")},
    ),
    MetricSpec(
        "disk_size_bytes",
        "gauge",
        "supervisor",
        "Size of a volume.",
        "bytes",
        {"volume": ("workspace", "cache", "scratch")},
    ),
    MetricSpec(
        "gpu_utilization_ratio",
        "gauge",
        "supervisor",
        "Fraction of time with a kernel running, by NVML.",
        "ratio",
        {"gpu": ()},
    ),
    MetricSpec(
        "gpu_memory_used_bytes", "gauge", "supervisor", "Memory in use on the GPU, by NVML.", "bytes", {"gpu": ()}
    ),
    MetricSpec("gpu_memory_size_bytes", "gauge", "supervisor", "Memory of the GPU.", "bytes", {"gpu": ()}),
    MetricSpec("gpu_power_watts", "gauge", "supervisor", "Power drawn by the GPU.", "watts", {"gpu": ()}),
    MetricSpec(
        "gpu_temperature_celsius", "gauge", "supervisor", "Temperature of the GPU.", "degrees Celsius", {"gpu": ()}
    ),
    MetricSpec(
        "train_launches",
        "counter",
        "supervisor",
        "Launches of the training so far; the leading pod exports it before its ranks start.",
        "launches",
    ),
    MetricSpec("telemetry_scrapes", "counter", "supervisor", "Scrapes answered.", "scrapes"),
    MetricSpec(
        "telemetry_connections_shed",
        "counter",
        "supervisor",
        "Connections closed without an answer because too many were open.",
        "connections",
    ),
    # podscale serve
    MetricSpec(
        "serve_requests",
        "counter",
        "server",
        "Requests to /predict, by the code of the answer; 499: the client closed the connection.",
        "requests",
        {"code": SERVE_CODES},
    ),
    MetricSpec(
        "serve_request_duration_seconds",
        "histogram",
        "server",
        "Time from the headers of a request to its answer.",
        "seconds",
    ),
    MetricSpec("serve_images", "counter", "server", "Images with a prediction.", "images"),
    MetricSpec(
        "serve_image_failures", "counter", "server", "Images without a prediction, by reason.", "images", {"reason": ()}
    ),
    MetricSpec("serve_batch_images", "histogram", "server", "Images of a batch.", "images"),
    MetricSpec("serve_batch_duration_seconds", "histogram", "server", "Time of the model for one batch.", "seconds"),
    MetricSpec("serve_batch_failures", "counter", "server", "Batches for which the model raised an error.", "batches"),
    MetricSpec(
        "serve_queue_images", "gauge", "server", "Images that are decoded, wait for the model or are in it.", "images"
    ),
    MetricSpec("serve_ready", "gauge", "server", "1 if the process accepts images, else 0."),
    MetricSpec("serve_open_connections", "gauge", "server", "Open connections.", "connections"),
    MetricSpec(
        "serve_connections_closed",
        "counter",
        "server",
        "Connections closed because no complete request arrived in time, or the oldest of too many.",
        "connections",
        {"cause": ("timeout", "evicted")},
    ),
    MetricSpec("serve_model_info", "info", "server", "Weights (SHA-256) and version of Podscale, as labels; always 1."),
)
CATALOGUE = {entry.name: entry for entry in METRICS}
