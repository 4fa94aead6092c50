"""Study document: the base run, the variants and the grid applied to it, and the settings of the results.

`read_study` reads it with the run document that it names and the commit of both.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from podscale.config import Defaults, RunConfig, loads, option_names
from podscale.config.document import format_overrides, loads_as, merge_values, read_text
from podscale.config.fields import Section, conflict_error
from podscale.errors import InputError
from podscale.study.sections import (
    CriterionSection,
    OptionValues,
    PretrainingSection,
    ProvenanceSection,
    RateSection,
    SelectionSection,
    Variant,
)
from podscale.util.formatting import suggest_similar

RATE_OPTION = "train.schedule.learning_rate"
START_SECTION = "train.start_from"
START_OPTION = f"{START_SECTION}.run"
BATCH_OPTION = "train.global_batch"
MIN_SEEDS = 3
"""Fewest seeds of a study with criteria."""
GIT_SECONDS = 30
"""Timeout of a call of git, seconds."""


class StudyDocument(Section):
    """Grid of runs that answers a question: each variant at each grid point, with each seed."""

    name: str = Field(
        ...,
        description="Name; the results are in <workspace>/studies/results/<name>.",
        pattern=r"^[a-z][-a-z0-9]{0,59}$",
    )
    title: str = Field("", description="Heading of the results; default: the name.")
    question: str = Field("", description="Question and method; shown before the results.")
    reading: str = Field("", description="Interpretation by a person; shown after the results.")
    run: str | OptionValues = Field(
        ..., description="Run to vary: a preset, a path (relative to this file), or a document."
    )
    set: OptionValues = Field({}, description="Options of every trial, on top of the run.")
    variants: tuple[Variant, ...] = Field((Variant(name="as it is"),), min_length=1)
    pretraining: tuple[PretrainingSection, ...] = Field(
        (), description="Trainings that variants start from; the results do not compare them."
    )
    grid: dict[str, tuple[Any, ...]] = Field({}, description="Values by dotted option; all combinations run.")
    seeds: tuple[int, ...] = Field((1, 2, 3), min_length=1, description="Values of run.seed.")
    papers: tuple[str, ...] = Field((), description="Papers whose claim the study tests, such as `You 2017`.")
    selection: SelectionSection | None = Field(
        None, description="Selection of the options in each variant's `search`, before its seeds run."
    )
    criteria: tuple[CriterionSection, ...] = Field((), description="Pass criteria, written before the run.")
    passes: Literal["all", "any"] = Field("all", description="Criteria that must pass for the study to pass.")
    provenance: ProvenanceSection | None = None
    learning_rate: RateSection | None = Field(None, description="Learning rate; default: the run's.")
    choose: Literal["accuracy", "updates"] = Field(
        "accuracy", description="Criterion of a sweep: the best last top-1, or the fewest steps to the target."
    )
    target: float | None = Field(
        None, description="Top-1, as a fraction, to which epochs and steps are counted.", gt=0, lt=1
    )
    x: str | None = Field(None, description="Option of the grid on the horizontal axis; default: the first.")
    time_box_minutes: float | None = Field(
        None, description="Time box, minutes; no trial starts that would end later.", gt=0
    )
    cell_seconds: float | None = Field(None, description="Estimated seconds of a trial until one is measured.", gt=0)

    @model_validator(mode="after")
    def _check_document(self) -> "StudyDocument":
        names = [variant.name for variant in self.variants]
        if len(set(names)) < len(names):
            raise conflict_error("variants", "two have the same name")
        if len(set(self.seeds)) < len(self.seeds):
            raise conflict_error("seeds", "a seed is given twice", got=self.seeds)
        for field, values in self.grid.items():
            if not values or len(set(map(repr, values))) < len(values):
                raise conflict_error(f"grid.{field}", "needs values, each once", got=values)
        sections: list[Variant | PretrainingSection] = [*self.variants, *self.pretraining]
        for name in [*self.grid, *self.set, *(name for section in sections for name in section.set)]:
            if name in ("run.id", "run.seed"):
                raise conflict_error(name, "set by the study itself")
        if self.x is not None and self.x not in self.grid:
            raise conflict_error("x", f"not in the grid ({', '.join(self.grid) or 'which is empty'})", got=self.x)
        if self.choose == "updates" and self.target is None:
            raise conflict_error("target", "missing, and choose=updates needs it")
        self._check_rates(names)
        self._check_pretraining(names)
        self._check_selection()
        self._check_criteria(names)
        return self

    def _check_pretraining(self, names: list[str]) -> None:
        """Check that every `start_from` is a pretraining of the study, and that every pretraining is used."""
        known = [section.name for section in self.pretraining]
        for number, name in enumerate(known):
            if name in [*known[:number], *names]:
                raise conflict_error("pretraining", "two parts of the study have this name", got=name)
            if name not in [variant.start_from for variant in self.variants]:
                raise conflict_error("pretraining", "no variant starts from it", got=name, hint="Set start_from.")
        for variant in self.variants:
            if variant.start_from is None:
                continue
            if variant.start_from not in known:
                hint = suggest_similar(variant.start_from, known) or f"The study has: {', '.join(known) or 'none'}."
                raise conflict_error(
                    "start_from", f"no pretraining, for {variant.name}", got=variant.start_from, hint=hint
                )
            for name in [*variant.set, *variant.search, *self.grid, *(self.selection.set if self.selection else ())]:
                if name == START_SECTION or name.startswith(f"{START_SECTION}."):
                    raise conflict_error(name, f"{variant.name} starts from {variant.start_from}", hint="Remove one.")

    def _check_selection(self) -> None:
        """Check that all searches have equally many candidates, and that every reference is to a search."""
        searching = {variant.name: len(variant.candidates) for variant in self.variants if variant.search}
        if searching and self.selection is None:
            raise conflict_error("selection", "missing, and a variant has a search")
        if len(set(searching.values())) > 1:
            counts = ", ".join(f"{name} {count}" for name, count in searching.items())
            problem = f"the variants try different numbers of candidates ({counts})"
            raise conflict_error("variants.search", problem, hint="Give every search the same number.")
        for variant in self.variants:
            if variant.search_of is not None and variant.search_of not in searching:
                raise conflict_error(
                    "search_of", f"not a variant with a search, for {variant.name}", got=variant.search_of
                )
            if (variant.search or variant.search_of) and self.rate_of(variant) is not None:
                raise conflict_error("learning_rate", f"{variant.name} has a search too", hint="Search the rate.")
            for option in variant.search:
                if option in self.grid:
                    raise conflict_error(f"search.{option}", "varied by the grid as well", hint="Remove one.")

    def _check_criteria(self, names: list[str]) -> None:
        if self.criteria and len(self.seeds) < MIN_SEEDS:
            raise conflict_error("seeds", f"criteria need at least {MIN_SEEDS}", got=self.seeds)
        if self.criteria and any((rate := self.rate_of(one)) and rate.sweep for one in self.variants):
            hint = "Use `search`, whose trials are judged by other images than the results."
            raise conflict_error("learning_rate.sweep", "not together with criteria", hint=hint)
        for criterion in self.criteria:
            for name in (criterion.variant, *criterion.others):
                if name not in names:
                    raise conflict_error("criteria", f"unknown variant, in {criterion.name}", got=name)
            for option, value in [*criterion.at.items(), *criterion.than_at.items()]:
                if value not in self.grid.get(option, ()):
                    raise conflict_error("criteria.at", f"{option} is not in the grid, in {criterion.name}", got=value)

    def _check_rates(self, names: list[str]) -> None:
        """Check that every chain of `at` references ends at a variant with a rate of its own."""
        for variant in self.variants:
            seen, rate = [variant.name], self.rate_of(variant)
            while rate is not None and isinstance(rate.at, str):
                if rate.at not in names:
                    raise conflict_error("learning_rate.at", f"unknown variant, for {seen[-1]}", got=rate.at)
                if rate.at in seen:
                    circle = " -> ".join([*seen, rate.at])
                    raise conflict_error("learning_rate.at", f"circular reference {circle}", got=rate.at)
                seen.append(rate.at)
                rate = self.rate_of(self.variant(rate.at))
            if len(seen) > 1 and rate is None:
                raise conflict_error(
                    "learning_rate.at", f"{seen[-1]} has no rate for {seen[-2]} to follow", got=seen[-1]
                )

    @property
    def axis_option(self) -> str | None:
        """Option on the horizontal axis; None without a grid."""
        return self.x or next(iter(self.grid), None)

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)

    def criterion_points(self, criterion: CriterionSection) -> tuple[OptionValues, OptionValues]:
        """Return the grid points of both sides of a criterion; an option that it leaves out is at its last value."""
        last = {option: values[-1] for option, values in self.grid.items()}
        return {**last, **criterion.at}, {**last, **(criterion.than_at or criterion.at)}

    def rate_of(self, variant: Variant) -> RateSection | None:
        return variant.learning_rate or self.learning_rate

    def config(self, settings: Mapping[str, Any]) -> RunConfig:
        """Return the run document with these settings on top of the study's. Raises InputError if it is not valid."""
        assert not isinstance(self.run, str), "read_study replaces the name by the document"
        base = [*format_overrides(self.run), *format_overrides(self.set), *format_overrides(settings)]
        return loads("{}", f"study {self.name}", base)


