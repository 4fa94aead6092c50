"""Cases of alerts on the resources of a run: volumes, GPUs, Prometheus itself."""

from typing import Any

from tests.rules.cases import Case, Line, Series, alert_cases, at, build_info, foreign, of, target, who

FILLING, SERIES = "PodscaleDiskFilling", "PodscaleSeriesLimitExceeded"
XID, THERMAL = "PodscaleGPUXid", "PodscaleGPUThermal"
GIB = 2.0**30
WORKSPACE = who(volume="workspace")


def volume(free: Line, name: str = "workspace", **where: Any) -> tuple[Series, ...]:
    """Return series of a volume of 100 GiB; `free` is in GiB."""
    free.samples = [sample if isinstance(sample, str) else sample * GIB for sample in free.samples]
    return (
        of("disk_free_bytes", free, volume=name, **where),
        of("disk_size_bytes", Line(100 * GIB).hold(120), volume=name, **where),
    )


def sawtooth(minutes: int) -> Line:
    """Return a line of free space while twenty GiB of checkpoints are written, 1 GiB a minute, and deleted."""
    line = Line(60)
    for minute in range(1, minutes + 1):
        line.jump(60 - minute % 20)
    return line


DISK_FILLING = alert_cases(
    FILLING,
    Case("half a GiB a minute", volume(Line(80).rise(120, by=-0.5)), at(60, 119, labels=WORKSPACE), (5, 25, 38)),
    Case("three percent are free, and stay", volume(Line(3).hold(120)), at(12, 119, labels=WORKSPACE), (5,)),
    Case("checkpoints come and go", volume(sawtooth(120)), silent=(30, 50, 70, 90, 119)),
    Case("is filled slowly", volume(Line(80).rise(120, by=-0.05)), silent=(30, 60, 119)),
    Case(
        "a cache is filled on purpose in twenty minutes",
        volume(Line(90).rise(20, by=-3).hold(100), "cache"),
        silent=(10, 25, 35, 60, 119),
    ),
    Case(
        "restarts in a new pod and unpacks",
        (*volume(Line(80).hold(40).end()), *volume(Line(80, after=43).rise(10, by=-2).hold(60), launch=2)),
        silent=(40, 50, 60, 80, 100),
    ),
    Case(
        "scrapes are lost while it fills",
        volume(Line(80).rise(40, by=-0.5).gap(5).jump(57).rise(60, by=-0.5)),
        at(80, labels=WORKSPACE),
        (20,),
    ),
    Case(
        "one volume of two",
        (*volume(Line(80).hold(120)), *volume(Line(2).hold(120), "scratch")),
        at(12, labels=who(volume="scratch")),
    ),
    Case(
        "the scratch of one pod of two",
        (*volume(Line(80).hold(120), "scratch"), *volume(Line(2).hold(120), "scratch", launch=2)),
        at(12, labels=who(volume="scratch")),
    ),
    Case("ends", volume(Line(2).hold(20).end()), at(15, labels=WORKSPACE), (22, 60)),
    Case(
        "one of two runs, in two namespaces",
        (
            *volume(Line(80).hold(120), run="fine", namespace="fine"),
            *volume(Line(2).hold(120), run="sick", namespace="sick"),
        ),
        at(12, labels=who("sick", "sick", volume="workspace")),
    ),
)


def exporting(line: Line, *, minutes: int = 60, **where: Any) -> tuple[Series, ...]:
    """Return the number of series that a pod exports, and its build info."""
    labels = target(**where)
    return build_info(Line(1).hold(minutes), **where), foreign("scrape_samples_post_metric_relabeling", line, **labels)


SERIES_LIMIT = alert_cases(
    SERIES,
    Case(
        "one pod of two exports ten thousand",
        (*exporting(Line(10000).hold(60)), *exporting(Line(900).hold(60), rank=1)),
        at(17, 60),
        (5, 13),
    ),
    Case("eight ranks with 150 each", exporting(Line(1200).hold(60)), silent=(17, 60)),
    Case(
        "too many for ten minutes",
        exporting(Line(1200).hold(10).jump(9000).hold(9).jump(1200).hold(30)),
        silent=(12, 19, 26, 40),
    ),
    Case(
        "a third-party pod",
        (
            foreign(
                "scrape_samples_post_metric_relabeling",
                Line(90000).hold(60),
                job="theirs",
                instance="x:1",
                namespace="podscale",
            ),
        ),
        silent=(17, 60),
    ),
    Case(
        "restarts in a new pod",
        (
            *exporting(Line(10000).hold(30).end(), minutes=30),
            build_info(Line(1, after=33).hold(30), launch=2),
            foreign("scrape_samples_post_metric_relabeling", Line(900, after=33).hold(30), **target(launch=2)),
        ),
        at(20),
        (40, 50, 60),
    ),
    Case("two scrapes are lost", exporting(Line(10000).hold(30).gap(2).jump(10000).hold(20)), at(50), (5,)),
    Case(
        "ends",
        (
            build_info(Line(1).hold(30).end()),
            foreign("scrape_samples_post_metric_relabeling", Line(10000).hold(30).end(), **target()),
        ),
        at(20),
        (32, 50),
    ),
    Case(
        "one of two runs, in two namespaces",
        (
            *exporting(Line(900).hold(60), run="fine", namespace="fine"),
            *exporting(Line(10000).hold(60), run="sick", namespace="sick"),
        ),
        at(20, labels=who("sick", "sick")),
    ),
)

