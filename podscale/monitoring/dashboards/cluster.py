"""Cluster dashboard: GPUs, TPUs and volumes of the runs, and Kubernetes' view of their pods."""

from podscale.monitoring.dashboards.frame import BY_RUN, RANGE, RATE_INTERVAL, Dashboard, rate_query, series_selector
from podscale.monitoring.dashboards.panels import Field, PanelQuery, stat_panel, time_series_panel
from podscale.monitoring.rule_types import DEFAULT_THRESHOLDS

NO_GPU = "No GPU under these runs"
NO_DCGM = "NVIDIA's DCGM exporter is not scraped"
NO_TPU = "GKE's TPU metrics are not scraped"
NO_STATE = "kube-state-metrics is not scraped"
NO_KUEUE = "Kueue is not scraped"
NO_DISK = "No pod was scraped in this time range"
PODS = 'namespace=~"$namespace", pod=~"${run}-.*"'
BY_POD = "namespace, pod"
CREATED_AT = f"max by ({BY_POD}) (kube_pod_created{{{PODS}}})"
SCHEDULED_AT = f"max by ({BY_POD}) (kube_pod_status_scheduled_time{{{PODS}}})"
STARTED_AT = f"max by ({BY_POD}) (kube_pod_container_state_started{{{PODS}}})"
RESTARTED = f"(max by ({BY_POD}) (increase(kube_pod_container_status_restarts_total{{{PODS}}}[{RANGE}])) > 0)"
GPU_LEGEND = "{{Hostname}} GPU {{gpu}}"
RUN_GPU_LEGEND = "{{run}} GPU {{gpu}}"
BY_GPU = f"{BY_RUN}, gpu"

