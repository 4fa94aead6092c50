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
        "Images per second and chip while the run trains, without evaluations and checkpoints.",
    ),
    RecordingRule(
        "run:podscale_train_steps:rate5m",
        "max by (namespace, run) (rate(podscale_train_steps_total[5m]))",
        "Steps per second; every rank takes part in each step.",
    ),
    RecordingRule(
        "run:podscale_train_seconds_left:rate5m",
        """
max by (namespace, run) (podscale_train_images_left)
/
(run:podscale_train_images:rate5m > 0)
""",
        "Seconds until the last step at the present rate of images; absent while the rate is 0.",
    ),
    RecordingRule(
        "run:podscale_train_flops:rate5m",
        "sum by (namespace, run) (rate(podscale_train_model_flops_total[5m]))",
        "Model FLOP/s over all chips.",
    ),
    RecordingRule(
        "run:podscale_train_mfu:ratio_5m",
        """
run:podscale_train_flops:rate5m
/
sum by (namespace, run) (podscale_train_peak_flops)
""",
        "Model FLOPs utilisation: model FLOP/s over the peak of all chips; absent if the peak is unknown.",
    ),
    RecordingRule(
        "run:podscale_shard_images:rate5m",
        "sum by (namespace, run) (rate(podscale_shard_images_total[5m]))",
        "Images packed per second by sharding.",
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
        "Fraction of the time of all ranks spent in a phase.",
    ),
    RecordingRule(
        "run_rank:podscale_train_data_wait:ratio_5m",
        """
sum by (namespace, run, rank) (rate(podscale_train_phase_seconds_total{phase="data_wait"}[5m]))
/
sum by (namespace, run, rank) (rate(podscale_train_phase_seconds_total[5m]))
""",
        "Fraction of a rank's time spent waiting for images.",
    ),
    RecordingRule(
        "run:podscale_train_data_wait:ratio_5m",
        "avg by (namespace, run) (run_rank:podscale_train_data_wait:ratio_5m)",
        "Mean fraction of the ranks' time spent waiting for images.",
    ),
    RecordingRule(
        "run_rank:podscale_train_busy_seconds:rate5m",
        "sum by (namespace, run, rank) (rate(podscale_train_busy_seconds_total[5m]))",
        "Fraction of a rank's time spent before it waits for other ranks; highest on the slowest rank.",
    ),
    # Totals over all launches: a restarted pod exports them under a new address, perhaps a heartbeat behind, which
    # increase() would take for a counter reset and count in full. The difference of maximum and minimum is immune.
    RecordingRule(
        "run_state:podscale_train_wall_seconds:max",
        "max by (namespace, run, state) (podscale_train_wall_seconds_total)",
        "Wall seconds of a run by state, over all its launches.",
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
        "Wall seconds of the last hour by state.",
    ),
    RecordingRule(
        "run:podscale_train_goodput:ratio_1h",
        """
sum by (namespace, run) (run_state:podscale_train_wall_seconds:delta1h{state="productive"})
/
sum by (namespace, run) (run_state:podscale_train_wall_seconds:delta1h)
""",
        "Goodput of the last hour: fraction of wall time spent on steps that were kept.",
    ),
    RecordingRule(
        "run:podscale_train_goodput:ratio",
        """
sum by (namespace, run) (run_state:podscale_train_wall_seconds:max{state="productive"})
/
sum by (namespace, run) (run_state:podscale_train_wall_seconds:max)
""",
        "Goodput of the whole run, over all its launches.",
    ),
)
STATE_RULES = (
    RecordingRule(
        "run_cause:podscale_train_restarts:max",
        "max by (namespace, run, cause) (podscale_train_restarts_total)",
        "Restarts of a run by cause, over all its launches.",
    ),
    RecordingRule(
        "run:podscale_train_launches:max",
        "max by (namespace, run) (podscale_train_launches_total)",
        "Launches of a run so far, including those that failed before training.",
    ),
    # If this launch has written none yet, the age of the launch counts.
    RecordingRule(
        "run:podscale_train_checkpoint_age:seconds",
        """
time() - max by (namespace, run) (podscale_train_checkpoint_last_success_timestamp_seconds)
or
max by (namespace, run) (sum by (namespace, run, rank, instance) (podscale_train_phase_seconds_total))
""",
        "Age of the newest checkpoint; before the first checkpoint of a launch, the age of the launch.",
    ),
    RecordingRule(
        "run_volume:podscale_disk_free:ratio",
        "min by (namespace, run, volume) (podscale_disk_free_bytes / podscale_disk_size_bytes)",
        "Free fraction of a volume; the fullest one if every pod has its own.",
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
        "1 for each pod that belongs to the run, or did within the last 30 minutes.",
    ),
    RecordingRule(
        "run_gpu:podscale_gpu_xid:max",
        f"""
max by (namespace, run, pod, gpu) (
  {_OF_PODS.format(metric="DCGM_FI_DEV_XID_ERRORS")}
  {_OF_RUNS}
)
""",
        "Newest Xid error code of a GPU of a run, from DCGM; 0 if there was none.",
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
        "Temperature of a GPU of a run, from NVML or DCGM, degrees Celsius.",
    ),
)
