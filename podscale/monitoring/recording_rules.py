"""Recording rules by run, rank and volume, for alerts, dashboards and queries.

A rate over five minutes is too low in the first five minutes of its series. A restarted pod has new series, so counters
over all launches are first aggregated as a maximum by run.
"""

from podscale.monitoring.rule_types import RecordingRule

THROUGHPUT_RULES = (
    RecordingRule(
        "run:podscale_train_images:rate5m",
        "sum by (namespace, run) (rate(podscale_train_images_total[5m]))",
        "Images per second of a run; too low in its first five minutes.",
    ),
    RecordingRule(
        "run:podscale_train_images_per_chip:rate5m",
        """
run:podscale_train_images:rate5m
/
max by (namespace, run) (podscale_train_world_size)
""",
        "Images per second and chip (rank).",
    ),
    # Both rates miss the same part of a young series, so the quotient is correct from the first minute on. A rank that
    # trains less than a fifth of the time (it evaluates) is excluded.
    RecordingRule(
        "run:podscale_train_images_per_chip_updating:rate5m",
        """
avg by (namespace, run) (
  sum by (namespace, run, rank) (rate(podscale_train_images_total[5m]))
  /
  (
    sum by (namespace, run, rank) (rate(podscale_train_phase_seconds_total{phase!~"evaluation|checkpoint"}[5m]))
    > 0.2 * sum by (namespace, run, rank) (rate(podscale_train_phase_seconds_total[5m]))
  )
)
""",
        "Images per second and chip while it trains: without evaluations and checkpoints.",
    ),
    RecordingRule(
        "run:podscale_train_steps:rate5m",
        "max by (namespace, run) (rate(podscale_train_steps_total[5m]))",
        "Steps per second: every rank takes part in each.",
    ),
    RecordingRule(
        "run:podscale_train_seconds_left:rate5m",
        """
max by (namespace, run) (podscale_train_planned_steps - podscale_train_completed_steps)
/
(run:podscale_train_steps:rate5m > 0)
""",
        "Seconds until the last step at the present pace; absent while there is none.",
    ),
    RecordingRule(
        "run:podscale_train_flops:rate5m",
        "sum by (namespace, run) (rate(podscale_train_model_flops_total[5m]))",
        "Floating-point operations per second that the model asks for, over all chips.",
    ),
    RecordingRule(
        "run:podscale_train_mfu:ratio_5m",
        """
run:podscale_train_flops:rate5m
/
sum by (namespace, run) (podscale_train_peak_flops)
""",
        "Model FLOPs utilisation: of the peak of all chips; absent where the peak is not known.",
    ),
    RecordingRule(
        "run:podscale_shard_images:rate5m",
        "sum by (namespace, run) (rate(podscale_shard_images_total[5m]))",
        "Images per second that sharding packs.",
    ),
)
TIME_RULES = (
    RecordingRule(
        "run_phase:podscale_train_phase:ratio_5m",
        """
sum by (namespace, run, phase) (rate(podscale_train_phase_seconds_total[5m]))
/ on (namespace, run) group_left ()
sum by (namespace, run) (rate(podscale_train_phase_seconds_total[5m]))
""",
        "Share of a phase in the time of all ranks.",
    ),
    RecordingRule(
        "run_rank:podscale_train_data_wait:ratio_5m",
        """
sum by (namespace, run, rank) (rate(podscale_train_phase_seconds_total{phase="data_wait"}[5m]))
/
sum by (namespace, run, rank) (rate(podscale_train_phase_seconds_total[5m]))
""",
        "Share of a rank's time in which it waits for images.",
    ),
    RecordingRule(
        "run:podscale_train_data_wait:ratio_5m",
        "avg by (namespace, run) (run_rank:podscale_train_data_wait:ratio_5m)",
        "Share of the time of all ranks in which they wait for images.",
    ),
    RecordingRule(
        "run_rank:podscale_train_busy_seconds:rate5m",
        "sum by (namespace, run, rank) (rate(podscale_train_busy_seconds_total[5m]))",
        "Share of a rank's time before it waits for others: highest on the slowest.",
    ),
    # Totals over all launches: a restarted pod exports them under a new address, perhaps a heartbeat behind, which
    # increase() would take for a counter reset and count in full. The difference of maximum and minimum is immune.
    RecordingRule(
        "run_state:podscale_train_wall_seconds:max",
        "max by (namespace, run, state) (podscale_train_wall_seconds_total)",
        "Wall time of a run by what it was spent on, over all its lives.",
    ),
    RecordingRule(
        "run_state:podscale_train_wall_seconds:delta1h",
        """
(
  max_over_time(run_state:podscale_train_wall_seconds:max[1h])
  -
  min_over_time(run_state:podscale_train_wall_seconds:max[1h])
)
and run_state:podscale_train_wall_seconds:max
""",
        "Wall time of the last hour by what it was spent on.",
    ),
    RecordingRule(
        "run:podscale_train_goodput:ratio_1h",
        """
sum by (namespace, run) (run_state:podscale_train_wall_seconds:delta1h{state="productive"})
/
sum by (namespace, run) (run_state:podscale_train_wall_seconds:delta1h)
""",
        "Share of the last hour that went into steps that last.",
    ),
    RecordingRule(
        "run:podscale_train_goodput:ratio",
        """
sum by (namespace, run) (run_state:podscale_train_wall_seconds:max{state="productive"})
/
sum by (namespace, run) (run_state:podscale_train_wall_seconds:max)
""",
        "The same of the whole run, over all its lives.",
    ),
)
STATE_RULES = (
    RecordingRule(
        "run_cause:podscale_train_restarts:max",
        "max by (namespace, run, cause) (podscale_train_restarts_total)",
        "Restarts of a run by cause, over all its lives.",
    ),
    RecordingRule(
        "run:podscale_train_launches:max",
        "max by (namespace, run) (podscale_train_launches_total)",
        "Launches of a run, over all its lives, those among them that have not begun to train.",
    ),
    # If this launch has written none yet, the age of the launch counts.
    RecordingRule(
        "run:podscale_train_checkpoint_age:seconds",
        """
time() - max by (namespace, run) (podscale_train_checkpoint_last_success_timestamp_seconds)
or
max by (namespace, run) (sum by (namespace, run, rank, instance) (podscale_train_phase_seconds_total))
""",
        "Age of the newest checkpoint; before the first of a life, the age of the life.",
    ),
    RecordingRule(
        "run_volume:podscale_disk_free:ratio",
        "min by (namespace, run, volume) (podscale_disk_free_bytes / podscale_disk_size_bytes)",
        "Free share of a volume; of volumes that every pod has its own of, the fullest.",
    ),
)
# DCGM's exporter names the pod that uses a GPU in `pod` or, if the scraper's own labels take precedence, in
# `exported_pod`. A pod that failed because of its GPU is kept for half an hour.
_OF_PODS = (
    'label_replace(label_replace({metric}, "pod", "$1", "exported_pod", "(.+)"), '
    '"namespace", "$1", "exported_namespace", "(.+)")'
)
_OF_RUNS = "* on (namespace, pod) group_left (run) pod_run:podscale_build_info:last30m"
HARDWARE_RULES = (
    RecordingRule(
        "pod_run:podscale_build_info:last30m",
        'group by (namespace, pod, run) (last_over_time(podscale_build_info{pod!=""}[30m]))',
        "Which pod belongs, or belonged within half an hour, to which run; 1.",
    ),
    RecordingRule(
        "run_gpu:podscale_gpu_xid:max",
        f"""
max by (namespace, run, pod, gpu) (
  {_OF_PODS.format(metric="DCGM_FI_DEV_XID_ERRORS")}
  {_OF_RUNS}
)
""",
        "Number of the newest Xid error of a GPU of a run, by DCGM; 0 without one.",
    ),
    RecordingRule(
        "run_gpu:podscale_gpu_temperature_celsius:max",
        f"""
max by (namespace, run, pod, gpu) (
  podscale_gpu_temperature_celsius
  or
  {_OF_PODS.format(metric="DCGM_FI_DEV_GPU_TEMP")}
  {_OF_RUNS}
)
""",
        "Temperature of a GPU of a run, by NVML or DCGM.",
    ),
)
