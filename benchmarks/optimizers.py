"""Time of one optimizer step on ResNet-50's 161 tensors: ours, a loop over tensors, torch's SGD, and timm if installed.

    OMP_NUM_THREADS=1 python -m benchmarks.optimizers [--rounds 5] [--steps 3] [--only SGD LARS ...]

Every variant updates its own copy of the weights, from gradients that are copied before each step (not timed). A round
is `--steps` steps of every variant in turn, and ratios are taken within a round, so that other load affects all alike.
Shampoo and Muon, whose steps take seconds, make one step in each of the last `--slow-rounds` rounds; the cost of
Shampoo's roots is the difference of two variants. On a CPU the time is CPU time, which other processes lengthen little;
on a GPU it is device time, and ours also runs as a CUDA graph.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.measure import median_ratio
from podscale.config import ModelSection
from podscale.config.optimizer import OptimizerSection
from podscale.models import ModelSpec, ParamSpec, model_spec
from podscale.pytorch.optim import ExtraStateOptimizer, HyperParams, ParamShard, ParamSlice, StepAware, build_optimizer
from podscale.training.param_layout import param_options, plan_buckets

RATE, MOMENTUM, DECAY, ETA = 0.1, 0.9, 1e-4, 1e-3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOCK = time.perf_counter if DEVICE.type == "cuda" else time.process_time

OURS: dict[str, dict[str, Any]] = {
    "SGD": {"name": "sgd"},
    "LARS": {"name": "lars"},
    "LARS, norm of sum, Nesterov": {"name": "lars", "trust": "norm_of_sum", "nesterov": True},
    "LAMB": {"name": "lamb"},
    "Adam": {"name": "adam"},
    "NLCG": {"name": "nlcg"},
    "Neumann": {"name": "neumann"},
    "Muon": {"name": "muon"},
    "RMSProp": {"name": "rmsprop"},
    "Shampoo, no new roots": {"name": "shampoo", "shampoo": {"start_step": 0, "every_steps": 2**20}},
    "Shampoo, roots in every step": {"name": "shampoo", "shampoo": {"start_step": 0}},
}
SLOW = ("Shampoo", "Muon")
"""Variants with fewer rounds, and without a CUDA graph."""
NO_ROOTS, EVERY_STEP = "Shampoo, no new roots, ours", "Shampoo, roots in every step, ours"
FOREACH = "SGD, torch foreach"
INTERVAL = 20
"""Steps over which a row of Shampoo spreads the cost of its roots, as in the digits preset."""


class Variant(Protocol):
    """Optimizer with its own weights."""

    @property
    def state_bytes(self) -> int | None:
        """Bytes besides weights and gradients; None if unknown."""
        ...

    def prepare(self) -> None:
        """Write new gradients; not timed."""
        ...

    def step(self) -> object: ...


class PodscaleVariant:
    """Optimizer over flat buffers; with `shards` > 1 it updates one shard, without the exchange of sums."""

    def __init__(self, spec: ModelSpec, options: dict[str, Any], *, shards: int = 1) -> None:
        section = OptimizerSection(**options)
        treated = param_options(section, spec)
        layout = plan_buckets([p.size for p in spec.parameters], 25 * 2**18, 32 * shards)
        slices = [
            ParamSlice(
                p.name,
                start,
                p.size,
                *treated[p.name],
                shape=p.shape,
                strides=torch.empty(p.shape).stride(),
            )
            for p, start in zip(spec.parameters, layout.starts, strict=True)
        ]
        weights = torch.randn(layout.length, device=DEVICE)
        self._gradients = torch.zeros_like(weights)
        self._source = torch.randn_like(weights)
        owned = [(start, start + (stop - start) // shards) for start, stop in layout.bounds]
        shard = ParamShard(slices, owned, weights, self._gradients)
        self._optimizer = build_optimizer(section, shard, 40.0)
        self._hyper = HyperParams(*torch.tensor([RATE, MOMENTUM, DECAY, 2.0], device=DEVICE).unbind())
        self._finite = torch.tensor(True, device=DEVICE)
        self._step = 1  # at 0 Shampoo computes roots whatever its interval is

    @property
    def state_bytes(self) -> int:
        extra = self._optimizer.extra_state_bytes if isinstance(self._optimizer, ExtraStateOptimizer) else 0
        return extra + sum(values.nbytes for values in self._optimizer.moments.values())

    def prepare(self) -> None:
        self._gradients.copy_(self._source)
        if isinstance(self._optimizer, StepAware):
            self._optimizer.start_step(self._step)
        self._step += 1

    def step(self) -> None:
        self._optimizer.step(self._hyper, self._finite)


class GraphedVariant:
    """Variant as a CUDA graph."""

    def __init__(self, inner: PodscaleVariant) -> None:
        self.prepare, self.state_bytes = inner.prepare, inner.state_bytes
        for _ in range(2):
            inner.step()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            inner.step()

    def step(self) -> None:
        self._graph.replay()


class TorchVariant:
    """Torch optimizer; batch norm and biases are a group without weight decay."""

    state_bytes = None

    def __init__(
        self, parameters: Sequence[ParamSpec], build: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> None:
        self._weights = [torch.randn(p.shape, device=DEVICE).requires_grad_() for p in parameters]
        self._source = [torch.randn_like(w) for w in self._weights]
        groups = [
            {
                "params": [w for w, p in zip(self._weights, parameters, strict=True) if (p.role == "weight") == decays],
                "weight_decay": DECAY if decays else 0.0,
            }
            for decays in (True, False)
        ]
        self._optimizer = build(groups, lr=RATE, **options)

    def prepare(self) -> None:
        for weight, gradient in zip(self._weights, self._source, strict=True):
            weight.grad = gradient.clone()

    def step(self) -> None:
        self._optimizer.step()


class LoopOptimizer(torch.optim.Optimizer):
    """LARS, one tensor after the other (You 2017, algorithm 1); without `ratio` SGD."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, *, ratio: bool) -> None:
        super().__init__(groups, {"lr": lr})
        self._ratio = ratio

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so no loss to return
        for group in self.param_groups:
            for weight in group["params"]:
                self._update(weight, weight.grad, group["lr"], group["weight_decay"])

    def _update(self, w: Tensor, g: Tensor, rate: float, decay: float) -> None:
        state = self.state[w]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(w)
        ratio: Tensor | float = 1.0
        if self._ratio and decay:
            w_norm, g_norm = w.norm(), g.norm()
            ratio = torch.where((w_norm > 0) & (g_norm > 0), ETA * w_norm / (g_norm + decay * w_norm), 1.0)
        state["momentum"].mul_(MOMENTUM).add_(rate * ratio * (g + decay * w))
        w.sub_(state["momentum"])


