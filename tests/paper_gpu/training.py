"""Steps of the real training engine on the device on paper, described by a case, and what they did there."""

import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from podscale import models
from podscale.config import RunConfig
from podscale.data.loaders.base import Batch
from podscale.pytorch import comm_queue, evaluator, trainer, world
from podscale.pytorch.batch_norm import fused_kernels, fused_pool_kernels, gemm_calls, gemm_check, gemm_kernels
from podscale.pytorch.cuda_graph import WARM_UP_STEPS, CudaGraphStep
from podscale.pytorch.device_prefetcher import DevicePrefetcher
from podscale.pytorch.memory_traffic import KERNELS, count_traffic, kernel_bytes, kernel_tensors
from podscale.pytorch.optim import fused_momentum
from podscale.pytorch.step_sync import StepSync
from podscale.pytorch.train_state import TrainState, as_array, build_ema
from podscale.training.run_progress import RunProgress
from tests.paper_gpu.device import PaperGpu, paper_gpu, where
from tests.paper_gpu.graph import paper_graphs
from tests.paper_gpu.mutants import MUTANTS, MUTANTS_OF_EVALUATION
from tests.paper_gpu.timeline import Access, on_device
from tests.paper_gpu.unfused import WITHOUT
from tests.support.tiny import SHALLOW

CLASSES, SAMPLES = 10, 4096
SMALL = {"name": "resnet18", "stem": "small", "width": 16}
RANKS_PER_NODE = 4
SLICE_ELEMENTS = 2**14
"""Length of a slice of a bucket: shorter than in real runs, so that a small bucket has several."""
STEPS = 3
"""Steps of a case, so that the status of the first is read. The last one counts as recorded in a CUDA graph."""
GRAPH_STEPS = WARM_UP_STEPS + 3
"""Steps of a case with a CUDA graph: the recorded one and its replays."""


def _per_channel(images: Tensor) -> Tensor:
    return torch.empty(images.shape[1], dtype=torch.float32, device=images.device)


SHAPES: dict[str, Callable[..., Any]] = {
    "batch_norm_update_stats": lambda x, mean, var, momentum: (_per_channel(x), _per_channel(x)),
    "batch_norm_elemt": lambda x, weight, bias, mean, invstd, eps: torch.empty_like(x),
    "batch_norm_backward_reduce": lambda dy, x, *others: tuple(_per_channel(x) for _ in range(4)),
    "batch_norm_backward_elemt": lambda dy, x, *others: torch.empty_like(x),
}
"""Shapes of the results of SyncBatchNorm's operators, which torch does not know for fake tensors."""
_library = torch.library.Library("aten", "IMPL", "Meta")
for _name, _function in SHAPES.items():
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_name}", "Meta"):
        _library.impl(_name, _function)


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Train `STEPS` steps and return everything that was recorded.

    Args:
        case: options by name: `ranks`, `rank`, `ranks_per_node`, `model`, `image_size`, `train`, `steps`, `evaluate`,
            `descriptors`, `mutant`, `counts`, and `without`, a kernel that does not run.
    """
    ranks, rank = case.get("ranks", 1), case.get("rank", 0)
    local_size = min(ranks, case.get("ranks_per_node", RANKS_PER_NODE))
    here = world.World(rank, ranks, rank % local_size, local_size, torch.device("cuda", 0), rank // local_size)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    config = _config(case, ranks)
    trainer.set_numerics(config.train)
    with (
        SHALLOW,
        mock.patch.dict(comm_queue.SLICE_ELEMENTS, cuda=SLICE_ELEMENTS),
        paper_gpu() as gpu,
        mock.patch.multiple(torch.cuda, **paper_graphs(gpu)),
        _fake_groups(here),
        _paper_kernels(gpu, by_descriptors=case.get("descriptors", False)),
        _planted(case.get("mutant"), gpu),
        WITHOUT[case["without"]]() if "without" in case else nullcontext(),
    ):
        run, error = _Run(config, here, gpu), ""
        evaluates = "steps" not in case and ("mutant" not in case or case["mutant"] in MUTANTS_OF_EVALUATION)
        try:
            run.train(case.get("steps", GRAPH_STEPS if config.train.cuda_graph else STEPS), counts="counts" in case)
            if case.get("evaluate", evaluates):
                run.evaluate()
        except Exception:
            error = traceback.format_exc()
        strided = [n for n, p in run.model.named_parameters() if p.dim() == 4 and not _is_last(p)]
        return {
            "error": error,
            "host_waits": run.host_waits,
            "copies": run.copies,
            "mixed": Counter(gpu.mixed),
            "races": Counter(gpu.memory.races),
            "not_channels_last": strided + run.strided_activations if config.train.channels_last else [],
            "operators": sum(run.operators.values()),
            "bytes": run.bytes,
            "counted": run.counted,
            "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
            "descriptors": gemm_calls.use_descriptors,
            "counts": dict(run.operators.most_common()),
            "collectives": gpu.collectives,
            "layout": run.layout(),
            "first_used_in_capture": gpu.first_used_in_capture,
        }


def _config(case: dict[str, Any], ranks: int) -> RunConfig:
    train = {"global_batch": 8 * ranks, "epochs": 4, "precision": "bf16", **case.get("train", {})}
    train["all_reduce"] = {"bucket_mb": 0.25, **train.get("all_reduce", {})}
    return RunConfig.model_validate(
        {
            "run": {"id": "paper", "workspace": tempfile.gettempdir()},
            "model": {**SMALL, **case.get("model", {})},
            "input": {"loader": "synthetic", "image_size": case.get("image_size", 32)},
            "train": train,
            "evaluate": {"batch": 8},
            "telemetry": {"log_every": 2},
        }
    )


def _is_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def move_module(module: torch.nn.Module, device: torch.device, memory_format: torch.memory_format) -> torch.nn.Module:
    """Move a module as `Module.to` does, which cannot exchange fake parameters."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                layout = memory_format if parameter.dim() == 4 else torch.contiguous_format
                moved = parameter.detach().to(device, non_blocking=True).contiguous(memory_format=layout)
                owner._parameters[name] = torch.nn.Parameter(moved)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device, non_blocking=True)
    return module


