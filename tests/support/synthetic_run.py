"""Synthetic samples of every series of one run, for a Prometheus without a run.

Twenty minutes of two ranks: one is slow for a while, a rank is killed and the run resumes, the run stalls. Third-party
series (GPUs, TPUs, Kubernetes, Kueue) are included.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from podscale.telemetry.catalogue import FIRST_LAUNCH, GOODPUT_STATES, METRICS, PHASE_LABEL, STARTUP_PARTS, MetricSpec

RUN = "imaginary"
EVERY = 15.0
LENGTH = 1200.0
KILLED, BACK = 600.0, 660.0
STALLED, WELL = 900.0, 1020.0
RANKS = 2
BATCH = 64
Labels = tuple[tuple[str, str], ...]
BOUNDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


@dataclass
class History:
    """Samples by family, then by name and labels."""

    kinds: dict[str, str] = field(default_factory=dict)
    samples: dict[str, dict[tuple[str, Labels], list[tuple[float, float]]]] = field(default_factory=dict)

    def add(self, family: str, kind: str, name: str, labels: Mapping[str, str], at: float, value: float) -> None:
        self.kinds[family] = kind
        series = self.samples.setdefault(family, {}).setdefault((name, tuple(sorted(labels.items()))), [])
        series.append((at, value))

    def text(self, begin: float) -> str:
        """Return OpenMetrics text with times from `begin` on."""
        return "\n".join([*self._lines(begin), "# EOF", ""])

    def _lines(self, begin: float) -> Iterator[str]:
        for family, series in self.samples.items():
            yield f"# TYPE {family} {self.kinds[family]}"
            for (name, labels), samples in series.items():
                written = ",".join(f'{key}="{value}"' for key, value in labels)
                shift = begin if name.endswith("_timestamp_seconds") else 0.0
                yield from (f"{name}{{{written}}} {value + shift} {begin + at:.3f}" for at, value in samples)


def history() -> History:
    """Return the samples of the whole run."""
    samples = History()
    step = 0
    while (at := step * EVERY) <= LENGTH:
        if not KILLED <= at < BACK:
            for entry in METRICS:
                for labels in _labels(entry):
                    if entry.name != "train_launch_timestamp_seconds" or labels["cause"] == _cause(at):
                        _podscale(samples, entry, labels, at)
        for name, labels, value in _others(at):
            kind = "counter" if name.endswith("_total") else "gauge"
            samples.add(name.removesuffix("_total"), kind, name, labels, at, value)
        step += 1
    return samples


def _labels(entry: MetricSpec) -> Iterator[dict[str, str]]:
    ranks = range(RANKS) if entry.exporter == "every rank" else range(1)
    label_sets: list[dict[str, str]] = [{}]
    for name, values in entry.own_labels.items():
        values = (
            values or {"phase": PHASE_LABEL["phase"], "reason": ("too_large", "not_an_image"), "gpu": ("0", "1")}[name]
        )
        label_sets = [{**known, name: value} for known in label_sets for value in values]
    for rank in ranks:
        common = {"run": RUN, **({"rank": str(rank)} if "rank" in entry.labels else {})}
        if entry.exporter == "server":
            common = {"model": RUN, "process": "0"}
        yield from ({**common, **more} for more in label_sets)


def _cause(at: float) -> str:
    """Return the cause of the current launch."""
    return "lost_rank" if at >= BACK else FIRST_LAUNCH


def _podscale(series_history: History, entry: MetricSpec, labels: dict[str, str], at: float) -> None:
    active_seconds = at - BACK if at >= BACK else at  # counters of processes restart at 0
    active_seconds -= min(max(at - STALLED, 0.0), WELL - STALLED)  # and are constant while the run stalls
    family = entry.series.removesuffix("_total")
    if entry.kind == "histogram":
        steps = 5 * active_seconds
        for bound in BOUNDS:
            part = steps * min(1.0, bound / 0.4)
            series_history.add(family, "histogram", f"{family}_bucket", {**labels, "le": str(bound)}, at, part)
        series_history.add(family, "histogram", f"{family}_bucket", {**labels, "le": "+Inf"}, at, steps)
        series_history.add(family, "histogram", f"{family}_sum", labels, at, 0.2 * steps)
        series_history.add(family, "histogram", f"{family}_count", labels, at, steps)
    elif entry.kind == "summary":
        done = math.floor(active_seconds / 120) if labels["op"] == "save" else float(at >= BACK)
        series_history.add(family, "summary", f"{family}_sum", labels, at, 2.5 * done)
        series_history.add(family, "summary", f"{family}_count", labels, at, done)
    else:
        kind = "counter" if entry.kind == "counter" else "gauge"
        series_history.add(family, kind, entry.series, labels, at, _value(entry.name, labels, at, active_seconds))


def _value(name: str, labels: dict[str, str], at: float, active_seconds: float) -> float:
    """Return the value of a gauge or counter."""
    if name == "train_busy_seconds":
        return 0.7 * active_seconds + (
            0.35 * min(max(at - 200, 0), 200) if labels["rank"] == "1" and at < KILLED else 0
        )
    if name in ("train_phase_seconds", "train_sampled_phase_seconds"):
        return active_seconds * 0.1 * (1 + _place(labels["phase"], PHASE_LABEL["phase"]) / 10)
    if name == "train_wall_seconds":
        return at * (0.7 if labels["state"] == "productive" else 0.3 / (len(GOODPUT_STATES) - 1))
    if name == "train_startup_seconds":
        return 4.0 + 6.0 * _place(labels["part"], STARTUP_PARTS)
    if name == "train_restarts":
        return float(at >= BACK and labels["cause"] == "lost_rank")
    if name == "train_launch_timestamp_seconds":
        return BACK if at >= BACK else 0.0
    if name == "eval_last_timestamp_seconds":
        return max(0.0, at - at % 300)
    if name == "train_checkpoint_last_success_timestamp_seconds":
        return max(0.0, at - at % 120)
    if name.startswith("gpu_") or name.startswith("disk_") or name.endswith("_bytes"):
        return {"ratio": 0.8, "watts": 350.0, "celsius": 61.0}.get(name.rpartition("_")[2], _bytes(name))
    if (rate := _rates(at).get(name)) is not None:
        return rate * active_seconds
    return float(_levels(at, active_seconds)[name])


def _rates(at: float) -> dict[str, float]:
    """Return the values of what grows, a second of training."""
    return {
        "train_images": 5 * BATCH,
        "train_steps": 5,
        "train_completed_steps": 5,
        "train_model_flops": 5 * BATCH * 24.6e9,
        "train_nonfinite_steps": 0.01,
        "train_steps_skipped": 0.01,
        "train_samples_skipped": 0.05,
        "train_native_refusals": 0.3,
        "train_checkpoint_failures": 0.002,
        "eval_images": 40.0 * (at % 300 < 30),
        "shard_images": 300.0,
        "shard_bytes": 3e7,
        "shard_shards": 0.1,
        "shard_rejects": 0.4,
        "shard_phase_seconds": 0.25,
        "serve_requests": 20.0,
        "serve_images": 30.0,
        "serve_image_failures": 0.1,
        "serve_batch_failures": 0.001,
        "serve_connections_closed": 0.01,
        "telemetry_scrapes": 1 / EVERY,
        "telemetry_connections_shed": 0.01,
        "train_epoch": 0.01,
    }


def _levels(at: float, active_seconds: float) -> dict[str, float]:
    """Return the values of the other gauges."""
    return {
        "train_peak_flops": 312e12,
        "train_world_size": RANKS,
        "train_global_batch_size": RANKS * BATCH,
        "train_planned_steps": 9000,
        "train_images_left": RANKS * BATCH * (9000 - 5 * active_seconds),
        "train_target_images_per_second": 700,
        "train_loss": 0.4 + 6 * math.exp(-at / 300),
        "train_learning_rate": 0.1 * (1 + math.cos(math.pi * at / LENGTH)),
        "train_grad_norm": 1 + 3 * math.exp(-at / 400),
        "train_data_queue_depth": 0 if STALLED < at < WELL else 3,
        "train_straggler_rank": 1,
        "train_straggler_ratio": 1.5 if 200 < at < 400 else 1.03,
        "train_done": 0,
        "train_launches": 1 + (at >= BACK),
        "train_last_step_timestamp_seconds": at,
        "train_checkpoint_interval_seconds": 180,
        "train_hang_limit_seconds": 60,
        "eval_top1_ratio": 0.8 * (1 - math.exp(-at / 500)),
        "eval_top5_ratio": 0.95 * (1 - math.exp(-at / 300)),
        "shard_planned_images": 1_000_000,
        "serve_queue_images": 3,
        "serve_ready": 1,
        "serve_open_connections": 12,
        "serve_model_info": 1,
        "train_run_info": 1,
        "train_all_reduce_info": 1,
        "build_info": 1,
    }


def _place(value: str, values: tuple[str, ...]) -> int:
    return values.index(value)


def _bytes(name: str) -> float:
    return {"disk_free_bytes": 4e11, "disk_size_bytes": 1e12, "gpu_memory_size_bytes": 1.5e11}.get(name, 6e10)


def _others(at: float) -> Iterator[tuple[str, dict[str, str], float]]:
    pod = {"namespace": "training", "pod": f"{RUN}-worker-0", "container": "train"}
    for gpu in ("0", "1"):
        where = {"Hostname": "node-1", "gpu": gpu}
        yield "DCGM_FI_DEV_GPU_UTIL", where, 90 + math.sin(at / 60)
        yield "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", where, 0.4
        yield "DCGM_FI_DEV_POWER_USAGE", where, 350 + 10 * math.sin(at / 60)
        yield "DCGM_FI_DEV_GPU_TEMP", where, 61
        yield "DCGM_FI_DEV_XID_ERRORS", where, 0
        yield "duty_cycle", {"accelerator_id": f"tpu-{gpu}"}, 85
        yield "memory_used", {"accelerator_id": f"tpu-{gpu}"}, 1.2e10
    yield "kube_pod_container_status_restarts_total", pod, float(at >= BACK)
    yield "kube_pod_container_status_waiting_reason", {**pod, "reason": "CrashLoopBackOff"}, float(KILLED < at < BACK)
    yield "kube_pod_created", pod, BACK if at >= BACK else 0.0
    yield "kube_pod_status_scheduled_time", pod, 4 + (BACK if at >= BACK else 0.0)
    yield "kube_pod_container_state_started", pod, 25 + (BACK if at >= BACK else 0.0)
    yield "kube_pod_status_phase", {**pod, "phase": "Running"}, 1
    queue = {"cluster_queue": "gpus"}
    yield "kueue_pending_workloads", {**queue, "status": "active"}, 2
    for bound, part in (("1", 0.2), ("10", 0.7), ("60", 0.95), ("+Inf", 1.0)):
        yield "kueue_quota_reserved_wait_time_seconds_bucket", {**queue, "le": bound}, part * at / 10
    yield "kueue_evicted_workloads_total", {**queue, "reason": "Preempted"}, at / 300