NOW_PANELS = [
    stat_panel(
        "Containers restarted",
        "Container restarts in the runs' pods in the time range shown.",
        PanelQuery(
            f"round(sum(increase(kube_pod_container_status_restarts_total{{{PODS}}}[{RANGE}])))",
            "containers",
            instant=True,
        ),
        field=Field("none", NO_STATE),
        thresholds={None: "green", 1: "orange"},
    ).span(6),
    stat_panel(
        "Jobs in queues",
        "Workloads that wait for admission in any queue.",
        PanelQuery("sum(kueue_pending_workloads)", "workloads"),
        field=Field("none", NO_KUEUE),
    ).span(6),
    stat_panel(
        "Fullest volume",
        "Free fraction of the runs' fullest volume.",
        PanelQuery(f"min({series_selector('disk_free_bytes')} / {series_selector('disk_size_bytes')})", "free"),
        field=Field("percentunit", NO_DISK, decimals=0),
        thresholds={None: "red", DEFAULT_THRESHOLDS["diskFreeShare"]: "orange", 0.2: "green"},
    ).span(6),
    stat_panel(
        "GPU errors (Xid)",
        "GPUs whose last Xid is not 0.",
        PanelQuery("count(DCGM_FI_DEV_XID_ERRORS > 0) or count(DCGM_FI_DEV_XID_ERRORS) * 0", "GPUs"),
        field=Field("none", NO_DCGM),
        alert="PodscaleGPUXid",
        thresholds={None: "green", 1: "red"},
    ).span(6),
]
RUN_PANELS = [
    time_series_panel(
        "GPU utilisation",
        "Fraction of time in which a GPU of the runs ran a kernel, from NVML. Busy does not mean useful.",
        PanelQuery(f"max by ({BY_GPU}) ({series_selector('gpu_utilization_ratio')})", RUN_GPU_LEGEND),
        field=Field("percentunit", NO_GPU, max=1),
    ),
    time_series_panel(
        "GPU memory",
        "Memory in use. Dashed: the GPU's total memory.",
        PanelQuery(f"max by ({BY_GPU}) ({series_selector('gpu_memory_used_bytes')})", RUN_GPU_LEGEND),
        PanelQuery(f"max({series_selector('gpu_memory_size_bytes')})", "size", dashed=True),
        field=Field("bytes", NO_GPU),
    ),
    time_series_panel(
        "GPU power",
        "Power drawn.",
        PanelQuery(f"max by ({BY_GPU}) ({series_selector('gpu_power_watts')})", RUN_GPU_LEGEND),
        field=Field("watt", NO_GPU),
    ),
    time_series_panel(
        "GPU temperature",
        "Temperature of the GPU.",
        PanelQuery(f"max by ({BY_GPU}) ({series_selector('gpu_temperature_celsius')})", RUN_GPU_LEGEND),
        field=Field("celsius", NO_GPU),
        alert="PodscaleGPUThermal",
        limit=DEFAULT_THRESHOLDS["gpuCelsius"],
    ),
    time_series_panel(
        "Free space",
        "Free fraction of each volume. Dashed: limit of the alert.",
        PanelQuery(
            f"min by ({BY_RUN}, volume) ({series_selector('disk_free_bytes')} / {series_selector('disk_size_bytes')})",
            "{{run}} {{volume}}",
        ),
        field=Field("percentunit", NO_DISK, max=1),
        alert="PodscaleDiskFilling",
        limit=DEFAULT_THRESHOLDS["diskFreeShare"],
    ),
    time_series_panel(
        "Metrics endpoint",
        "Scrapes answered per second, and connections closed because too many were open.",
        PanelQuery(rate_query("telemetry_scrapes", BY_RUN), "{{run}} answered"),
        PanelQuery(rate_query("telemetry_connections_shed", BY_RUN), "{{run}} shed"),
        field=Field("reqps", NO_DISK),
    ),
]
DCGM_PANELS = [
    time_series_panel(
        "GPU utilisation",
        "Percentage of time in which a GPU ran a kernel, of all GPUs whose exporter is scraped.",
        PanelQuery("max by (Hostname, gpu) (DCGM_FI_DEV_GPU_UTIL)", GPU_LEGEND),
        field=Field("percent", NO_DCGM, max=100),
    ).span(6),
    time_series_panel(
        "Tensor cores active",
        "Fraction of cycles in which the tensor cores were active.",
        PanelQuery("max by (Hostname, gpu) (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE)", GPU_LEGEND),
        field=Field("percentunit", NO_DCGM, max=1),
    ).span(6),
    time_series_panel(
        "GPU power",
        "Power drawn.",
        PanelQuery("max by (Hostname, gpu) (DCGM_FI_DEV_POWER_USAGE)", GPU_LEGEND),
        field=Field("watt", NO_DCGM),
    ).span(6),
    time_series_panel(
        "GPU temperature",
        "Temperature of the GPU.",
        PanelQuery("max by (Hostname, gpu) (DCGM_FI_DEV_GPU_TEMP)", GPU_LEGEND),
        field=Field("celsius", NO_DCGM),
        limit=DEFAULT_THRESHOLDS["gpuCelsius"],
    ).span(6),
]
TPU_PANELS = [
    time_series_panel(
        "TPU duty cycle",
        "Percentage of time in which the TPU was busy.",
        PanelQuery("max by (accelerator_id) (duty_cycle)", "{{accelerator_id}}"),
        field=Field("percent", NO_TPU, max=100),
    ).span(12),
    time_series_panel(
        "TPU memory",
        "High-bandwidth memory in use.",
        PanelQuery("max by (accelerator_id) (memory_used)", "{{accelerator_id}}"),
        field=Field("bytes", NO_TPU),
    ).span(12),
]
KUBERNETES_PANELS = [
    time_series_panel(
        "Pods by phase",
        "Pods of the runs.",
        PanelQuery(f"sum by (phase) (kube_pod_status_phase{{{PODS}}})", "pods {{phase}}"),
        field=Field("none", NO_STATE),
        stacked=True,
    ).span(6),
    time_series_panel(
        "Containers waiting, by reason",
        "CrashLoopBackOff and ImagePullBackOff usually need an operator.",
        PanelQuery(f"sum by (reason) (kube_pod_container_status_waiting_reason{{{PODS}}})", "{{reason}}"),
        field=Field("none", f"No container waits, or {NO_STATE[0].lower()}{NO_STATE[1:]}"),
    ).span(6),
    time_series_panel(
        "Wait in Kueue",
        "Time until Kueue reserved a workload's quota, p50 and p95 by queue.",
        *(
            PanelQuery(
                f"histogram_quantile({portion}, sum by (cluster_queue, le) "
                f"(rate(kueue_quota_reserved_wait_time_seconds_bucket[{RATE_INTERVAL}])))",
                f"{{{{cluster_queue}}}} {name}",
            )
            for portion, name in ((0.5, "p50"), (0.95, "p95"))
        ),
        field=Field("s", NO_KUEUE),
    ).span(6),
    time_series_panel(
        "Evictions by Kueue",
        "Workloads evicted per second, by reason.",
        PanelQuery(f"sum by (reason) (rate(kueue_evicted_workloads_total[{RATE_INTERVAL}]))", "{{reason}}"),
        field=Field("count:workloads/s", NO_KUEUE),
    ).span(6),
    time_series_panel(
        "Start of pods",
        "Longest time from a pod's creation to its node (scheduling), and from there to the start of its container"
        " (volumes, image pull). Pods whose container has restarted are left out.",
        PanelQuery(f"max({SCHEDULED_AT} - on ({BY_POD}) {CREATED_AT})", "scheduling"),
        PanelQuery(f"max(({STARTED_AT} - on ({BY_POD}) {SCHEDULED_AT}) unless on ({BY_POD}) {RESTARTED})", "pull"),
        field=Field("s", NO_STATE),
    ).span(24),
]
BOARD = Dashboard(
    "cluster",
    "Cluster",
    "GPUs, TPUs and volumes of the runs, and Kubernetes' view of their pods. Third-party metrics show if scraped.",
    {
        "Now": NOW_PANELS,
        "GPUs, volumes and endpoints of the runs": RUN_PANELS,
        "GPUs of the cluster (DCGM exporter)": DCGM_PANELS,
        "TPUs (GKE's device plugin)": TPU_PANELS,
        "Kubernetes and Kueue": KUBERNETES_PANELS,
    },
)
