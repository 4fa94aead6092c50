"""Parameters of a pipeline's run: values that replace those of the document in the compiled package.

People set them in KFP's user interface, and schedules set the run id. The pods of a package are compiled, so options
that shape them cannot be changed here.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter

from podscale.config import RunConfig, loads
from podscale.errors import InputError, InputErrors
from podscale.runs.ensemble_members import MAX_RUN_ID_LENGTH, ensemble_members
from podscale.version import VERSION

TIME_FIELD = "{time}"
"""Part of the parameter run_id that stands for the time of the run."""
TIME_LENGTH = 17
"""Length of an expanded time: twelve digits, a hyphen and four characters of the job's id."""
JOB_ID_CHARACTERS = 4
OPTION_OF_PARAMETER = {
    "run_id": "run.id",
    "source": "data.source",
    "epochs": "train.epochs",
    "global_batch": "train.global_batch",
    "learning_rate": "train.schedule.learning_rate",
    "image": "launch.image",
    "launcher_image": "launch.launcher_image",
}
"""Option that each parameter sets; the parameter `overrides` sets any other."""
FIXED_OPTIONS = (
    "launch",
    "run.workspace",
    "ensemble",
    "export.formats",
    "train.engine",
    *(f"telemetry.{name}" for name in ("enabled", "address", "port", "bearer_token_file")),
    *(f"telemetry.tls_{name}" for name in ("certificate", "key", "client_ca")),
)
"""Options and sections that shape the pods and the graph of a package."""
_TIME_PATTERN = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d)")


@dataclass(frozen=True)
class PipelineJob:
    """Run of a pipeline in KFP; a value is empty or a literal placeholder if the backend does not fill it in.

    Args:
        id: UUID, the same in every task and retry of the run.
        created: creation time, UTC.
        scheduled: planned time of a scheduled run, UTC; else the creation time.
    """

    id: str = ""
    created: str = ""
    scheduled: str = ""


@dataclass(frozen=True)
class RunParameters:
    """Parameters of one run of the training pipeline; an empty text leaves the document's value.

    Args:
        run_id: run.id; `{time}` in it is replaced (see expand_run_id).
        overrides: further changes, `section.key=value`.
    """

    run_id: str
    source: str
    epochs: float
    global_batch: int
    learning_rate: float
    overrides: Sequence[str]
    image: str
    launcher_image: str

    @classmethod
    def of(cls, config: RunConfig) -> "RunParameters":
        """Return the values of a document, which are the defaults of its pipeline."""
        values = {name: attrgetter(option)(config) for name, option in OPTION_OF_PARAMETER.items()}
        return cls(overrides=[], **values)


def load_document(document: str) -> RunConfig:
    """Load the document of a compiled package or of the first task.

    Raises:
        InputError: The document is of another version; the hint names this one.
    """
    try:
        return loads(document)
    except InputError as error:
        hint = (
            f"This stage has Podscale {VERSION}. If the run started with another version, build or pull its image "
            "(make images, images.tag of the chart)."
        )
        problem = str(error) if isinstance(error, InputErrors) else error.problem
        field = "" if isinstance(error, InputErrors) else error.field
        raise InputError(problem, field=field, hint=hint, location=error.location) from None


def resolve_document(document: str, parameters: RunParameters, job: PipelineJob = PipelineJob()) -> RunConfig:
    """Return the document of one run: that of the package with the parameters applied.

    Raises:
        InputError: A parameter is invalid, or sets an option that the package fixes; `field` is the option.
    """
    compiled = load_document(document)
    changes = {**_typed_changes(compiled, parameters, job), **_parse_overrides(parameters.overrides)}
    _check_recipe(compiled, changes)
    try:
        config = loads(document, overrides=[text for _, text in changes.values()])
        ensemble_members(config)  # raises if the names of the members are too long
    except InputErrors as error:
        raise InputErrors([_name_parameter(one, changes) for one in error.errors], error.title) from None
    except InputError as error:
        raise _name_parameter(error, changes) from None
    return config