class _Run:
    """One rank's training: the parts of `PyTorchTrainer` that touch the device, around its own `train_step`."""

    def __init__(self, config: RunConfig, here: world.World, gpu: PaperGpu) -> None:
        self.gpu, self.config, self.world = gpu, config, here
        with mock.patch.object(torch.nn.Module, "to", move_module):
            self.model = trainer.build_model_on_device(config, here, CLASSES)
        spec = models.model_spec(config.model, CLASSES)
        self.step = trainer.build_train_step(config, here, self.model, spec, SAMPLES)
        read_weights = partial(trainer.evaluation_weights, self.step.optimizer, self.step.weights)
        ema = build_ema(config.train.ema, self.model, read_weights)
        self.state = TrainState(
            self.model, self.step.weights, self.step.optimizer, self.step.precision, RunProgress(), ema
        )
        graph = CudaGraphStep(self.step, here, on_sampled=lambda seconds: None) if config.train.cuda_graph else None
        self.train_step: Any = graph or self.step
        self.step_sync, self.prefetcher = StepSync(here), DevicePrefetcher(here)
        self.evaluator = self._build_evaluator(batches=2)
        self.strided_activations: list[str] = []
        self.operators: Counter[str] = Counter()
        self.bytes: dict[str, Counter[str]] = {}
        self.counted: dict[str, int] = {}
        self.host_waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        if config.train.channels_last:
            for name, module in self.model.named_modules():
                if isinstance(module, torch.nn.Conv2d):
                    module.register_forward_hook(self._check_layout(name))

    def _check_layout(self, name: str) -> Callable[..., None]:
        def check(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
            if not _is_last(output) or not _is_last(inputs[0]):
                self.strided_activations.append(name)

        return check

    def train(self, steps: int, *, counts: bool = False) -> None:
        """Train; only what the steps do is recorded, and the operators of the last step alone.

        `counts`: a profile's count of bytes runs too.
        """
        gpu, size = self.gpu, self.config.input.image_size
        images = self._images
        session = self._session()
        gpu.clear()
        for batch in self.prefetcher(_batches(steps, images, size), _phase):
            gpu.step += 1
            gpu.capturing = not self.config.train.cuda_graph and 1 < gpu.step == steps
            gpu.operators.clear()
            gpu.bytes.clear()
            with count_traffic() if counts else nullcontext({}) as self.counted:
                trainer.PyTorchTrainer.train_step(session, batch)
            gpu.capturing = False
        self.operators, self.host_waits = Counter(gpu.operators), Counter(gpu.host_waits)
        self.bytes = {phase: Counter(sizes) for phase, sizes in gpu.bytes.items()}
        self.copies = Counter(gpu.copies)

    def evaluate(self) -> None:
        """Evaluate as after an epoch, with averaged weights if there are some, and copy a checkpoint."""
        averaged = self.state.ema is not None
        with (
            mock.patch.object(evaluator, "evaluation_result"),
            self.state.with_weights(averaged=averaged) as model,
        ):
            assert self.evaluator.evaluate(model, _phase) is not None
        self.copies = Counter(self.gpu.copies)
        # The host's part of the copy, without values here: it reads the tensor.
        read = mock.Mock(side_effect=lambda tensor: self.gpu.memory.read_on_host(tensor, where()))
        with mock.patch.object(Tensor, "numpy", lambda tensor: read(tensor)):
            for tensor in self.state.tensors().values():
                as_array(tensor)
        assert read.called

    def _build_evaluator(self, batches: int) -> evaluator.Evaluator:
        images, size = self.config.evaluate.batch, self.config.input.image_size
        loader = SimpleNamespace(batches=lambda start, stop: _batches(stop - start, images, size))
        split = range(batches * images * self.world.size)
        shard_set: Any = SimpleNamespace(split=lambda name: split)
        with mock.patch.object(evaluator, "build_evaluation_loader", return_value=loader):
            return evaluator.Evaluator(self.config, self.world, shard_set, self.step.precision, self.prefetcher)

    def layout(self) -> list[Any]:
        """Return the bounds of the buckets, and the first element of each parameter."""
        buffer = self.step.reducer.buffer
        return [buffer.layout.bounds, buffer.offsets]

    @contextmanager
    def _enter_phase(self, name: str) -> Iterator[None]:
        self.gpu.phase = name
        yield
        self.gpu.phase = ""

    @property
    def _images(self) -> int:
        """Images of a rank in a step."""
        return self.config.train.global_batch // self.world.size

    def _session(self) -> Any:
        """Return what `PyTorchTrainer.train_step` reads of its trainer."""
        timer = SimpleNamespace(phase=self._enter_phase, busy_seconds=0.1)
        logger = SimpleNamespace(timer=timer, metrics=mock.Mock(), step_done=lambda *values: None)
        return SimpleNamespace(
            training_logger=logger,
            progress=self.state.progress,
            _training_flops=lambda size: 1,
            step=self.train_step,
            state=self.state,
            step_sync=self.step_sync,
            stop_request=SimpleNamespace(requested=False),
            loader=SimpleNamespace(bad_records=0),
        )


def _batches(steps: int, images: int, size: int) -> Iterator[Batch]:
    for step in range(steps):
        pixels, keys = np.zeros((images, size, size, 3), np.uint8), np.zeros(images, np.uint64)
        yield Batch(pixels, keys.astype(np.int64), keys, np.ones(images, np.float32), step)


def _phase(name: str) -> Any:
    return nullcontext()


@contextmanager
def _fake_groups(here: world.World) -> Iterator[None]:
    new_group = dist.new_group

    def fake(ranks: Any = None, **options: Any) -> Any:
        return new_group(ranks, backend="fake")

    nodes = tuple(rank // here.local_size for rank in range(here.size))
    with mock.patch.object(dist, "new_group", fake), mock.patch.object(world.World, "nodes", return_value=nodes):
        yield


class PaperKernel:
    """Launcher of a Triton kernel that only records what it reads and writes, by the positions of its tensors."""

    def __init__(self, gpu: PaperGpu, name: str, writes: tuple[int, ...], updates: tuple[int, ...]) -> None:
        self._gpu, self._name, self._writes, self._updates = gpu, name, writes, updates

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, **options: Any) -> None:
        gpu = self._gpu
        tensors = kernel_tensors(arguments).items()
        gpu.mixed += [f"{self._name}: argument {n} at {where()}" for n, tensor in tensors if not on_device(tensor)]
        gpu.operators[self._name] += 1
        access = Access(gpu.stream.number, gpu.timeline.launch(gpu.stream.number), self._name, where())
        for position, tensor in tensors:
            gpu.memory.use(tensor, access, writes=position in self._writes)
        gpu.bytes[gpu.phase][self._name] += kernel_bytes(arguments, self._updates)


KERNEL_OUTPUTS = {
    (fused_momentum, "_norms_kernel"): (4, 5),
    (fused_momentum, "_momentum_kernel"): (0, 2),
    (fused_kernels, "_moments_kernel"): (1, 2),
    (fused_kernels, "_finish_moments_kernel"): (4, 5, 6),
    (fused_kernels, "_normalise_kernel"): (4, 5),
    (fused_kernels, "_gradient_sums_kernel"): (7, 8, 9),
    (fused_kernels, "_finish_gradient_sums_kernel"): (4,),
    (fused_kernels, "_input_gradient_kernel"): (7,),
    (fused_pool_kernels, "_pool_kernel"): (3, 4),
    (fused_pool_kernels, "_pool_gradient_sums_kernel"): (5, 6),
    (fused_pool_kernels, "_pool_input_gradient_kernel"): (8,),
    (gemm_kernels, "_gemm_forward_kernel"): (5, 6, 7, 8, 9),
    (gemm_kernels, "_gemm_data_gradient_kernel"): (8, 9, 10),
    (gemm_kernels, "_gemm_merge_kernel"): (2, 3),
    (gemm_kernels, "_gemm_weight_gradient_kernel"): (4,),
    (gemm_kernels, "_gemm_add_splits_kernel"): (1,),
}
"""Positions of the tensors that each Triton kernel writes."""


@contextmanager
def _paper_kernels(gpu: PaperGpu, *, by_descriptors: bool) -> Iterator[None]:
    """Record the launches of Triton's kernels. Those of 1x1 convolutions load faster `by_descriptors`, or do not."""
    times = gemm_check.LoadComparison(False, 1.0, 0.5 if by_descriptors else 2.0)
    with ExitStack() as stack:
        for (module, name), writes in KERNEL_OUTPUTS.items():
            kernel = PaperKernel(gpu, name, writes, KERNELS[module.__name__][name])
            stack.enter_context(mock.patch.object(module, name, kernel))
        stack.enter_context(mock.patch.object(gemm_check, "largest_error", return_value=0.0))  # values are needed
        stack.enter_context(mock.patch.object(gemm_check, "compare_loads", return_value=times))
        yield


@contextmanager
def _planted(mutant: str | None, gpu: PaperGpu) -> Iterator[None]:
    with MUTANTS[mutant](gpu) if mutant else nullcontext():
        yield
