"""What one rank of a training is made of, and what it does between updates."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pydantic_core import PydanticCustomError

from podscale import models, schedules
from podscale.checkpoint import Checkpoints
from podscale.config import RunConfig, TrainSection
from podscale.config.checks import check_ranks
from podscale.config.model import AllReduceSection
from podscale.config.spans import batch_norm_span
from podscale.errors import InputError, PodscaleError, Preempted
from podscale.input import Loader, build_evaluation_loader, build_loader
from podscale.order import build_order
from podscale.pytorch.allreduce.selftest import relative_error
from podscale.pytorch.batchnorm import span_groups
from podscale.pytorch.checkpoints import Progress, State
from podscale.pytorch.compilation import build_forward
from podscale.pytorch.control import Control, Word
from podscale.pytorch.evaluate import Evaluator
from podscale.pytorch.export import Trained, export
from podscale.pytorch.feed import Feed
from podscale.pytorch.graph import GraphedStep
from podscale.pytorch.models import build_model, choose_stem
from podscale.pytorch.monitor import Monitor
from podscale.pytorch.normalise import Normalise
from podscale.pytorch.optim import Optimizer, build_optimizer, build_share
from podscale.pytorch.precision import Precision, build_precision, set_numerics
from podscale.pytorch.randomness import Randomness
from podscale.pytorch.reducer import FlatReducer, Reducer, build_reducer
from podscale.pytorch.statistics import RunningStatistics, running_share
from podscale.pytorch.step import Step
from podscale.pytorch.stop import StopRequest
from podscale.pytorch.weights import GATHERED, Weights
from podscale.pytorch.world import World
from podscale.shards.shardset import ShardSet


@dataclass
class Session:
    """One rank of one training. What changes an update stands in `step`; what a resumed run needs, in `state`."""

    config: RunConfig
    world: World
    classes: list[str]
    spec: models.ModelSpec
    model_directory: Path
    state: State
    step: Step | GraphedStep
    reducer: Reducer
    feed: Feed
    loader: Loader
    evaluation_loader: Loader
    evaluator: Evaluator
    control: Control
    monitor: Monitor
    checkpoints: Checkpoints
    stop: StopRequest
    steps: int
    steps_per_epoch: float
    rates: npt.NDArray[np.float64]
    """The learning rate of every update, for the log."""
    stopping: bool = False
    """All ranks have agreed to stop."""

    def started(self, resumed: bool) -> None:
        """Reports the beginning."""
        self.monitor.started(
            resumed=resumed,
            step=self.state.progress.step,
            total_steps=self.end,
            ranks=self.world.size,
            global_batch=self.config.train.global_batch,
            steps_per_epoch=round(self.steps_per_epoch, 3),
            device=device_name(self.world),
            train_images=round(self.steps_per_epoch * self.config.train.global_batch),
            validation_images=self.evaluator.count,
            parameters=self.spec.size,
            training_flops_per_image=self.spec.training_flops(self.config.input.image_size),
            optimizer_bytes=self.state.optimizer_bytes,
        )

    def heed(self, words: list[Word]) -> bool:
        """Acts on agreed words; whether all ranks are to stop now. Raises after too many non-finite updates in a row.

        Every rank gets the same words after the same update, so every rank does the same.
        """
        progress, limit = self.state.progress, self.config.train.max_nonfinite
        for word in words:
            progress.skipped += not word.finite
            progress.skipped_in_a_row = 0 if word.finite else progress.skipped_in_a_row + 1
            self.monitor.word(
                word,
                epoch=word.step / self.steps_per_epoch,
                learning_rate=float(self.rates[word.step - 1]),
            )
            if progress.skipped_in_a_row > limit:
                raise PodscaleError(
                    f"{progress.skipped_in_a_row} updates in a row (up to update {word.step}) had a loss or gradient "
                    f"that is not finite (train.max_nonfinite is {limit}). They were masked, so the weights are "
                    "those from before. Lower train.schedule.learning_rate, lengthen the warm-up, or look at the data."
                )
            self.stopping = self.stopping or word.stop
        return self.stopping

    @property
    def target_reached(self) -> bool:
        """Whether the state, as it is, was measured to be as good as the document asks; the same on all ranks."""
        target, top1 = self.config.train.target_top1, self.state.progress.top1
        return target is not None and top1 is not None and top1 >= target

    @property
    def end(self) -> int:
        """The updates of the whole run, as far as is known: those of the document, or those that were enough."""
        return self.state.progress.step if self.target_reached else self.steps

    def evaluation_due(self) -> bool:
        """Whether the state is to be measured and was not yet, which a stop may have prevented before."""
        if self.state.progress.evaluated == self.state.progress.step:
            return False
        step, every = self.state.progress.step, self.config.evaluate.every_epochs * self.steps_per_epoch
        return step == self.steps or schedules.crosses(step, every)

    def evaluate(self) -> None:
        """Measures accuracy over the validation split and keeps it in the progress; gives up when asked to stop."""
        progress = self.state.progress
        if self.heed(self.control.drain()):
            return
        self.monitor.evaluating(progress.step)
        with self.monitor.phase("evaluation"):
            found = self.evaluator.measure(self.state.model, self.monitor.inside, lambda: self.stop.requested)
        if found is None:
            self.stopping = True
            return
        progress.evaluated = progress.step
        progress.evaluation = {"top1": found.top1, "top5": found.top5, "loss": found.loss}
        epoch = progress.step / self.steps_per_epoch
        self.monitor.evaluated(progress.step, found, epoch=epoch, target_reached=self.target_reached)

    def checkpoint_due(self) -> bool:
        step, settings = self.state.progress.step, self.config.checkpoint
        by_steps = settings.every_steps > 0 and step % settings.every_steps == 0
        return step == self.end or by_steps or schedules.crosses(step, settings.every_epochs * self.steps_per_epoch)

    def settle(self) -> None:
        """What is due between two updates. Raises Preempted where all ranks are to stop, once the state is saved."""
        if not self.stopping and self.evaluation_due():
            self.evaluate()
        if self.stopping:
            self.save(wait=True)
            raise Preempted(
                f"stopped on request after update {self.state.progress.step} of {self.steps}; the state is saved: "
                "the same command continues"
            )
        if self.checkpoint_due():
            self.save()

    def save(self, *, wait: bool = False) -> None:
        """Hands a copy of the state to the writer, on rank 0; with `wait` every rank returns once it is on disk."""
        with self.monitor.phase("checkpoint"):
            self.heed(self.control.drain())  # what is known of every update so far belongs to the state
            snapshot = self.state.capture(self.world)
            if snapshot is not None:
                self.checkpoints.save(snapshot, top1=self.state.progress.top1)
                if wait:
                    self.checkpoints.wait()
            if wait:
                self.world.barrier()

    def finish(self) -> None:
        """Waits for the last checkpoint and writes the final model."""
        self.heed(self.control.drain())
        progress = self.state.progress
        tensors = self.state.model_tensors()
        if self.world.first:
            self.checkpoints.wait()
            export(tensors, Trained(self.config, self.classes, progress), self.model_directory)
        self.world.barrier()
        self.monitor.event("done", step=progress.step, skipped_updates=progress.skipped, **progress.evaluation)

    def close(self) -> None:
        """Ends loaders, lanes, the graph and the writer; safe after an error."""
        if isinstance(self.step, GraphedStep):
            self.step.close()
        if self.world.on_gpu and self.config.train.compile in ("reduce-overhead", "max-autotune"):
            torch.compiler.reset()  # the compiler's own graphs, which hold messages of batch norm
        self.loader.close()
        self.evaluation_loader.close()
        self.reducer.close()
        self.checkpoints.close()


def build_session(
    config: RunConfig,
    world: World,
    shard_set: ShardSet,
    model_directory: Path,
    checkpoints: Checkpoints,
    monitor: Monitor,
    stop: StopRequest,
) -> Session:
    """Builds everything that the document asks for. Every rank must call this at the same time."""
    train, training_split = config.train, shard_set.split("train")
    check_world(config, world, len(training_split))
    set_numerics(train)
    steps_per_epoch = schedules.steps_per_epoch(train, len(training_split))
    steps = schedules.total_steps(train, len(training_split))
    spec = models.spec(config.model, len(shard_set.classes))
    model = build_placed_model(config, world, len(shard_set.classes))
    span_groups(model, world, batch_norm_span(config, world.size))
    statistics = RunningStatistics(model, share=running_share(config.model.batch_norm, world))
    precision = build_precision(train, world)
    reducer, weights, optimizer = build_update(train, model, spec, precision, world, extra=1 + len(statistics))
    report_wire(train.all_reduce, reducer, world, monitor)
    feed, normalise = Feed(world), Normalise(config.input, world, channels_last=train.channels_last)
    evaluation_loader, evaluator = build_evaluator(config, world, shard_set, feed, precision)
    step = Step(
        reducer,
        optimizer,
        weights,
        precision,
        statistics,
        schedule=torch.from_numpy(schedules.table(train, len(training_split))).to(world.device),
        label_smoothing=train.label_smoothing,
        accumulation=train.accumulation,
        forward=build_forward(normalise, reducer.module, train.compile, ranks=world.size),
        randomness=Randomness(model, config.run.seed, world),
    )
    return Session(
        config=config,
        world=world,
        classes=shard_set.classes,
        spec=spec,
        model_directory=model_directory,
        state=State(model, weights, optimizer, precision, Progress()),
        step=GraphedStep(step, world, sampled=monitor.sampled) if train.cuda_graph else step,
        reducer=reducer,
        feed=feed,
        loader=build_loader(
            config,
            training_split,
            build_order(config, training_split),
            rank=world.rank,
            world=world.size,
            device=str(world.device),
        ),
        evaluation_loader=evaluation_loader,
        evaluator=evaluator,
        control=Control(world),
        monitor=monitor,
        checkpoints=checkpoints,
        stop=stop,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        rates=schedules.values(train, np.arange(steps), steps_per_epoch)[:, 0],
    )


def report_wire(section: AllReduceSection, reducer: Reducer, world: World, monitor: Monitor) -> None:
    """Measures what short messages cost in accuracy, where the document asks for them, and says so in the log."""
    wires = {"wire_row": section.wire_row, "wire_column": section.wire_column}
    if set(wires.values()) != {"fp32"} and isinstance(reducer, FlatReducer):
        error = relative_error(reducer.all_reduce, world, int(section.bucket_mb * 2**18))
        monitor.event("all_reduce_error", relative=error, algorithm=section.algorithm, ranks=world.size, **wires)


def build_update(
    train: TrainSection, model: torch.nn.Module, spec: models.ModelSpec, precision: Precision, world: World, extra: int
) -> tuple[Reducer, Weights, Optimizer]:
    """What averages gradients and updates the weights, over one flat layout."""
    reducer = build_reducer(train.all_reduce, model, world, extra=extra, sharded=train.weight_update == "sharded")
    weights = Weights(
        reducer.buffer, reducer.gather, dtype=GATHERED[train.weight_gather], cast=lambda: precision.cast(model)
    )
    share = build_share(train.optimizer, reducer.buffer, weights.masters, spec, reducer.gather)
    return reducer, weights, build_optimizer(train.optimizer, share)


def build_placed_model(config: RunConfig, world: World, classes: int) -> torch.nn.Module:
    """The network with the run's initial weights, on the device, in its memory order."""
    torch.manual_seed(config.run.seed)
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model = build_model(config.model, classes).to(world.device, memory_format=layout)  # type: ignore[call-overload]
    choose_stem(model, config.train.stem_compute)
    assert isinstance(model, torch.nn.Module)
    return model.train()