def expand_run_id(run_id: str, job: PipelineJob) -> str:
    """Return the run id with `{time}` replaced, such as nightly-202611240200-3fa9.

    The id is the same in all tasks and retries of a run, and differs between runs: time in UTC to the minute, then the
    first characters of the job's id, because schedules may start runs at the same time. KFP before 2.17 fills in no
    time; more characters of the id replace it. Outside of KFP, where there is neither, the field is left out.
    """
    if TIME_FIELD not in run_id:
        return run_id
    identity = re.sub(r"[^a-z0-9]", "", job.id.lower()) if _is_filled(job.id) else ""
    found = next((match for text in (job.scheduled, job.created) if (match := _TIME_PATTERN.search(text))), None)
    moment = "".join(found.groups()) if found is not None else ""
    parts = (moment, identity[:JOB_ID_CHARACTERS]) if moment else (identity[:12],)
    return run_id.replace(TIME_FIELD, "-".join(filter(None, parts))).strip("-")


def longest_base(suffix: str) -> int:
    """Return the largest length of a run id before `suffix`, which contains `{time}`."""
    return MAX_RUN_ID_LENGTH - len(suffix) + len(TIME_FIELD) - TIME_LENGTH


def _is_filled(value: str) -> bool:
    return bool(value) and "{{" not in value


def _typed_changes(compiled: RunConfig, parameters: RunParameters, job: PipelineJob) -> dict[str, tuple[str, str]]:
    """Return parameter and override by option, of the parameters that differ from the document."""
    values = asdict(replace(parameters, run_id=expand_run_id(parameters.run_id, job)))
    defaults = asdict(RunParameters.of(compiled))
    return {
        option: (name, f"{option}={json.dumps(values[name])}")
        for name, option in OPTION_OF_PARAMETER.items()
        if values[name] not in ("", defaults[name])
    }


def _parse_overrides(overrides: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return parameter and override by option. Raises InputError for options that the package fixes."""
    changes = {}
    for override in overrides:
        key, equals, _ = override.partition("=") if isinstance(override, str) else ("", "", "")
        option = key.strip()
        if not equals or not option:
            hint = 'Write a list of texts, such as ["train.optimizer.momentum=0.95"].'
            raise InputError("not section.key=value", field="overrides", got=override, hint=hint)
        if option == "run.id" or "run.id".startswith(f"{option}."):
            raise InputError("the parameter run_id sets it", field=option, location="parameter overrides")
        if any(_overlap(option, fixed) for fixed in FIXED_OPTIONS):
            raise InputError(
                "the pods of this package are compiled for its value",
                field=option,
                location="parameter overrides",
                hint=f"Compile the package again: podscale compile RUN --set '{override}'",
            )
        changes[option] = ("overrides", override)
    return changes


def _overlap(option: str, fixed: str) -> bool:
    """Return True if one is the other, or a section that contains it."""
    return f"{option}.".startswith(f"{fixed}.") or f"{fixed}.".startswith(f"{option}.")


def _check_recipe(compiled: RunConfig, changes: dict[str, tuple[str, str]]) -> None:
    """Raise if the options that a recipe filled in belong to another batch or recipe."""
    changed = {"train.global_batch", "train.recipe"} & set(changes)
    if compiled.train.recipe is not None and changed:
        option = min(changed)
        raise InputError(
            f"the package has the values of train.recipe={compiled.train.recipe} for batch "
            f"{compiled.train.global_batch}",
            field=option,
            location=f"parameter {changes[option][0]}",
            hint=f"Compile the package again: podscale compile RUN --set '{changes[option][1]}'",
        )


def _name_parameter(error: InputError, changes: dict[str, tuple[str, str]]) -> InputError:
    """Return the error with the parameter that set the option as its location."""
    parameter = next((changes[option][0] for option in _parents(error.field) if option in changes), None)
    location = f"parameter {parameter}" if parameter else error.location
    return InputError(error.problem, field=error.field, got=error.got, hint=error.hint, location=location)


def _parents(option: str) -> Iterator[str]:
    """Yield an option and the sections that contain it, innermost first."""
    while option:
        yield option
        option = option.rpartition(".")[0]
