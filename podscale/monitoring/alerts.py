"""Alert rules, each with a page in docs/runbooks/ and cases in tests/rules/.

No alert may fire because a pod restarted, or for a run that has finished (its series are gone, or `podscale_train_done`
is 1), evaluates or still starts. Expressions therefore use the current state of the run, and hold times exceed the
windows that a start distorts.
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
        "Its pods are scraped, so they live, but the last step ended {{ $value | humanizeDuration }} ago: peers that "
        "wait for each other, a blocked loader, or a volume that does not answer.",
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
        "Its ranks started {{ $value | humanizeDuration }} ago and have done no step: they may wait for a peer, for "
        "data, or for a compilation.",
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
        f"{RUN_TEXT} has pods that answer no scrape.",
        "{{ $value }} of its pods {{ if eq $value 1.0 }}has{{ else }}have{{ end }} not been scraped for 5 minutes; "
        "nothing is known of what runs there, and other alerts on this run are blind to it.",
    ),
    # A stalled run has its own alert. The median and the hold time together need a run of half an hour.
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
        "Images per second and chip, evaluations and checkpoints left out, are {{ $value | humanizePercentage }} of "
        "their median over the last 3 hours (limit {{ @throughputShare@ | humanizePercentage }}).",
    ),
    # One starved rank makes all others wait in the all-reduce, so the worst rank counts, not the mean.
    AlertRule(
        "PodscaleDataStarved",
        "max by (namespace, run) (run_rank:podscale_train_data_wait:ratio_5m) > @dataWaitShare@",
        "10m",
        "warning",
        f"{RUN_TEXT} waits for images.",
        "Its worst rank spends {{ $value | humanizePercentage }} of its time waiting for images (limit "
        "{{ @dataWaitShare@ | humanizePercentage }}), and the others wait for it.",
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
        'It is busy {{ $value | printf "%.2f" }} times as long as the faster ranks (limit {{ @stragglerRatio@ }}), and '
        "every step takes as long as its slowest rank.",
    ),
)
# Loss scaling of fp16 settles within the first steps, which may be slow. Both hold times exceed the windows, so that
# one burst never fires.
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
        "(limit {{ @nonfiniteShare@ | humanizePercentage }}); each was masked and changed no weight.",
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
        "{{ $value | humanizePercentage }} of the steps of the last 5 minutes were not finite and changed no weight "
        "(limit {{ @skippedStepsShare@ | humanizePercentage }}): chips are busy, and the model learns little.",
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
        "{{ $value | humanizePercentage }} of the images of the last 30 minutes were replaced by others (limit "
        "{{ @skippedSamplesShare@ | humanizePercentage }}), though sharding had decoded every one.",
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
        f"{RUN_TEXT} has saved nothing for {{{{ $value | humanizeDuration }}}}.",
        "Its newest checkpoint is {{ $value | humanizeDuration }} old, more than {{ @checkpointIntervals@ }} times the "
        "interval of the run document. A restart now loses all work since.",
    ),
    AlertRule(
        "PodscaleCheckpointFailing",
        "max by (namespace, run, reason) (increase(podscale_train_checkpoint_failures_total[30m])) > 0",
        "0s",
        "warning",
        f"{RUN_TEXT} could not write a checkpoint ({{{{ $labels.reason }}}}).",
        'Checkpoints not written in the last 30 minutes: {{ $value | printf "%.0f" }}, for the reason '
        '"{{ $labels.reason }}". The newest complete checkpoint is kept; the run ends when the next one is due.',
    ),
    # Rank 0 exports restarts once it trains. The supervisor exports launches earlier, also of ranks that fail during
    # their start. Range vectors include runs that have ended, hence the limit of ten minutes for a restart.
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
        f'{RUN_TEXT} was restarted {{{{ $value | printf "%.0f" }}}} times within an hour.',
        '{{ $value | printf "%.0f" }} restarts in the last hour (limit {{ @restartsPerHour@ }}): each costs the start, '
        "the compilation, and the steps since the newest checkpoint.",
    ),
    # The window of an hour is smooth enough; a longer hold time would begin again at every restart. A run that is new
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
        f"{RUN_TEXT} makes progress in {{{{ $value | humanizePercentage }}}} of its time.",
        "{{ $value | humanizePercentage }} of the last hour went into steps that last (limit "
        "{{ @goodputShare@ | humanizePercentage }}); the rest went into starts, compilation, waiting for data, "
        "checkpoints, evaluations, or work that was done twice.",
    ),
)
RESOURCE_ALERTS = (
    # Both the last hour and its last quarter must predict zero, after half an hour: checkpoints come and go, and a
    # cache is filled to its limit once.
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
        "{{ $value | humanizePercentage }} of the {{ $labels.volume }} is free, which is less than "
        "{{ @diskFreeShare@ | humanizePercentage }}, or full within {{ @diskFullHours@ }} hours at the last hour's "
        "pace. On a full volume checkpoints fail, and work since the newest one can be lost.",
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
        "One of its pods exports {{ $value }} series (limit {{ @seriesPerTarget@ }}): more than Prometheus was sized "
        "for, most likely a label with values that nobody bounded.",
    ),
    # 13, 31, 43 and 45 come from the program or its exit. An unchanged code is that of an earlier user of the GPU.
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
        "of pod {{ $labels.pod }}, an error of the GPU, its memory or its links rather than of the program.",
    ),
    AlertRule(
        "PodscaleGPUThermal",
        "run_gpu:podscale_gpu_temperature_celsius:max > @gpuCelsius@",
        "10m",
        "warning",
        "GPU {{ $labels.gpu }} of pod {{ $labels.pod }} is at {{ $value }} C.",
        f"{RUN_TEXT}: GPU {{{{ $labels.gpu }}}} of pod {{{{ $labels.pod }}}} has been above {{{{ @gpuCelsius@ }}}} C "
        "for 10 minutes, now {{ $value }} C. Near its limit it lowers its clocks, and all ranks run at its pace.",
    ),
)