def read_study(
    path: Path, changes: Mapping[str, Any], find_run: Any, defaults: Defaults | None = None
) -> StudyDocument:
    """Read the study at `path` and embed the run document that it names.

    Args:
        changes: options applied to every trial.
        find_run: maps the name of the run (preset or path) to its file.
        defaults: defaults of the run document.

    Raises:
        InputError: the file is not readable, a key is unknown or a value is wrong.
    """
    study = loads_as(StudyDocument, read_text(path), str(path))
    run, files = study.run, [path]
    if isinstance(run, str):
        neighbour = path.parent / run
        file = find_run(str(neighbour) if neighbour.is_file() else run)
        files.append(file)
        # Without built-in defaults, which depend on the study's settings.
        run = _read_mapping(read_text(file), str(file))
    if defaults is not None:
        run = merge_values(_read_mapping(defaults.text, defaults.name), run)
    changed = {"run": run, "set": {**study.set, **changes}, "provenance": document_provenance(*files)}
    study = study.model_copy(update=changed)
    known = set(option_names())
    if unknown := [name for name in study.grid if name not in known]:
        hint = "docs/reference/options.md lists them."
        raise InputError("unknown option", field="grid", got=unknown[0], hint=hint, location=str(path))
    return study


def _read_mapping(text: str, name: str) -> dict[str, Any]:
    return dict(loads_as(_AnyMapping, text, name).model_extra or {})


class _AnyMapping(Section, extra="allow"):
    """Any mapping; its content is checked later, together with the study's settings."""


def document_provenance(path: Path, *others: Path) -> ProvenanceSection:
    """Return the last commit of a document and of the files that it refers to; none if a file differs from it."""
    unknown = ProvenanceSection(file=path.name)
    folder, names = path.resolve().parent, [str(file.resolve()) for file in (path, *others)]
    try:
        changed = _git(folder, "status", "--porcelain", "--", *names)
        last = _git(folder, "log", "-1", "--format=%H %cI", "--", *names).split()
        inside = _git(folder, "ls-files", "--full-name", "--", names[0]).strip()
    except (OSError, subprocess.SubprocessError):
        return unknown
    if changed.strip() or len(last) != 2 or not inside:
        return unknown
    return ProvenanceSection(file=inside, commit=last[0], committed=last[1])


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=True
    )
    return done.stdout
