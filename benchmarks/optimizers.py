"""One update of ResNet-50's 161 tensors: our rules against a loop over tensors, torch's SGD, and timm where installed.

    OMP_NUM_THREADS=1 python -m benchmarks.optimizers [--rounds 5] [--steps 3] [--only SGD LARS ...]

Every variant updates its own copy of the weights from gradients that are laid out anew before each step (that is not
timed). A round is `--steps` steps of every variant in turn, so that a busy moment of the machine meets all; ratios are
taken within a round. Shampoo, whose update takes seconds, makes one step in each of the last `--slow-rounds` rounds;
what its roots cost is the difference of two of its variants in a round. On a CPU the time is that of the processor,
which other work does not lengthen by waiting; on a GPU it is the device's, and ours also runs as a CUDA graph, as a
whole step would.
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
from podscale.models import ParamSpec, model_spec
from podscale.pytorch.optim import ExtraStateOptimizer, HyperParams, ParamShard, ParamSlice, StepAware, build_optimizer
from podscale.training.param_layout import plan_buckets

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
    "RMSProp": {"name": "rmsprop"},
    "Shampoo, roots as they are": {"name": "shampoo", "shampoo": {"start_step": 0, "every_steps": 2**20}},
    "Shampoo, roots in every update": {"name": "shampoo", "shampoo": {"start_step": 0}},
}
NEVER_GRAPHED = ("Shampoo",)
SLOW = ("Shampoo",)
KEPT, TAKEN = "Shampoo, roots as they are, ours", "Shampoo, roots in every update, ours"
FOREACH = "SGD, torch foreach"
INTERVAL = 20
"""Updates over which a row of Shampoo spreads the cost of its roots; what the digits are trained with."""


class Variant(Protocol):
    """Rule over weights of its own."""

    @property
    def kept(self) -> int | None:
        """Bytes kept beside weights and gradients; None if that was not counted."""
        ...

    def prepare(self) -> None:
        """Lay the gradients out anew; not timed."""
        ...

    def step(self) -> object:
        """Update the weights once."""
        ...


class Ours:
    """A rule over flat buffers; `shards` > 1 updates that part alone, without the exchange of sums."""

    def __init__(self, parameters: Sequence[ParamSpec], options: dict[str, Any], *, shards: int = 1) -> None:
        layout = plan_buckets([p.size for p in parameters], 25 * 2**18, 32 * shards)
        segments = [
            ParamSlice(
                p.name,
                start,
                p.size,
                uses_weight_decay=p.role == "weight",
                uses_trust_ratio=p.role == "weight",
                shape=p.shape,
                strides=torch.empty(p.shape).stride(),
            )
            for p, start in zip(parameters, layout.starts, strict=True)
        ]
        weights = torch.randn(layout.length, device=DEVICE)
        self._gradients = torch.zeros_like(weights)
        self._source = torch.randn_like(weights)
        owned = [(start, start + (stop - start) // shards) for start, stop in layout.bounds]
        share = ParamShard(segments, owned, weights, self._gradients)
        self._rule = build_optimizer(OptimizerSection(**options), share, 40.0)
        self._hyper = HyperParams(*torch.tensor([RATE, MOMENTUM, DECAY, 2.0], device=DEVICE).unbind())
        self._finite = torch.tensor(True, device=DEVICE)
        self._number = 1  # at 0 Shampoo would take roots whatever its interval is

    @property
    def kept(self) -> int:
        shaped = self._rule.extra_state_bytes if isinstance(self._rule, ExtraStateOptimizer) else 0
        return shaped + sum(values.nbytes for values in self._rule.moments.values())

    def prepare(self) -> None:
        self._gradients.copy_(self._source)
        if isinstance(self._rule, StepAware):
            self._rule.start_step(self._number)
        self._number += 1

    def step(self) -> None:
        self._rule.step(self._hyper, self._finite)


class Graphed:
    """The same as a CUDA graph."""

    def __init__(self, inner: Ours) -> None:
        self.prepare, self.kept = inner.prepare, inner.kept
        for _ in range(2):
            inner.step()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            inner.step()

    def step(self) -> None:
        self._graph.replay()


class OfTorch:
    """A torch optimizer; batch norm and biases are a group without decay."""

    kept = None

    def __init__(
        self, parameters: Sequence[ParamSpec], rule: Callable[..., torch.optim.Optimizer], **options: Any
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
        self._rule = rule(groups, lr=RATE, **options)

    def prepare(self) -> None:
        for weight, gradient in zip(self._weights, self._source, strict=True):
            weight.grad = gradient.clone()

    def step(self) -> None:
        self._rule.step()


class Loop(torch.optim.Optimizer):
    """One tensor after the other, as the formula reads (You 2017, algorithm 1); `ratio` False is SGD."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, *, ratio: bool) -> None:
        super().__init__(groups, {"lr": lr})
        self._ratio = ratio

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so no loss to return
        for group in self.param_groups:
            for weight in group["params"]:
                self._move(weight, weight.grad, group["lr"], group["weight_decay"])

    def _move(self, w: Tensor, g: Tensor, rate: float, decay: float) -> None:
        state = self.state[w]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(w)
        ratio: Tensor | float = 1.0
        if self._ratio and decay:
            w_norm, g_norm = w.norm(), g.norm()
            ratio = torch.where((w_norm > 0) & (g_norm > 0), ETA * w_norm / (g_norm + decay * w_norm), 1.0)
        state["momentum"].mul_(MOMENTUM).add_(rate * ratio * (g + decay * w))
        w.sub_(state["momentum"])


