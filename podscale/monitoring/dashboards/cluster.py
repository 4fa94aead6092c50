"""Cluster: the machines under the runs, and what Kubernetes does with their pods."""

from podscale.monitoring.dashboards.frame import Board
from podscale.monitoring.dashboards.panels import Query, Step, figure, lines
from podscale.monitoring.dashboards.queries import BY_RUN, SECONDS, SHOWN, rate, series
from podscale.monitoring.thresholds import DEFAULTS

NO_GPU = "No GPU under these runs"
NO_DCGM = "NVIDIA's DCGM exporter is not scraped"
NO_TPU = "GKE's TPU metrics are not scraped"
NO_STATE = "kube-state-metrics is not scraped"
NO_KUEUE = "Kueue is not scraped"
NO_DISK = "No pod was scraped in this time"
PODS = 'namespace=~"$namespace", pod=~"${run}-.*"'
GPU = "{{Hostname}} GPU {{gpu}}"
OURS = "{{run}} GPU {{gpu}}"
BY_GPU = f"{BY_RUN}, gpu"

NOW = [
    figure(
        "Containers restarted",
        "Restarts of containers of the runs' pods in the time shown.",
        Query(
            f"round(sum(increase(kube_pod_container_status_restarts_total{{{PODS}}}[{SHOWN}])))",
            "containers",
            instant=True,
        ),
        unit="none",
        empty=NO_STATE,
        span=6,
        base="green",
        steps=[Step(1, "orange")],
    ),
    figure(
        "Jobs in queues",
        "Workloads that wait for admission, in all queues.",
        Query("sum(kueue_pending_workloads)", "workloads"),
        unit="none",
        empty=NO_KUEUE,
        span=6,
    ),
    figure(
        "Fullest volume",
        "Least share of free space of a volume of the runs.",
        Query(f"min({series('disk_free_bytes')} / {series('disk_size_bytes')})", "free"),
        unit="percentunit",
        empty=NO_DISK,
        span=6,
        base="red",
        steps=[Step(DEFAULTS["diskFreeShare"], "orange"), Step(0.2, "green")],
        decimals=0,
    ),
    figure(
        "GPU errors (Xid)",
        "GPUs whose last Xid is not 0.",
        Query("count(DCGM_FI_DEV_XID_ERRORS > 0) or count(DCGM_FI_DEV_XID_ERRORS) * 0", "GPUs"),
        unit="none",
        empty=NO_DCGM,
        alert="PodscaleGPUXid",
        span=6,
        base="green",
        steps=[Step(1, "red")],
    ),
]
RUNS = [
    lines(
        "GPU utilisation",
        "Share of time a GPU of the runs ran a kernel, by NVML: busy, not necessarily useful.",
        Query(f"max by ({BY_GPU}) ({series('gpu_utilization_ratio')})", OURS),
        unit="percentunit",
        empty=NO_GPU,
        largest=1,
    ),
    lines(
        "GPU memory",
        "Memory in use; dashed: what there is.",
        Query(f"max by ({BY_GPU}) ({series('gpu_memory_used_bytes')})", OURS),
        Query(f"max({series('gpu_memory_size_bytes')})", "size", dashed=True),
        unit="bytes",
        empty=NO_GPU,
    ),
    lines(
        "GPU power",
        "Power drawn.",
        Query(f"max by ({BY_GPU}) ({series('gpu_power_watts')})", OURS),
        unit="watt",
        empty=NO_GPU,
    ),
    lines(
        "GPU temperature",
        "Temperature of the GPU.",
        Query(f"max by ({BY_GPU}) ({series('gpu_temperature_celsius')})", OURS),
        unit="celsius",
        empty=NO_GPU,
        alert="PodscaleGPUThermal",
        steps=[Step(DEFAULTS["gpuCelsius"], "red")],
    ),
    lines(
        "Free space",
        "Share of each volume that is free.",
        Query(
            f"min by ({BY_RUN}, volume) ({series('disk_free_bytes')} / {series('disk_size_bytes')})",
            "{{run}} {{volume}}",
        ),
        unit="percentunit",
        empty=NO_DISK,
        alert="PodscaleDiskFilling",
        largest=1,
        steps=[Step(DEFAULTS["diskFreeShare"], "red")],
    ),
    lines(
        "Metrics endpoint",
        "Scrapes answered per second, and connections closed because there were too many.",
        Query(rate("telemetry_scrapes", BY_RUN), "{{run}} answered"),
        Query(rate("telemetry_connections_shed", BY_RUN), "{{run}} shed"),
        unit="reqps",
        empty=NO_DISK,
    ),
]
DCGM = [
    lines(
        "GPU utilisation",
        "All GPUs whose exporter is scraped.",
        Query("max by (Hostname, gpu) (DCGM_FI_DEV_GPU_UTIL)", GPU),
        unit="percent",
        empty=NO_DCGM,
        span=6,
        largest=100,
    ),
    lines(
        "Tensor cores active",
        "Share of cycles in which the tensor pipes were active.",
        Query("max by (Hostname, gpu) (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE)", GPU),
        unit="percentunit",
        empty=NO_DCGM,
        span=6,
        largest=1,
    ),
    lines(
        "GPU power",
        "Power drawn.",
        Query("max by (Hostname, gpu) (DCGM_FI_DEV_POWER_USAGE)", GPU),
        unit="watt",
        empty=NO_DCGM,
        span=6,
    ),
    lines(
        "GPU temperature",
        "Temperature of the GPU.",
        Query("max by (Hostname, gpu) (DCGM_FI_DEV_GPU_TEMP)", GPU),
        unit="celsius",
        empty=NO_DCGM,
        span=6,
        steps=[Step(DEFAULTS["gpuCelsius"], "red")],
    ),
]
TPU = [
    lines(
        "TPU duty cycle",
        "Share of time the accelerator was busy.",
        Query("max by (accelerator_id) (duty_cycle)", "{{accelerator_id}}"),
        unit="percent",
        empty=NO_TPU,
        span=12,
        largest=100,
    ),
    lines(
        "TPU memory",
        "High-bandwidth memory in use.",
        Query("max by (accelerator_id) (memory_used)", "{{accelerator_id}}"),
        unit="bytes",
        empty=NO_TPU,
        span=12,
    ),
]
KUBERNETES = [
    lines(
        "Pods by phase",
        "Pods of the runs.",
        Query(f"sum by (phase) (kube_pod_status_phase{{{PODS}}})", "pods {{phase}}"),
        unit="none",
        empty=NO_STATE,
        span=6,
        stacked=True,
    ),
    lines(
        "Containers waiting, by reason",
        "CrashLoopBackOff and ImagePullBackOff do not pass by themselves.",
        Query(
            f"sum by (reason) (kube_pod_container_status_waiting_reason{{{PODS}}})",
            "{{reason}}",
        ),
        unit="none",
        empty=f"No container waits, or {NO_STATE[0].lower()}{NO_STATE[1:]}",
        span=6,
    ),
    lines(
        "Wait in Kueue",
        "Time until a workload's quota was reserved, p50 and p95 by queue.",
        *(
            Query(
                f"histogram_quantile({portion}, sum by (cluster_queue, le) "
                f"(rate(kueue_quota_reserved_wait_time_seconds_bucket[{SECONDS}])))",
                f"{{{{cluster_queue}}}} {name}",
            )
            for portion, name in ((0.5, "p50"), (0.95, "p95"))
        ),
        unit="s",
        empty=NO_KUEUE,
        span=6,
    ),
    lines(
        "Evictions by Kueue",
        "Workloads evicted per second, by reason.",
        Query(f"sum by (reason) (rate(kueue_evicted_workloads_total[{SECONDS}]))", "{{reason}}"),
        unit="count:workloads/s",
        empty=NO_KUEUE,
        span=6,
    ),
]
BOARD = Board(
    "cluster",
    "Cluster",
    "The machines under the runs, and what Kubernetes does with their pods. Others' series are shown where scraped.",
    {
        "Now": NOW,
        "Machines of the runs": RUNS,
        "GPUs of the cluster (DCGM exporter)": DCGM,
        "TPUs (GKE's device plugin)": TPU,
        "Kubernetes and Kueue": KUBERNETES,
    },
)
