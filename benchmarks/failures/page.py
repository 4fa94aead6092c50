"""Tables and text of the page."""

from collections.abc import Sequence

from benchmarks.failures.fleet import KILL_EVERY, ClusterResult
from benchmarks.failures.model import LLAMA_3, TOLERANCE
from benchmarks.failures.simulation import FleetResult


def goodput_table(rows: Sequence[str]) -> list[str]:
    return [
        "| failure rate | runs | checkpoint, min | failures | goodput | analytic | difference | saves | redo | "
        "recovery | init |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *rows,
    ]


def largest_difference(results: Sequence[FleetResult]) -> str:
    worst = max(abs(result.difference) for result in results)
    return f"The largest difference is {worst:.2%} (goal: at most {TOLERANCE:.0%})."


def cluster_text(results: Sequence[ClusterResult]) -> list[str]:
    goodput, jobs = [], []
    for result in results:
        spec, (mean, longest) = result.spec, result.real_seconds
        name = "Llama 3" if spec.run.failure_rate == LLAMA_3 else "RSC-1"
        runs = f"{spec.runs} of {spec.run.nodes:,} nodes, as {spec.pods} pods of a {spec.backend}"
        goodput.append(result.fleet.row(name, runs))
        cells = [name, spec.backend, result.fleet.failures, f"{result.succeeded} of {spec.runs}", result.jobs]
        cells += [result.pods, result.launcher_kills, len(result.violations)]
        cells += [f"{mean:.1f}", f"{longest:.1f}", f"{result.wall_seconds / 60:.1f}"]
        jobs.append(f"| {' | '.join(map(str, cells))} |")
    broken = [violation for result in results for violation in result.violations]
    return [
        "The same trainings as jobs: real API server, scheduler, operator and launchers; nodes and running containers "
        "are kwok's. The launchers are those of a pipeline, in one process, which is killed with SIGKILL at every "
        f"{KILL_EVERY}th failure and started again. A failure deletes the node of a random pod; the pod ends as pod "
        "garbage collection ends it, and the surviving pods of a PyTorchJob restart in place.",
        "",
        "**How time passes.** Between failures the virtual clock jumps, so 72 hours of training take no time. From a "
        "failure until all pods run again, everything is real and nothing is scaled: those seconds count one to one. "
        f"{results[0].spec.run.replace_seconds:g} s to notice the failure and {results[0].spec.run.start_seconds:g} s "
        "to start the processes are modelled and added. `analytic` is Daly's formula with the mean time of a "
        "replacement as it was. A pod stands for several nodes (2,048 nodes as 64 pods: 32) and fails that many times "
        "as often as one.",
        "",
        *goodput_table(goodput),
        "",
        "| failure rate | job | failures | runs that succeeded | jobs | pods created | launchers killed | rules broken "
        "| recovery, mean real s | longest | whole fleet, min |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *jobs,
        "",
        "Rules, checked at every change of a job or a pod by a watch that is independent of the launchers: a run has "
        "never two jobs; a rank has never two live pods; the running pods of a run belong to one job, and to one "
        "attempt of a JobSet. At the end: the launcher of each run returned 0; each step was counted once as progress, "
        "and none is missing between a checkpoint and what was done before it. A run has more than one job if the "
        f"operator gave its job up after {results[0].spec.restarts} restarts (launch.cluster.restarts) and the "
        "launcher submitted it again.",
        "",
        largest_difference([result.fleet for result in results]),
        *[f"\nBroken: {violation}" for violation in broken[:20]],
    ]
