"""Members of a collapsed ensemble as runs, and the directories of models evaluated together."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from podscale.config import RunConfig
from podscale.config.ensemble import EnsembleSection, collapse_schedule
from podscale.config.run import ClaimSection, RunSection
from podscale.config.start import StartSection
from podscale.errors import InputError
from podscale.runs.directory import RunDirectory, local_path

MODEL_JSON = "model.json"
"""File that marks the directory of a complete model."""
MAX_RUN_ID_LENGTH = 40


@dataclass(frozen=True)
class EnsembleMember:
    """Run that collapses the snapshot at the end of `cycle` (from 0)."""

    cycle: int
    config: RunConfig

    @property
    def model(self) -> Path:
        return RunDirectory.for_config(self.config).model


def ensemble_members(config: RunConfig) -> list[EnsembleMember]:
    """Return the members of a document's ensemble by cycle; empty without an ensemble section."""
    return [
        EnsembleMember(cycle, member_run_config(config, cycle))
        for cycle in config.ensemble.member_cycles
        if config.ensemble.cycles
    ]


def ensemble_member(config: RunConfig, cycle: int) -> EnsembleMember:
    """Return the member of one cycle; raises InputError if that cycle is not collapsed."""
    numbers = config.ensemble.member_cycles if config.ensemble.cycles else ()
    if cycle not in numbers:
        problem = f"run {config.run.id} collapses no snapshot of this cycle"
        if not numbers:
            raise InputError(problem, field="ensemble", got=cycle, hint="The document has no ensemble section.")
        known = ", ".join(map(str, numbers))
        raise InputError(problem, field="ensemble.cycles", got=cycle, hint=f"Its members are {known}.")
    return EnsembleMember(cycle, member_run_config(config, cycle))


def member_run_id(run: str, cycle: int) -> str:
    """Return the run id of a member; raises InputError if it would be too long."""
    name = f"{run}-c{cycle}"
    if len(name) > MAX_RUN_ID_LENGTH:
        raise InputError(
            f"its members are called {name}, which is more than {MAX_RUN_ID_LENGTH} characters",
            field="run.id",
            got=run,
            hint="Choose a shorter name.",
        )
    return name


def member_run_config(config: RunConfig, cycle: int) -> RunConfig:
    """Return the run document of the collapse from the end of `cycle`."""
    ensemble, train = config.ensemble, config.train
    decay = train.optimizer.weight_decay * ensemble.collapse.weight_decay_factor
    changed = {
        "run": RunSection(
            id=member_run_id(config.run.id, cycle),
            workspace=config.run.workspace,
            seed=(config.run.seed + 1 + cycle) % 2**63,
        ),
        "input": config.input.model_copy(update={"crop": ensemble.collapse.crop}),
        "train": train.model_copy(
            update={
                "epochs": ensemble.collapse.epochs,
                "schedule": collapse_schedule(ensemble, cycle, train.schedule),
                "phases": (),
                "optimizer": train.optimizer.model_copy(update={"weight_decay": decay}),
                "start_from": StartSection(run=config.run.id, epoch=ensemble.cycle_ends[cycle]),
                "target_top1": None,
            }
        ),
        "evaluate": config.evaluate.model_copy(update={"baseline": None}),
        "ensemble": EnsembleSection(),
        "checkpoint": config.checkpoint.model_copy(update={"snapshots": (), "resume": "auto"}),
        "telemetry": config.telemetry.model_copy(update={"mlperf_log": False}),
        "claim": ClaimSection(),
    }
    return RunConfig.model_validate(config.model_copy(update=changed).model_dump())


def combined_model_directories(config: RunConfig) -> list[Path]:
    """Return the directories of the models that an evaluation combines; empty if it evaluates the run's own."""
    if config.evaluate.models:
        return [resolve_model_directory(config, name) for name in config.evaluate.models]
    return [one.model for one in ensemble_members(config)]


def evaluated_model_directories(config: RunConfig) -> list[Path]:
    """Return the directories of all models that an evaluation reads."""
    several = combined_model_directories(config)
    baseline = config.evaluate.baseline
    if not several:
        return [RunDirectory.for_config(config).model]
    return [*several, *([resolve_model_directory(config, baseline)] if baseline is not None else [])]


def resolve_model_directory(config: RunConfig, name: str) -> Path:
    """Return the directory of a model by its path, its run's path, or a run id of the workspace."""
    candidates = list(_model_candidates(config, name))
    return next((path for path in candidates if (path / MODEL_JSON).exists()), candidates[0])


def resolve_run_directory(config: RunConfig, name: str) -> RunDirectory:
    """Return the directory of a run by its id in the workspace, or by its path."""
    if "/" in name or Path(name).is_dir():
        return RunDirectory(Path(name))
    return RunDirectory(local_path(config.run.workspace) / "runs" / name)


def _model_candidates(config: RunConfig, name: str) -> Iterator[Path]:
    yield resolve_run_directory(config, name).model
    yield Path(name)
