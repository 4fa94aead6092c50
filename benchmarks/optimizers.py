"""One update of ResNet-50's 161 tensors: our rules against a loop over tensors, torch's SGD, and timm where installed.

    OMP_NUM_THREADS=1 python benchmarks/optimizers.py [--rounds 5] [--steps 3] [--only SGD LARS ...]

Every variant updates its own copy of the weights from gradients that are laid out anew before each step (that is not
timed). A round is `--steps` steps of every variant in turn, so that a busy moment of the machine meets all; ratios are
taken within a round. Shampoo, whose update takes seconds, makes one step in each of the last `--slow-rounds` rounds;
what its roots cost is the difference of two of its variants in a round. On a CPU the time is that of the processor,
which other work does not lengthen by waiting; on a GPU it is the device's, and ours also runs as a CUDA graph, as a
whole step would.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conditions import RESULTS, head, publish
from torch import Tensor

from podscale.config import ModelSection
from podscale.config.optimizer import OptimizerSection
from podscale.models import model_spec
from podscale.pytorch.optim import ExtraStateOptimizer, HyperParams, ParamShard, ParamSlice, StepAware, build_optimizer
from podscale.training.param_layout import plan_buckets

PARAMETERS = model_spec(ModelSection(name="resnet50"), 1000).parameters
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
INTERVAL = 20
"""Updates over which a row of Shampoo spreads the cost of its roots; what the digits are trained with."""


class Ours:
    """A rule over flat buffers; `shards` > 1 updates that part alone, without the exchange of sums."""

    def __init__(self, options: dict[str, Any], *, shards: int = 1) -> None:
        layout = plan_buckets([p.size for p in PARAMETERS], 25 * 2**18, 32 * shards)
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
            for p, start in zip(PARAMETERS, layout.starts, strict=True)
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
        """Bytes that the rule keeps beside weights and gradients."""
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

    def __init__(self, rule: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        self._weights = [torch.randn(p.shape, device=DEVICE).requires_grad_() for p in PARAMETERS]
        self._source = [torch.randn_like(w) for w in self._weights]
        groups = [
            {
                "params": [w for w, p in zip(self._weights, PARAMETERS, strict=True) if (p.role == "weight") == decays],
                "weight_decay": DECAY if decays else 0.0,
            }
            for decays in (True, False)
        ]
        self._rule = rule(groups, lr=RATE, **options)

    @torch.no_grad()
    def prepare(self) -> None:
        for weight, gradient in zip(self._weights, self._source, strict=True):
            weight.grad = gradient.clone()

    def step(self) -> None:
        self._rule.step()


class Loop(torch.optim.Optimizer):
    """One tensor after the other, as the formula reads (You 2017, algorithm 1); `ratio` False is SGD."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, *, ratio: bool) -> None:
        super().__init__(groups, {"lr": lr})
        self._ratio = ratio

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
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


def variants(only: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "SGD, loop over tensors": OfTorch(Loop, ratio=False),
        "SGD, torch foreach": OfTorch(torch.optim.SGD, momentum=MOMENTUM, foreach=True),
        "SGD, torch fused": OfTorch(torch.optim.SGD, momentum=MOMENTUM, fused=True),
        "LARS, loop over tensors": OfTorch(Loop, ratio=True),
    }
    try:
        from timm.optim import Lamb, Lars

        found["LARS, timm"] = OfTorch(Lars, momentum=MOMENTUM)
        found["LAMB, timm"] = OfTorch(Lamb)
    except ImportError:
        pass
    for name, options in OURS.items():
        if only and not name.startswith(only):
            continue
        found[f"{name}, ours"] = Ours(options)
        if DEVICE.type == "cuda" and not name.startswith(NEVER_GRAPHED):
            found[f"{name}, ours, CUDA graph"] = Graphed(Ours(options))
    found["LARS, ours, an eighth (sharded)"] = Ours(OURS["LARS"], shards=8)
    return found


def seconds(variant: Any, steps: int) -> float:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of a variant in a round")
    parser.add_argument("--slow-rounds", type=int, default=2, help="rounds with Shampoo, the last ones")
    parser.add_argument("--only", nargs="+", default=[], help="of ours, the variants whose names begin so")
    parser.add_argument("--results", type=Path, default=RESULTS / "optimizers.md")
    options = parser.parse_args()
    lines = head("Updating ResNet-50's weights", ["torch", "timm"])
    torch.manual_seed(0)
    taking_part = variants(tuple(options.only))
    times: dict[str, list[float]] = {name: [] for name in taking_part}
    for number in range(options.rounds + 1):
        for name, variant in taking_part.items():
            slow = name.startswith(SLOW)
            if slow and number <= options.rounds - options.slow_rounds:
                continue
            taken = seconds(variant, 1 if slow else options.steps)
            if number:  # the first round is for caches and allocators to settle
                times[name].append(taken)
    times |= amortised(times)
    place = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    size = sum(p.size for p in PARAMETERS)
    lines += [
        f"{len(PARAMETERS)} tensors, {size:,} weights, on {place}; {options.rounds} rounds of {options.steps} steps; "
        f"{'time of the device' if DEVICE.type == 'cuda' else 'CPU time of the process'}.",
        "",
        "| update | ms | x its loop over tensors | x torch's foreach SGD | keeps, MB |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, own in times.items():
        if not own:
            continue
        loop = times.get(f"{name.partition(',')[0]}, loop over tensors")  # there is none of LAMB
        against = [
            f"{statistics.median(a / b for a, b in zip(own, other[-len(own) :], strict=True)):.2f}" if other else ""
            for other in (loop, times["SGD, torch foreach"])
        ]
        variant = taking_part.get(name)
        kept = f"{variant.kept / 1e6:.0f}" if hasattr(variant, "kept") else ""
        lines.append(f"| {name} | {statistics.median(own) * 1e3:.2f} | {' | '.join(against)} | {kept} |")
    publish(options.results, lines)


if __name__ == "__main__":
    main()
