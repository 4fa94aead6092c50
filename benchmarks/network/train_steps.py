"""Parts `scaling` and `update`: whole training steps over the emulated links."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network.measurement import CpuUsage, measure, run_ranks, time_slowest
from benchmarks.network.netns_cluster import NetnsCluster, netns_cluster
from benchmarks.network.replay import ReplayedModel, StepTrace, record_step
from benchmarks.network.setting import MB, NODE_RATE, RANK_RATE, Setting, bound, cores, series
from podscale import models
from podscale.config import ModelSection, TrainSection
from podscale.config.train import AllReduceSection
from podscale.pytorch.models import build_model
from podscale.pytorch.optim import HyperParams
from podscale.pytorch.precision import build_precision
from podscale.pytorch.reducer import build_reducer
from podscale.pytorch.trainer import build_reducer_and_optimizer
from podscale.pytorch.world import World
from podscale.report.charts.lines import XAxis, YAxis
from podscale.report.charts.standalone import line_chart_svg

CLASSES = 1000
BACKWARD = {"short": 0.6, "long": 2.4}
"""Time of backward over the lower bound of the links: with `short` the links are the bottleneck."""
LARGEST_BATCH = 256
"""Most images of a rank, so that the activations fit into memory."""
UPDATE_ROUNDS = 5
DDP, NO_REDUCTION = "DDP default", "no reduction"
SCALED: dict[str, dict[str, Any]] = {
    f"{name}, {'overlap' if overlap else 'no overlap'}": {"algorithm": name, "overlap": overlap}
    for name in ("torus2d", "flat")
    for overlap in (True, False)
} | {"torus2d, overlap, buckets of 8 MiB": {"algorithm": "torus2d", "bucket_mb": 8.0}}


def scaling(setting: Setting) -> None:
    """Measure the weak scaling of a step from 1 to 8 ranks on two nodes, with and without overlap, against DDP."""
    torch.set_num_threads(1)
    page = setting.head("scaling", "Weak scaling of a training step")
    page += [
        f"{cores()} cannot compute for eight ranks, so the computation is replayed: a step of {setting.model_name} "
        f"({setting.side} px, SGD) was measured on one core, and every rank sleeps for the measured times and delivers "
        "gradients of the real shapes when the measured step did. Autograd, buckets (25 MiB, ours and DDP's, unless "
        "stated otherwise), collectives and links are real. A step ends when its slowest rank does. Efficiency: time "
        "of the step without reduction / time of the step.",
    ]
    pictures: dict[str, str] = {}
    for name, batch in batches(setting).items():
        picture = f"network-scaling-{name}.svg"
        section, pictures[picture] = scaling_section(setting, batch)
        page += [*section, "", f"![Efficiency]({picture})"]
    setting.write("scaling", page, pictures)


def batches(setting: Setting) -> dict[str, int]:
    """Choose the images of a rank so that backward takes BACKWARD times the lower bound of the links."""
    if setting.small:
        return {"short": 2}
    probe = 16
    backward = record_step(setting.model, CLASSES, side=setting.side, batch=probe, rounds=1).backward
    least = bound(setting.shape(2, 4, 2 * RANK_RATE, 4 * NODE_RATE), setting.gradients.bytes / MB)
    return {
        name: max(1, min(LARGEST_BATCH, round(factor * least / backward * probe))) for name, factor in BACKWARD.items()
    }


def scaling_section(setting: Setting, batch: int) -> tuple[list[str], str]:
    """Return the section of a batch size, and its picture."""
    trace = record_step(setting.model, CLASSES, side=setting.side, batch=batch)
    table = [
        "| ranks | variant | step, s | efficiency | wait after backward, s | busy |",
        "|---:|---|---:|---:|---:|---:|",
        f"| 1 | {NO_REDUCTION} | {trace.step:.3f} | 100.0 % | | |",
    ]
    curves: dict[str, list[tuple[float, float]]] = {}
    for ranks in (2,) if setting.small else (1, 2, 4):
        shape = setting.shape(2, ranks, 2 * RANK_RATE, 4 * NODE_RATE)
        with netns_cluster(shape) as cluster:
            times = run_ranks(cluster, weak_scaling, SCALED, trace, 1 if setting.small else 2)[0]
        for name, variant in times.items():
            efficiency = times[NO_REDUCTION].step / variant.step
            wait = "" if name in (NO_REDUCTION, DDP) else f"{variant.wait:.3f}"
            table.append(
                f"| {shape.size} | {name} | {variant.step:.3f} | {efficiency:.1%} | {wait} | {variant.busy:.0%} |"
            )
            if name != NO_REDUCTION:
                curves.setdefault(name, [(1.0, 1.0)]).append((float(shape.size), efficiency))
    title = f"Weak scaling, batch {batch} a rank, node link half a rank link"
    x = XAxis("ranks", log=True, ticks=(1, 2, 4, 8))
    section = [
        "",
        f"## {batch} images a rank",
        "",
        f"Forward {trace.forward:.2f} s, backward {trace.backward:.2f} s, optimizer {trace.optimizer:.2f} s; the links "
        f"need at least {bound(shape, trace.bytes / MB):.2f} s for the {trace.bytes / MB:.1f} MB of gradients of "
        f"{shape} (fewer ranks a node for fewer ranks).",
        "",
        *table,
    ]
    return section, line_chart_svg(title, series(curves), x=x, y=YAxis("efficiency", limits=(0.0, 1.0)))


class StepTimes(NamedTuple):
    """Median seconds of a step and of its wait after backward, on rank 0; fraction of the machine's cores in use."""

    step: float
    wait: float
    busy: float