def variants(spec: ModelSpec, only: tuple[str, ...]) -> dict[str, Variant]:
    """Return the variants by name; `only`: prefixes of Podscale's variants, all if empty."""
    by_name: dict[str, Variant] = {
        "SGD, loop over tensors": TorchVariant(spec.parameters, LoopOptimizer, ratio=False),
        FOREACH: TorchVariant(spec.parameters, torch.optim.SGD, momentum=MOMENTUM, foreach=True),
        "SGD, torch fused": TorchVariant(spec.parameters, torch.optim.SGD, momentum=MOMENTUM, fused=True),
        "LARS, loop over tensors": TorchVariant(spec.parameters, LoopOptimizer, ratio=True),
    }
    try:
        import timm.optim as timm

        by_name["LARS, timm"] = TorchVariant(spec.parameters, timm.Lars, momentum=MOMENTUM)
        by_name["LAMB, timm"] = TorchVariant(spec.parameters, timm.Lamb)
    except ImportError:
        pass
    for name, options in OURS.items():
        if only and not name.startswith(only):
            continue
        by_name[f"{name}, ours"] = PodscaleVariant(spec, options)
        if DEVICE.type == "cuda" and not name.startswith(SLOW):
            by_name[f"{name}, ours, CUDA graph"] = GraphedVariant(PodscaleVariant(spec, options))
    by_name["LARS, ours, an eighth (sharded)"] = PodscaleVariant(spec, OURS["LARS"], shards=8)
    return by_name


