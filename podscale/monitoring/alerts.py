"""Alert rules, each with a page in docs/runbooks/ and cases in tests/rules/.

No alert may fire only because a pod restarted. None may fire for a run that evaluates, still starts, or is done (its
series are gone, or `podscale_train_done` is 1). Expressions therefore use the current state of the run, and hold times
exceed the windows that a start distorts.
"""

from podscale.monitoring.rule_types import AlertRule

RUN_TEXT = "Run {{ $labels.run }}{{ with $labels.namespace }} in {{ . }}{{ end }}"
RANK_TEXT = "Rank {{ $labels.rank }} of run {{ $labels.run }}{{ with $labels.namespace }} in {{ . }}{{ end }}"
_UNFINISHED = "unless max by (namespace, run) (podscale_train_done) == 1"

PROGRESS_ALERTS = (
    # An evaluation excuses a run only while it counts images.
    AlertRule(
        "PodscaleTrainingStalled",
        f"""
time() - max by (namespace, run) (podscale_train_last_step_timestamp_seconds)
and sum by (namespace, run) (increase(podscale_train_images_total[10m])) == 0
and sum by (namespace, run) (podscale_train_images_total) > 0
unless sum by (namespace, run) (increase(podscale_eval_images_total[10m])) > 0
{_UNFINISHED}
""",
        "5m",
        "critical",
        f"{RUN_TEXT} has trained on no image for 15 minutes.",
        "Its pods answer scrapes, but the last step ended {{ $value | humanizeDuration }} ago. Likely causes: ranks "
        "wait for a lost rank, a loader is blocked, or a volume does not answer.",
    ),
    AlertRule(
        "PodscaleTrainingNotStarted",
        f"""
max by (namespace, run) (sum by (namespace, run, rank, instance) (podscale_train_phase_seconds_total))
and sum by (namespace, run) (podscale_train_images_total) == 0
{_UNFINISHED}
""",
        "30m",
        "warning",
        f"{RUN_TEXT} has been up for half an hour and has not trained yet.",
        "Its ranks started {{ $value | humanizeDuration }} ago and have not completed a step. Likely causes: they wait "
        "for another rank, for data, or for a compilation.",
    ),
    # Three cases: a target that stopped answering, one that never answered (its pod's label has the run), and a pod
    # that kube-state-metrics reports as running but that is not a target.
    AlertRule(
        "PodscaleMetricsAbsent",
        """
(
  count by (namespace, run) (
    group by (namespace, run, job, instance) (last_over_time(podscale_build_info[1h]))
    and on (namespace, job, instance) up == 0
  )
  or
  count by (namespace, run) (label_replace(up{podscale_dev_run!=""} == 0, "run", "$1", "podscale_dev_run", "(.+)"))
  or
  count by (namespace, run) (
    group by (namespace, run, pod) (last_over_time(podscale_build_info{pod!=""}[1h]))
    and on (namespace, pod) max by (namespace, pod) (kube_pod_status_phase{phase="Running"}) == 1
    unless on (namespace, pod) up
  )
)
unless max by (namespace, run) (last_over_time(podscale_train_done[1h])) == 1
""",
        "5m",
        "warning",
        f"{RUN_TEXT} has pods that do not answer scrapes.",
        "Prometheus has not scraped {{ $value }} of its pods for 5 minutes. Their state is unknown, and other alerts "
        "of this run do not see them.",
    ),
    # A stalled run has its own alert. The median and the hold time together need half an hour of training.
    AlertRule(
        "PodscaleThroughputRegressed",
        """
(run:podscale_train_images_per_chip_updating:rate5m > 0)
/
quantile_over_time(0.5, run:podscale_train_images_per_chip_updating:rate5m[3h])
< @throughputShare@
""",
        "15m",
        "warning",
        f"{RUN_TEXT} trains at {{{{ $value | humanizePercentage }}}} of its usual speed.",
        "Images per second and chip are {{ $value | humanizePercentage }} of their median over the last 3 hours (limit "
        "{{ @throughputShare@ | humanizePercentage }}). Evaluations and checkpoints do not count.",
    ),
    # One starved rank makes all others wait in the all-reduce, so the worst rank counts, not the mean.
    AlertRule(
        "PodscaleDataStarved",
        "max by (namespace, run) (run_rank:podscale_train_data_wait:ratio_5m) > @dataWaitShare@",
        "10m",
        "warning",
        f"{RUN_TEXT} waits for images.",
        "Its worst rank spends {{ $value | humanizePercentage }} of its time waiting for images (limit "
        "{{ @dataWaitShare@ | humanizePercentage }}). The other ranks wait for this rank. `podscale bench input RUN` "
        "measures what a host delivers, what the model takes, and what would raise it: cores and input.workers, the "
        "native extension, a decode index, input.decoded_cache_bytes, a smaller data.resize_short.",
    ),
    # The lower quartile, because the median of two ranks lies halfway to the slow one. Ranks that are hardly busy
    # (evaluating, stalled) differ by chance.
    AlertRule(
        "PodscaleStraggler",
        """
run_rank:podscale_train_busy_seconds:rate5m
/ on (namespace, run) group_left ()
quantile by (namespace, run) (0.25, run_rank:podscale_train_busy_seconds:rate5m)
> @stragglerRatio@
and run_rank:podscale_train_busy_seconds:rate5m > 0.1
""",
        "10m",
        "warning",
        f"{RANK_TEXT} is slower than the others.",
        'It is busy {{ $value | printf "%.2f" }} times as long as the faster ranks (limit {{ @stragglerRatio@ }}). '
        "Every step takes as long as its slowest rank.",
    ),
)
# The loss scale of fp16 settles within the first steps, which may be slow. Hold times exceed the windows, so that one
# burst never fires an alert.
NUMERICS_ALERTS = (
    AlertRule(
        "PodscaleNonFiniteSteps",
        """
max by (namespace, run, kind) (increase(podscale_train_nonfinite_steps_total[10m]))
/ on (namespace, run) group_left ()
max by (namespace, run) (increase(podscale_train_steps_total[10m]))
> @nonfiniteShare@
""",
        "15m",
        "warning",
        f"{RUN_TEXT} has steps with a non-finite {{{{ $labels.kind }}}}.",
        "{{ $value | humanizePercentage }} of the steps of the last 10 minutes had a non-finite {{ $labels.kind }} "
        "(limit {{ @nonfiniteShare@ | humanizePercentage }}). These steps were masked and changed no weight.",
    ),
    AlertRule(
        "PodscaleStepsSkippedHigh",
        """
max by (namespace, run) (increase(podscale_train_steps_skipped_total[5m]))
/
max by (namespace, run) (increase(podscale_train_steps_total[5m]))
> @skippedStepsShare@
""",
        "10m",
        "critical",
        f"{RUN_TEXT} masks {{{{ $value | humanizePercentage }}}} of its steps.",
        "{{ $value | humanizePercentage }} of the steps of the last 5 minutes had a non-finite loss or gradient and "
        "changed no weight (limit {{ @skippedStepsShare@ | humanizePercentage }}). The chips are busy, but the model "
        "learns little.",
    ),
    AlertRule(
        "PodscaleSamplesSkippedHigh",
        """
sum by (namespace, run) (increase(podscale_train_samples_skipped_total[30m]))
/
sum by (namespace, run) (increase(podscale_train_images_total[30m]))
> @skippedSamplesShare@
and sum by (namespace, run) (increase(podscale_train_samples_skipped_total[30m])) >= 10
""",
        "5m",
        "warning",
        f"{RUN_TEXT} cannot decode {{{{ $value | humanizePercentage }}}} of its images.",
        "{{ $value | humanizePercentage }} of the images of the last 30 minutes could not be decoded and were replaced "
        "by others (limit {{ @skippedSamplesShare@ | humanizePercentage }}). Sharding decoded all of them, so shards "
        "were damaged later.",
    ),
)
RESTART_ALERTS = (
    AlertRule(
        "PodscaleCheckpointStale",
        f"""
run:podscale_train_checkpoint_age:seconds
> @checkpointIntervals@ * max by (namespace, run) (podscale_train_checkpoint_interval_seconds)
{_UNFINISHED}
""",
        "5m",
        "critical",
        f"{RUN_TEXT} has written no checkpoint for {{{{ $value | humanizeDuration }}}}.",
        "Its newest checkpoint is {{ $value | humanizeDuration }} old, more than {{ @checkpointIntervals@ }} times the "
        "interval in the run document. A restart now loses all work since then.",
    ),
    AlertRule(
        "PodscaleCheckpointFailing",
        "max by (namespace, run, reason) (increase(podscale_train_checkpoint_failures_total[30m])) > 0",
        "0s",
        "warning",
        f"{RUN_TEXT} could not write a checkpoint ({{{{ $labels.reason }}}}).",
        'Failed checkpoints in the last 30 minutes: {{ $value | printf "%.0f" }} (reason "{{ $labels.reason }}"). The '
        "newest complete checkpoint is intact. The run fails when the next checkpoint is due.",
    ),
    # Rank 0 exports restarts once it trains. The supervisor exports launches earlier, also those of ranks that fail
    # during their start. Range vectors include runs that have exited, so a series of the last ten minutes is required.
    AlertRule(
        "PodscaleRestartLoop",
        """
(
  increase(run:podscale_train_launches:max[1h]) >= @restartsPerHour@
  or
  sum by (namespace, run) (increase(run_cause:podscale_train_restarts:max[1h])) >= @restartsPerHour@
)
and (
  group by (namespace, run) (last_over_time(podscale_train_launches_total[10m]))
  or
  group by (namespace, run) (last_over_time(podscale_train_done[10m]))
)
unless max by (namespace, run) (last_over_time(podscale_train_done[10m])) == 1
""",
        "0s",
        "warning",
        f'{RUN_TEXT} restarted {{{{ $value | printf "%.0f" }}}} times within an hour.',
        '{{ $value | printf "%.0f" }} restarts in the last hour (limit {{ @restartsPerHour@ }}). Each costs the start, '
        "the compilation, and the steps since the newest checkpoint.",
    ),
    # The window of an hour is smooth enough. A longer hold time would begin again at every restart. A run that is new
    # or resumed after a pause has half an hour to start.
    AlertRule(
        "PodscaleGoodputLow",
        f"""
run:podscale_train_goodput:ratio_1h < @goodputShare@
and sum by (namespace, run) (run_state:podscale_train_wall_seconds:max) > @1h@
and sum by (namespace, run) (run_state:podscale_train_wall_seconds:delta1h) > @30m@
{_UNFINISHED}
""",
        "5m",
        "warning",
        f"{RUN_TEXT} has a goodput of {{{{ $value | humanizePercentage }}}}.",
        "{{ $value | humanizePercentage }} of the last hour was spent on steps that were kept (limit "
        "{{ @goodputShare@ | humanizePercentage }}). The rest was spent on starts, compilation, waiting for data, "
        "checkpoints, evaluations, or repeated steps.",
    ),
)
RESOURCE_ALERTS = (
    # Both the last hour and its last quarter must predict zero, after half an hour of samples: checkpoints are written
    # and deleted, and a cache is filled to its limit once.
    AlertRule(
        "PodscaleDiskFilling",
        """
run_volume:podscale_disk_free:ratio
and on (namespace, run, volume) (
  group by (namespace, run, volume) (
    predict_linear(podscale_disk_free_bytes[1h], @diskFullHours@ * @1h@) < 0
    and predict_linear(podscale_disk_free_bytes[15m], @diskFullHours@ * @1h@) < 0
    and present_over_time(podscale_disk_free_bytes[10m] offset 30m)
  )
  or
  run_volume:podscale_disk_free:ratio < @diskFreeShare@
)
""",
        "10m",
        "critical",
        f"{RUN_TEXT}: its {{{{ $labels.volume }}}} is filling up.",
        "{{ $value | humanizePercentage }} of the {{ $labels.volume }} is free. Either this is less than "
        "{{ @diskFreeShare@ | humanizePercentage }}, or at the rate of the last hour the volume is full within "
        "{{ @diskFullHours@ }} hours. On a full workspace checkpoints fail, and the work since the newest checkpoint "
        "can be lost.",
    ),
    AlertRule(
        "PodscaleSeriesLimitExceeded",
        """
max by (namespace, run) (
  scrape_samples_post_metric_relabeling
  * on (namespace, job, instance) group_left (run)
  group by (namespace, job, instance, run) (podscale_build_info)
) > @seriesPerTarget@
""",
        "15m",
        "warning",
        f"{RUN_TEXT}: one pod exports {{{{ $value }}}} series.",
        "One of its pods exports {{ $value }} series (limit {{ @seriesPerTarget@ }}). Likely cause: a label with an "
        "unbounded set of values.",
    ),
    # Codes 13, 31, 43 and 45 come from the program or its exit. An unchanged code is from an earlier user of the GPU.
    AlertRule(
        "PodscaleGPUXid",
        """
run_gpu:podscale_gpu_xid:max > 0 != 13 != 31 != 43 != 45
and changes(run_gpu:podscale_gpu_xid:max[15m]) > 0
""",
        "0s",
        "critical",
        "GPU {{ $labels.gpu }} of pod {{ $labels.pod }} reports Xid {{ $value }}.",
        f"{RUN_TEXT}: the driver reported Xid {{{{ $value }}}} on GPU {{{{ $labels.gpu }}}} "
        "of pod {{ $labels.pod }}. The error is in the GPU, its memory or its links, not in the program.",
    ),
    AlertRule(
        "PodscaleGPUThermal",
        "run_gpu:podscale_gpu_temperature_celsius:max > @gpuCelsius@",
        "10m",
        "warning",
        "GPU {{ $labels.gpu }} of pod {{ $labels.pod }} is at {{ $value }} C.",
        f"{RUN_TEXT}: GPU {{{{ $labels.gpu }}}} of pod {{{{ $labels.pod }}}} has been above {{{{ @gpuCelsius@ }}}} C "
        "for 10 minutes, now {{ $value }} C. A hot GPU lowers its clocks, and all ranks wait for it.",
    ),
)