def weak_scaling(
    world: World, sections: dict[str, dict[str, Any]], trace: StepTrace, rounds: int
) -> dict[str, StepTimes]:
    """Return the times of the replayed step without reduction, with every section, and with DDP."""
    times = {NO_REDUCTION: _time_reducer(world, {"algorithm": "flat"}, trace, rounds, reduces=False)}
    for name, section in sections.items():
        times[name] = _time_reducer(world, section, trace, rounds)
    return {**times, DDP: _time_ddp(world, trace, rounds)}


def _time_reducer(
    world: World, section: dict[str, Any], trace: StepTrace, rounds: int, *, reduces: bool = True
) -> StepTimes:
    model = ReplayedModel(StepTrace.untimed(trace.shapes), float(world.rank))
    reducer = build_reducer(AllReduceSection(**section), model, world)

    def step() -> float:
        reducer.start_step()
        reducer.backward(model(_scalar()), last=reduces)
        backward_end = time.perf_counter()
        if reduces:
            reducer.finish()
        return time.perf_counter() - backward_end

    _time_steps(step, 0.0, 1)  # opens connections and allocates memory
    model.trace = trace
    times = _time_steps(step, trace.optimizer, rounds)
    if reduces:
        _check_mean(world, str(section), reducer.buffer.views)
    reducer.close()
    return times


def _time_ddp(world: World, trace: StepTrace, rounds: int) -> StepTimes:
    """Time torch's DistributedDataParallel with its defaults, which waits inside backward."""
    model = ReplayedModel(StepTrace.untimed(trace.shapes), float(world.rank))
    ddp = DistributedDataParallel(model, init_sync=False)

    def step() -> float:
        ddp.zero_grad()
        ddp(_scalar()).backward()
        return 0.0

    _time_steps(step, 0.0, 2)  # DDP lays out its buckets in its first two steps
    model.trace = trace
    times = _time_steps(step, trace.optimizer, rounds)
    _check_mean(world, DDP, [p.grad for p in model.parameters() if p.grad is not None])
    return times


def _scalar() -> Tensor:
    return torch.zeros((), requires_grad=True)


def _time_steps(step: Callable[[], float], optimizer_seconds: float, rounds: int) -> StepTimes:
    """Time `step`, which returns its wait after backward, followed by a sleep instead of the optimizer."""
    waits, usage = list[float](), CpuUsage()

    def step_and_sleep() -> None:
        waits.append(step())
        time.sleep(optimizer_seconds)

    steps = [time_slowest(step_and_sleep) for _ in range(rounds)]
    return StepTimes(statistics.median(steps), statistics.median(waits), usage.fraction())


def _check_mean(world: World, name: str, gradients: list[Tensor]) -> None:
    mean = torch.tensor((world.size - 1) / 2)
    if not all(torch.allclose(gradient, mean, atol=1e-2) for gradient in gradients):
        raise RuntimeError(f"{name}: wrong mean")