def seconds_of(variant: Variant, steps: int) -> float:
    """Return the mean seconds of a step."""
    total = 0.0
    for _ in range(steps):
        variant.prepare()
        synchronize()
        start = CLOCK()
        variant.step()
        synchronize()
        total += CLOCK() - start
    return total / steps


def measure(by_name: dict[str, Variant], rounds: int, steps: int, slow_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step of every variant, by round; slow variants run in the last rounds only."""
    times: dict[str, list[float]] = {name: [] for name in by_name}
    for number in range(rounds + 1):
        for name, variant in by_name.items():
            slow = name.startswith(SLOW)
            if slow and number <= rounds - slow_rounds:
                continue
            seconds = seconds_of(variant, 1 if slow else steps)
            if number:  # the first round warms up caches and allocators
                times[name].append(seconds)
    return times | amortised(times)


def amortised(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the cost of Shampoo's roots, and of a step that computes them every INTERVAL steps."""
    no_roots, every_step = times.get(NO_ROOTS, []), times.get(EVERY_STEP, [])
    roots = [every - none for none, every in zip(no_roots, every_step, strict=True)]
    if not roots:
        return {}
    return {
        f"Shampoo, roots every {INTERVAL} steps, ours": [
            none + root / INTERVAL for none, root in zip(no_roots, roots, strict=True)
        ],
        "(Shampoo's roots alone)": roots,
    }


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def table(times: dict[str, list[float]], state_bytes: dict[str, int | None]) -> list[str]:
    """Return a row of every measured variant, with ratios within the same rounds."""
    lines = [
        "| optimizer | ms | x its loop over tensors | x torch's foreach SGD | state, MB |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, seconds in times.items():
        if not seconds:
            continue
        loop = times.get(f"{name.partition(',')[0]}, loop over tensors")  # LAMB has none
        others = (loop, times[FOREACH])
        ratios = [f"{median_ratio(seconds, other[-len(seconds) :]):.2f}" if other else "" for other in others]
        size = state_bytes.get(name)
        megabytes = "" if size is None else f"{size / 1e6:.0f}"
        lines.append(f"| {name} | {statistics.median(seconds) * 1e3:.2f} | {' | '.join(ratios)} | {megabytes} |")
    return lines


def main() -> None:
    parser = Options(__doc__)
    parser.add_size("--rounds", full=5, small=1, type=int)
    parser.add_size("--steps", full=3, small=1, type=int, help="steps of a variant in a round")
    parser.add_size("--slow-rounds", full=2, small=1, type=int, help="rounds with Shampoo and Muon, the last ones")
    parser.add_argument("--only", nargs="+", default=[], help="prefixes of the names of our variants")
    options = parser.read()
    title, model = "ResNet-50", ModelSection(name="resnet50")
    if options.small:
        title, model = "ResNet-18 of width 4", ModelSection(name="resnet18", width=4)
    lines = head(f"Optimizer step of {title}", ["torch", "timm"])
    torch.manual_seed(0)
    spec = model_spec(model, 1000)
    by_name = variants(spec, tuple(options.only))
    times = measure(by_name, options.rounds, options.steps, options.slow_rounds)
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    lines += [
        f"{len(spec.parameters)} tensors, {spec.num_parameters:,} weights, on {device}; {options.rounds} rounds "
        f"of {options.steps} steps; {'time of the device' if DEVICE.type == 'cuda' else 'CPU time of the process'}.",
        "",
        *table(times, {name: variant.state_bytes for name, variant in by_name.items()}),
    ]
    write_results(options.results, "optimizers-gpu.md" if DEVICE.type == "cuda" else "optimizers.md", lines)


if __name__ == "__main__":
    main()
