"""Goodput and jobs of runs whose nodes fail at published rates, against the analytic value.

    python -m benchmarks.failures [--hours 72] [--repetitions 8] [--kubeconfig FILE --runs-on-cluster 16]

The first part is a discrete-event simulation with a virtual clock. The second needs a cluster with kwok and the
operators, such as `make cluster-up FULL=1`: the same trainings as real jobs on fake nodes.
"""

import tempfile
import uuid
from dataclasses import replace
from pathlib import Path

from kubernetes import client, config

from benchmarks.conditions import head
from benchmarks.failures.cluster_objects import new_namespace
from benchmarks.failures.fleet import ClusterResult, Fleet, FleetSpec
from benchmarks.failures.model import LLAMA_3, RSC_1, RSC_2, FakeRun
from benchmarks.failures.page import cluster_text, goodput_table, largest_difference
from benchmarks.failures.simulation import simulate_fleet
from benchmarks.harness import Options, write_results

LARGE_RUN_PODS, LARGE_JOBSET_PODS, SMALL_RUN_PODS = 64, 16, 4
"""Pods of a run on the cluster; each stands for several nodes. A JobSet creates all of them again at each failure."""


def simulated_section(hours: float, repetitions: int, runs: int) -> list[str]:
    """Return the page's section on the simulation."""
    large = FakeRun(2048, LLAMA_3)
    rows, results = [], []
    for name, run, count, text in (
        ("Llama 3", large, repetitions, f"1 of 2,048 nodes, {repetitions} times"),
        ("RSC-1", FakeRun(64, RSC_1), runs, f"{runs} of 64 nodes"),
        ("RSC-2", FakeRun(64, RSC_2), runs, f"{runs} of 64 nodes"),
    ):
        for steps in (run.best_checkpoint_steps(), round(1800 / run.step_seconds)):
            result = simulate_fleet(replace(run, checkpoint_steps=steps), count, hours)
            rows.append(result.row(name, text))
            results.append(result)
    return [
        "## Accounting",
        "",
        f"A discrete-event simulation of {hours:g} hours. Fake pods train at a modelled pace (a step of "
        f"{large.step_seconds:g} s; a checkpoint stalls it for {large.save_seconds:g} s; {large.replace_seconds:g} s "
        f"until the pods of a failed node are replaced and {large.start_seconds:g} s until they train) and drive "
        "Podscale's own accounting. No cluster, no job and no launcher takes part. `analytic` is Daly's formula. The "
        "first of two rows has Young's checkpoint interval, the second one of 30 minutes. Llama 3's rate is from its "
        "paper (arXiv 2407.21783); those of RSC-1 and RSC-2 (arXiv 2410.21680) are recalled.",
        "",
        *goodput_table(rows),
        "",
        largest_difference(results),
    ]


def cluster_section(kubeconfig: Path | None, hours: float, runs: int) -> list[str]:
    """Return the page's section on the jobs; without a cluster, the reason why it is empty."""
    lines = ["", "## Jobs on a simulated cluster", ""]
    if kubeconfig is None:
        return [*lines, "Not run: it needs `--kubeconfig` of a cluster with kwok."]
    settings = client.Configuration()
    config.load_kube_config(str(kubeconfig), client_configuration=settings)
    api = client.ApiClient(settings)
    large, small = _with_best_interval(FakeRun(2048, LLAMA_3)), _with_best_interval(FakeRun(64, RSC_1))
    results: list[ClusterResult] = []
    for spec in (
        FleetSpec("pytorchjob", large, 1, LARGE_RUN_PODS, hours),
        FleetSpec("jobset", large, 1, LARGE_JOBSET_PODS, hours),
        FleetSpec("pytorchjob", small, runs, SMALL_RUN_PODS, hours),
    ):
        name = f"failures-{uuid.uuid4().hex[:6]}"
        with tempfile.TemporaryDirectory() as folder, new_namespace(client.CoreV1Api(api), name) as namespace:
            results.append(Fleet(api, namespace, spec, Path(folder)).run())
            print(results[-1], flush=True)
    return [*lines, *cluster_text(results)]


def _with_best_interval(run: FakeRun) -> FakeRun:
    return replace(run, checkpoint_steps=run.best_checkpoint_steps())


def main() -> None:
    options = Options(__doc__)
    options.add_size("--hours", full=72.0, small=12.0, help="simulated hours", type=float)
    options.add_size("--repetitions", full=8, small=1, help="repetitions of the large run", type=int)
    options.add_size("--runs", full=156, small=2, help="runs of 64 nodes; 156 take 10,000", type=int)
    options.add_size("--runs-on-cluster", full=16, small=1, help="runs of 64 nodes on the cluster", type=int)
    options.add_argument("--kubeconfig", type=Path, help="cluster with kwok; without it only the simulation runs")
    given = options.read()
    lines = head("Goodput when nodes fail", ["kubernetes"])
    lines += simulated_section(given.hours, given.repetitions, given.runs)
    lines += cluster_section(given.kubeconfig, given.hours, given.runs_on_cluster)
    write_results(given.results, "failures.md", lines)


if __name__ == "__main__":
    main()