POD = {"pod": "digits-worker-0", "gpu": "3"}
GPU = (who(**POD),)
EXPORTER = {"job": "dcgm", "instance": "node-7:9400", "UUID": "GPU-1"}


def gpu_of(metric: str, line: Line, *, honoured: bool = True, **more: str) -> Series:
    """Return a DCGM series of GPU 3 of our pod; if not `honoured`, the scraper's labels take precedence."""
    theirs = {"pod": POD["pod"], "namespace": "podscale"} | {
        key: more.pop(key) for key in ("pod", "namespace") if key in more
    }
    if not honoured:
        theirs = {f"exported_{key}": value for key, value in theirs.items()} | {"pod": "dcgm-x7", "namespace": "gpus"}
    return foreign(metric, line, gpu="3", **EXPORTER, **theirs, **more)


def xid(line: Line, **more: Any) -> Series:
    return gpu_of("DCGM_FI_DEV_XID_ERRORS", line, **more)


HERE = build_info(Line(1).hold(60))
AT_20 = Line().hold(19).jump(79).hold(40)
GPU_XID = alert_cases(
    XID,
    Case("79, the GPU is off the bus", (HERE, xid(AT_20)), {21: GPU, 33: GPU}, (19, 36, 59)),
    Case("under labels that the scraper renamed", (HERE, xid(AT_20, honoured=False)), {21: GPU}, (19,)),
    Case(
        "the exporter has the code in an additional label",
        (HERE, xid(Line().hold(19).end(), err_code="0"), xid(Line(79, after=20).hold(40), err_code="79")),
        {22: GPU},
        (19, 40),
    ),
    Case("the pod dies of it", (build_info(Line(1).hold(20).end()), xid(AT_20)), {25: GPU}, (19, 55)),
    Case("31, the program's own", (HERE, xid(Line().hold(19).jump(31).hold(40))), silent=(21, 33)),
    Case("none", (HERE, xid(Line().hold(60))), silent=(21, 33)),
    Case("the code of whoever had the GPU before", (HERE, xid(Line(79).hold(60))), silent=(2, 21, 33)),
    Case("before scrapes are lost", (HERE, xid(Line().hold(19).gap(6).jump(79).hold(30))), {27: GPU}, (24,)),
    Case(
        "restarts in a new pod on the same GPU",
        (build_info(Line(1).hold(20).end()), build_info(Line(1, after=23).hold(37), launch=2), xid(AT_20)),
        {25: GPU},
        (45,),
    ),
    Case(
        "is done: later errors of the GPU belong to other jobs",
        (build_info(Line(1).hold(10).end()), xid(Line().hold(49).jump(79).hold(10))),
        silent=(51, 59),
    ),
    Case("a pod of somebody else", (HERE, xid(AT_20, pod="theirs")), silent=(21, 33)),
    Case(
        "one of two runs, in two namespaces",
        (
            build_info(Line(1).hold(60), run="fine", namespace="fine"),
            build_info(Line(1).hold(60), run="sick", namespace="sick"),
            xid(Line().hold(60), pod="fine-worker-0", namespace="fine"),
            xid(AT_20, pod="sick-worker-0", namespace="sick"),
        ),
        at(21, labels=who("sick", "sick", pod="sick-worker-0", gpu="3")),
    ),
)


def celsius(line: Line, **where: Any) -> Series:
    return of("gpu_temperature_celsius", line, gpu="3", **where)


GPU_THERMAL = alert_cases(
    THERMAL,
    Case("by NVML", (celsius(Line(70).hold(19).jump(90).hold(40)),), {32: GPU, 59: GPU}, (19, 28)),
    Case("by DCGM", (HERE, gpu_of("DCGM_FI_DEV_GPU_TEMP", Line(90).hold(60))), {12: GPU}, (5,)),
    Case(
        "by both",
        (HERE, celsius(Line(90).hold(60)), gpu_of("DCGM_FI_DEV_GPU_TEMP", Line(91).hold(60))),
        {12: GPU},
        (5,),
    ),
    Case(
        "warm", (HERE, celsius(Line(78).hold(60)), gpu_of("DCGM_FI_DEV_GPU_TEMP", Line(79).hold(60))), silent=(12, 59)
    ),
    Case("hot for five minutes", (celsius(Line(70).hold(19).jump(90).hold(4).jump(80).hold(30)),), silent=(21, 24, 32)),
    Case(
        "a GPU of another user",
        (HERE, gpu_of("DCGM_FI_DEV_GPU_TEMP", Line(90).hold(60), pod="theirs")),
        silent=(12, 59),
    ),
    Case(
        "restarts in a new pod, cooler",
        (celsius(Line(90).hold(20).end()), celsius(Line(60, after=23).hold(30), launch=2)),
        {15: GPU},
        (25, 40),
    ),
    Case("two scrapes are lost", (celsius(Line(90).hold(20).gap(2).jump(90).hold(20)),), {40: GPU}, (5,)),
    Case("ends", (celsius(Line(90).hold(20).end()),), {15: GPU}, (25,)),
    Case(
        "one of two runs, in two namespaces",
        (
            celsius(Line(70).hold(60), run="fine", namespace="fine"),
            celsius(Line(90).hold(60), run="sick", namespace="sick"),
        ),
        at(20, labels=who("sick", "sick", pod="sick-worker-0", gpu="3")),
    ),
)

CASES = (*DISK_FILLING, *SERIES_LIMIT, *GPU_XID, *GPU_THERMAL)