def build_evaluator(
    config: RunConfig, world: World, shard_set: ShardSet, feed: Feed, precision: Precision
) -> tuple[Loader, Evaluator]:
    """The evaluator over the validation split, and its loader, which the caller closes."""
    split = shard_set.split("validation")
    loader = build_evaluation_loader(config, split, rank=world.rank, world=world.size, device=str(world.device))
    normalise = Normalise(config.input, world, channels_last=config.train.channels_last)
    return loader, Evaluator(loader, len(split), config.evaluate.batch, feed, normalise, precision, world)


def check_world(config: RunConfig, world: World, samples: int) -> None:
    """Raises InputError where the run does not fit this many ranks or this many training images."""
    try:
        check_ranks(config, world.size)
    except PydanticCustomError as error:
        raise InputError(error.message()) from None
    train = config.train
    if train.cuda_graph and not world.on_gpu:
        raise InputError("train.cuda_graph: torch sees no CUDA device here; set train.cuda_graph=false")
    if train.global_batch > samples:
        raise InputError(
            f"train.global_batch {train.global_batch} is larger than the training split of {samples} images; "
            "lower it, or bring more images"
        )
    if batch_norm_span(config, world.size).total < 2:
        raise InputError(
            f"train.global_batch {train.global_batch} leaves one image per rank and pass ({world.size} ranks, "
            f"accumulation {train.accumulation}), of which batch norm has no variance; use at least 2 each"
        )


def device_name(world: World) -> str:
    """What this rank computes on, for people."""
    return torch.cuda.get_device_name(world.device) if world.on_gpu else "cpu"


def untimed(name: str) -> AbstractContextManager[None]:
    """A phase that is part of a larger one and counted there."""
    return nullcontext()