def variants(parameters: Sequence[ParamSpec], only: tuple[str, ...]) -> dict[str, Variant]:
    """Rules to compare, by name. Args: only: of ours, those whose names begin so; empty: all."""
    found: dict[str, Variant] = {
        "SGD, loop over tensors": OfTorch(parameters, Loop, ratio=False),
        FOREACH: OfTorch(parameters, torch.optim.SGD, momentum=MOMENTUM, foreach=True),
        "SGD, torch fused": OfTorch(parameters, torch.optim.SGD, momentum=MOMENTUM, fused=True),
        "LARS, loop over tensors": OfTorch(parameters, Loop, ratio=True),
    }
    try:
        import timm.optim as timm

        found["LARS, timm"] = OfTorch(parameters, timm.Lars, momentum=MOMENTUM)
        found["LAMB, timm"] = OfTorch(parameters, timm.Lamb)
    except ImportError:
        pass
    for name, options in OURS.items():
        if only and not name.startswith(only):
            continue
        found[f"{name}, ours"] = Ours(parameters, options)
        if DEVICE.type == "cuda" and not name.startswith(NEVER_GRAPHED):
            found[f"{name}, ours, CUDA graph"] = Graphed(Ours(parameters, options))
    found["LARS, ours, an eighth (sharded)"] = Ours(parameters, OURS["LARS"], shards=8)
    return found


def seconds_of(variant: Variant, steps: int) -> float:
    """Mean time of a step."""
    total = 0.0
    for _ in range(steps):
        variant.prepare()
        finished()
        begin = CLOCK()
        variant.step()
        finished()
        total += CLOCK() - begin
    return total / steps


def measure(taking_part: dict[str, Variant], rounds: int, steps: int, slow_rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of every variant, by round; slow variants take part in the last rounds alone."""
    times: dict[str, list[float]] = {name: [] for name in taking_part}
    for number in range(rounds + 1):
        for name, variant in taking_part.items():
            slow = name.startswith(SLOW)
            if slow and number <= rounds - slow_rounds:
                continue
            taken = seconds_of(variant, 1 if slow else steps)
            if number:  # the first round is for caches and allocators to settle
                times[name].append(taken)
    return times | amortised(times)


def amortised(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Rows of Shampoo that follow from two others: what its roots cost, and an update that takes them sometimes."""
    kept, taken = times.get(KEPT, []), times.get(TAKEN, [])
    roots = [every - none for none, every in zip(kept, taken, strict=True)]
    if not roots:
        return {}
    return {
        f"Shampoo, roots every {INTERVAL} updates, ours": [
            none + own / INTERVAL for none, own in zip(kept, roots, strict=True)
        ],
        "(Shampoo's roots alone)": roots,
    }


def finished() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def table(times: dict[str, list[float]], kept: dict[str, int | None]) -> list[str]:
    """Row of every variant that took part; ratios are of the same rounds."""
    lines = [
        "| update | ms | x its loop over tensors | x torch's foreach SGD | keeps, MB |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, own in times.items():
        if not own:
            continue
        loop = times.get(f"{name.partition(',')[0]}, loop over tensors")  # there is none of LAMB
        against = [f"{median_ratio(own, other[-len(own) :]):.2f}" if other else "" for other in (loop, times[FOREACH])]
        size = kept.get(name)
        megabytes = "" if size is None else f"{size / 1e6:.0f}"
        lines.append(f"| {name} | {statistics.median(own) * 1e3:.2f} | {' | '.join(against)} | {megabytes} |")
    return lines


def main() -> None:
    parser = Options(__doc__)
    parser.add_size("--rounds", full=5, small=1, type=int)
    parser.add_size("--steps", full=3, small=1, type=int, help="steps of a variant in a round")
    parser.add_size("--slow-rounds", full=2, small=1, type=int, help="rounds with Shampoo, the last ones")
    parser.add_argument("--only", nargs="+", default=[], help="of ours, the variants whose names begin so")
    options = parser.read()
    title, model = "ResNet-50", ModelSection(name="resnet50")
    if options.small:
        title, model = "ResNet-18 of width 4", ModelSection(name="resnet18", width=4)
    lines = head(f"Updating {title}'s weights", ["torch", "timm"])
    torch.manual_seed(0)
    parameters = model_spec(model, 1000).parameters
    taking_part = variants(parameters, tuple(options.only))
    times = measure(taking_part, options.rounds, options.steps, options.slow_rounds)
    place = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    lines += [
        f"{len(parameters)} tensors, {sum(p.size for p in parameters):,} weights, on {place}; {options.rounds} rounds "
        f"of {options.steps} steps; {'time of the device' if DEVICE.type == 'cuda' else 'CPU time of the process'}.",
        "",
        *table(times, {name: variant.kept for name, variant in taking_part.items()}),
    ]
    write_results(options.results, "optimizers-gpu.md" if DEVICE.type == "cuda" else "optimizers.md", lines)


if __name__ == "__main__":
    main()