def update(setting: Setting) -> None:
    """Measure the optimizer's share of a step: replicated, and sharded over a row and over all ranks."""
    torch.set_num_threads(1)
    trace = record_step(setting.model, CLASSES, side=setting.side, batch=8)
    compute = trace.forward + trace.backward
    shape = setting.shape(2, 4, 2 * RANK_RATE, 4 * NODE_RATE)
    with netns_cluster(shape) as cluster:
        costs = run_ranks(cluster, update_costs, cluster, setting.model, update_sections())[0]
    lines = setting.head("update", "Sharding the update of the weights")
    lines += [
        f"{setting.model_name}, {shape}. A row of the torus is a node, so each rank updates 1/{shape.ranks} of the "
        f"weights, or 1/{shape.size} over all ranks. Forward and backward of 8 images of {setting.side} px take "
        f"{compute:.2f} s on one core. The update is the CPU time of one rank, since all ranks share "
        f"{cores().lower()}. A sharded update gathers weights after "
        "the update instead of gradients before it. That is as many bytes (half in bf16), but no backward pass hides "
        "them. State: fp32 masters and moments.",
        "",
        "| update | CPU, ms | share of the step | times less | gather, ms | a rank sends, MB | state of a rank, MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, cost in costs.items():
        replicated = costs[f"{name.split(',')[0]}, replicated"]
        gather = f"{cost.gather * 1e3:.0f} | {cost.gather_bytes / MB:.1f}" if cost.gather else " | "
        lines.append(
            f"| {name} | {cost.update * 1e3:.1f} | {cost.update / (compute + cost.update):.1%} "
            f"| {replicated.update / cost.update:.2f} | {gather} | {cost.state_bytes / MB:.1f} |"
        )
    setting.write("update", lines)


def update_sections() -> dict[str, dict[str, Any]]:
    """Return the train sections to compare, by name."""
    sections: dict[str, dict[str, Any]] = {}
    for optimizer in ("sgd", "lars"):
        replicated = {"all_reduce": {"algorithm": "torus2d"}, "optimizer": {"name": optimizer}}
        sharded = {**replicated, "weight_update": "sharded"}
        sections |= {
            f"{optimizer}, replicated": replicated,
            f"{optimizer}, sharded": sharded,
            f"{optimizer}, sharded over all ranks": {
                **sharded,
                "all_reduce": {**replicated["all_reduce"], "shard_over": "world"},
            },
            f"{optimizer}, sharded, weights gathered in bf16": {**sharded, "weight_gather": "bf16"},
        }
    return sections


class UpdateCost(NamedTuple):
    """Cost of the optimizer on one rank: CPU seconds of a step, gather of the weights, bytes of state."""

    update: float
    gather: float
    gather_bytes: float
    state_bytes: int


def update_costs(
    world: World, cluster: NetnsCluster, model: ModelSection, sections: Mapping[str, dict[str, Any]]
) -> dict[str, UpdateCost]:
    """Return the cost of every train section on this rank."""
    return {
        name: _update_cost(world, cluster, model, TrainSection.model_validate(section))
        for name, section in sections.items()
    }


def _update_cost(world: World, cluster: NetnsCluster, model: ModelSection, train: TrainSection) -> UpdateCost:
    network, spec = build_model(model, CLASSES), models.model_spec(model, CLASSES)
    precision = build_precision(train, world)
    reducer, weights, optimizer = build_reducer_and_optimizer(train, network, spec, precision, world, 40.0, extra=1)
    hyper, finite = HyperParams(*torch.tensor([0.1, 0.9, 1e-4, 2.0]).unbind()), torch.tensor(True)
    seconds = []
    for _ in range(UPDATE_ROUNDS):
        for gradients in reducer.buffer.averages:
            gradients.fill_(1e-3)
        dist.barrier()
        start = time.process_time()
        optimizer.step(hyper, finite)
        seconds.append(time.process_time() - start)
    gather = measure(world, cluster, weights.all_gather, 2)
    state = sum(moment.nbytes for moment in optimizer.moments.values()) + weights.masters.nbytes
    reducer.close()
    gather_seconds = gather.median if reducer.sharded_all_reduce else 0.0
    return UpdateCost(statistics.median(seconds[1:]), gather_seconds, gather.rank_bytes, state)
