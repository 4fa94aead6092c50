"""Series that others export and the Cluster board shows where they are there."""

THIRD_PARTY_METRICS = {
    "DCGM_FI_DEV_GPU_UTIL": "NVIDIA's DCGM exporter, on nodes with GPUs",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "NVIDIA's DCGM exporter with profiling metrics, on data-centre GPUs",
    "DCGM_FI_DEV_POWER_USAGE": "NVIDIA's DCGM exporter, on nodes with GPUs",
    "DCGM_FI_DEV_GPU_TEMP": "NVIDIA's DCGM exporter, on nodes with GPUs",
    "DCGM_FI_DEV_XID_ERRORS": "NVIDIA's DCGM exporter, on nodes with GPUs",
    "duty_cycle": "GKE's TPU device plugin, on nodes with TPUs",
    "memory_used": "GKE's TPU device plugin, on nodes with TPUs",
    "kube_pod_container_status_restarts_total": "kube-state-metrics",
    "kube_pod_container_status_waiting_reason": "kube-state-metrics",
    "kube_pod_status_phase": "kube-state-metrics",
    "kueue_pending_workloads": "Kueue's controller, where jobs queue",
    "kueue_quota_reserved_wait_time_seconds": "Kueue's controller, where jobs queue",
    "kueue_evicted_workloads_total": "Kueue's controller, where jobs queue",
}
"""Name (of a histogram, without suffix) and who exports it."""
