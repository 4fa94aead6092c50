"""Bodies of the KFP components: one function each, which connects KFP's artifacts to the library's stages.

The artifact of a shard set is a small JSON file with location, counts and hashes. Large data is never an artifact,
because a backend downloads every input artifact before user code runs.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from podscale.components.run_parameters import PipelineJob, RunParameters, load_document, resolve_document
from podscale.components.stage_process import stage_process
from podscale.components.workspace_check import check_workspace_mounted
from podscale.config import RunConfig
from podscale.config.data import DataSection
from podscale.config.preflight import preflight
from podscale.data.manifest import ShardPart
from podscale.errors import InputError
from podscale.runs import RunDirectory, StageOutcome, ensemble_members, stage_outcomes
from podscale.stages import local
from podscale.study import StudyDocument
from podscale.util import env, progress_reports
from podscale.util.files import write_atomically, write_json

SUCCEEDED_STATES = ("SUCCEEDED", "COMPLETE")
"""States of a successful pipeline; the second is used by backends with ML Metadata (KFP up to 2.17)."""
NO_ERRORS = "none"


def configure(document: str, parameters: RunParameters, job: PipelineJob) -> tuple[str, str]:
    """Apply the parameters of a run to the document, and check it and the workspace before anything else starts.

    Returns the resolved document and its data section as JSON.
    """
    with stage_process("configure"):
        config = resolve_document(document, parameters, job)
        _check_placement(config)
        print(f"run {config.run.id}", flush=True)
        return config.model_dump_json(), config.data.model_dump_json()


def _check_placement(config: RunConfig) -> None:
    """Raise InputError if the document does not suit a cluster.

    In a pod, also if the pod has no volume for the workspace, or if the policy of its namespace refuses the pipeline.
    """
    preflight(config, "cluster")
    if local.preflight_target() == "pod":
        from podscale.stages.on_cluster import check_namespace_policy

        check_workspace_mounted(config.run.workspace)
        check_namespace_policy(config)


def pack(data: str, workspace: str, index: int, of: int) -> None:
    """Pack part `index` of `of` of a shard set; the part that finishes last completes the set."""
    with stage_process("shard"):
        local.shard(
            DataSection.model_validate_json(data),
            workspace,
            ShardPart(index, of),
            workers=_worker_count(),
            telemetry=local.ExportedTelemetry.from_env(),
        )


def shard(data: str, workspace: str, shard_set: Any) -> None:
    """Build the shard set, or what is missing of it.

    Args:
        shard_set: output artifact, dsl.Dataset.
    """
    with stage_process("shard"):
        result = local.shard(
            DataSection.model_validate_json(data),
            workspace,
            workers=_worker_count(),
            progress=progress_reports.progress_from_env(),
            telemetry=local.ExportedTelemetry.from_env(),
        )
        assert result is not None, "a component packs the complete set"
        for note in result.messages:
            print(note)
        manifest = result.manifest
        content = {
            "location": result.location,
            "counts": result.images,
            "bytes": {name: split.bytes for name, split in manifest.splits.items()},
            "classes": len(next(iter(manifest.splits.values())).class_counts),
            "rejects": manifest.rejects,
            "duplicates": manifest.duplicates,
            "data_fingerprint": manifest.data_fingerprint,
            "plan_fingerprint": manifest.plan_fingerprint,
            "classes_sha256": manifest.classes_sha256,
            "index_sha256": {name: split.index_sha256 for name, split in manifest.splits.items()},
        }
        write_json(Path(shard_set.path), content)
        shard_set.metadata.update(
            {**{f"{name}_images": count for name, count in result.images.items()}, **_flat_copy(content)}
        )


def train(document: str, shard_set: Any, model: Any) -> None:
    """Train in this process, or by a job of the cluster (launch.backend).

    Args:
        model: output artifact, dsl.Model: a directory with weights, description and model card.
    """
    with stage_process("train"):
        _train(load_document(document), shard_set, model)


def collapse(document: str, cycle: int, shard_set: Any, model: Any) -> None:
    """Train the member of the document's ensemble that starts from the snapshot at the end of `cycle`."""
    with stage_process("collapse"):
        _train(ensemble_members.ensemble_member(load_document(document), cycle).config, shard_set, model)


def _train(config: RunConfig, shard_set: Any, model: Any) -> None:
    location = _shard_set_location(shard_set)
    outcome = _choose_runner(config, "train")(config, location)
    directory = RunDirectory.for_config(config).model
    has_card = outcome.reused and (directory / "README.md").exists()
    if not has_card and env.STAGE_FILE not in os.environ:  # `podscale run` reads no artifacts
        with suppress(OSError):  # the report stage writes it again
            local.write_card(config, location)
    shutil.copytree(directory, model.path, copy_function=_link_or_copy, dirs_exist_ok=True)
    model.metadata.update(
        framework=config.train.engine,
        architecture=config.model.name,
        location=str(directory),
        seconds=outcome.seconds,
        reused=outcome.reused,
    )


def evaluate(document: str, shard_set: Any, metrics: Any, confusion: Any) -> None:
    """Evaluate the model.

    Args:
        metrics: output artifact, dsl.Metrics.
        confusion: output artifact, dsl.ClassificationMetrics.
    """
    from podscale.evaluation.evaluation_json import confusion_for_kfp, kfp_metrics, read_evaluation

    with stage_process("evaluate"):
        config = load_document(document)
        _choose_runner(config, "evaluate")(config, _shard_set_location(shard_set))
        evaluation = read_evaluation(RunDirectory.for_config(config).evaluation)
        for name, value in kfp_metrics(evaluation).items():
            metrics.log_metric(name, value)
        matrix = confusion_for_kfp(evaluation)
        if matrix is not None:
            confusion.log_confusion_matrix(*matrix)


def report(document: str, shard_set: Any, page: Any, card: Any) -> None:
    """Build the report.

    Args:
        page: output artifact, dsl.HTML.
        card: output artifact with the model card, dsl.Markdown.
    """
    with stage_process("report"):
        config = load_document(document)
        local.report(config, _shard_set_location(shard_set))
        run = RunDirectory.for_config(config)
        Path(page.path).write_text(local.detached_report(config), encoding="utf-8")
        shutil.copyfile(run.model / "README.md", card.path)


def export(document: str, shard_set: Any, exported: Any, page: Any = None) -> None:
    """Write the exported files of the document.

    Args:
        exported: output artifact, dsl.Model: a directory with the files and the report of each check.
        page: output artifact, dsl.HTML, with the page that viewers show; None: the component has no such output.
    """
    with stage_process("export"):
        config = load_document(document)
        if page is not None and config.export.page is None:
            raise InputError(
                "has no page, which is an output of this component",
                field="export.formats",
                got=list(config.export.formats),
                hint="Add html or html-int8, or use the component `export`.",
            )
        local.export(config, _shard_set_location(shard_set))
        directory = RunDirectory.for_config(config).exports
        Path(exported.path).mkdir(parents=True, exist_ok=True)
        for name in config.export.file_names:
            report = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
            for file in (name, f"{name}.json"):
                _link_or_copy(str(directory / file), str(Path(exported.path) / file))
            model = {key: report[key] for key in ("run", "model", "weights_sha256")}
            kept = ("sha256", "opset", "input", "output", "quantization")
            properties = {key: report[key] for key in kept if report[key] is not None}
            exported.metadata |= model | {f"{name}: {key}": value for key, value in properties.items()}
            if page is not None and name == config.export.page:
                _link_or_copy(str(directory / name), str(page.path))
                page.metadata |= model | properties | {"file": name}
        exported.metadata.update(framework="+".join(config.export.formats), location=str(directory))


def cells(study: str, series: int) -> None:
    """Run the missing trials of one sweep series of a study, in this pod."""
    from podscale.study.grid import TrialGrid
    from podscale.study.runner import run_in_pod

    with stage_process("cells"):
        grid = TrialGrid(StudyDocument.model_validate_json(study))
        run_in_pod(grid, [grid.all_series[series]], field="cells")


def findings(study: str, page: Any, text: Any) -> None:
    """Write the results of a study.

    Args:
        page: output artifact, dsl.HTML.
        text: output artifact, dsl.Markdown.
    """
    from podscale.study.result_files import markdown_without_charts, write_study_results

    with stage_process("findings"):
        document = StudyDocument.model_validate_json(study)
        (html,) = (path for path in write_study_results(document) if path.suffix == ".html")
        shutil.copyfile(html, page.path)
        Path(text.path).write_text(markdown_without_charts(document), encoding="utf-8")


def summarize(document: str, parameters: RunParameters, job: PipelineJob, status: Any, page: Any) -> str:
    """Write the summary of a run to <run>/summary.md and to `page`; stop the jobs of a run that did not succeed.

    Returns the errors as text. A task that fails loses its outputs in KFP, so a job that cannot be stopped is an error
    on the page; the run has failed or was terminated in any case.

    Args:
        status: dsl.PipelineTaskFinalStatus. Its error message is empty on a real backend, so the summary uses the
            stages' outcomes. A cancelled run has the state RUNNING: its launcher is killed and its job still runs.
        page: output artifact, dsl.Markdown.
    """
    with stage_process("summary"):
        config, problem = _check_configuration(document, parameters, job)
        if config is None:
            text, errors = f"# Run {parameters.run_id}: {status.state}\n\n{_quote(problem)}\n", {"configure": problem}
        else:
            text, errors = _summarize_run(config, str(status.state), problem)
        Path(page.path).write_text(text, encoding="utf-8")
        print(text, flush=True)
        return "\n".join(f"{stage}: {error}" for stage, error in errors.items()) or NO_ERRORS


def _check_configuration(document: str, parameters: RunParameters, job: PipelineJob) -> tuple[RunConfig | None, str]:
    """Return the document of the run, None if it cannot be resolved, and the error of the first task."""
    config = None
    try:
        config = resolve_document(document, parameters, job)
        if job.id:  # not a local run, which has no first task
            _check_placement(config)
    except InputError as error:
        return config, str(error)
    return config, ""


def _summarize_run(config: RunConfig, state: str, problem: str) -> tuple[str, dict[str, str]]:
    """Stop the jobs of a run that did not succeed; return its summary as Markdown, and the errors by stage."""
    stopped, errors = "", {"configure": problem} if problem and state not in SUCCEEDED_STATES else {}
    if state not in SUCCEEDED_STATES:
        try:
            stopped = _stop_jobs(config, state)
        except Exception as error:  # no error may hide the stages' outcomes
            errors["summary"] = str(error)
    outcomes = {**local.run_outcomes(config), **local.collapse_outcomes(config)}
    errors |= {outcome.stage: outcome.error for outcome in outcomes.values() if not outcome.is_done}
    text = summary_markdown(config, state, outcomes, errors, stopped)
    run = RunDirectory.for_config(config)
    with suppress(OSError):  # the page of the task remains
        if run.path.is_dir():
            write_atomically(run.path / "summary.md", text)
    return text, errors


def summary_markdown(
    config: RunConfig, state: str, outcomes: Mapping[str, StageOutcome], errors: Mapping[str, str], stopped: str = ""
) -> str:
    """Format the run as Markdown: outcome and seconds of each stage, and the errors.

    Args:
        state: final state of the pipeline.
        outcomes: recorded outcomes by stage, and by `collapse` and the member's run id.
        errors: errors by task.
        stopped: result of stopping the run's jobs; empty if there was none.
    """
    state = SUCCEEDED_STATES[0] if state in SUCCEEDED_STATES else state
    lines = [f"# Run {config.run.id}: {state}", "", "| stage | ended | seconds |", "|---|---|---|"]
    members = [f"collapse {member.config.run.id}" for member in ensemble_members.ensemble_members(config)]
    for name in (*stage_outcomes.planned_stages(config), *members):
        outcome = outcomes.get(name)
        if outcome is None:
            lines.append(f"| {name} | not run | |")
            continue
        ended = "done before" if outcome.reused else "done" if outcome.is_done else f"exit code {outcome.exit_code}"
        lines.append(f"| {name} | {ended} | {outcome.seconds:.1f} |")
    for name, error in errors.items():
        lines += ["", f"## {name}", "", _quote(error)]
    if stopped:
        lines += ["", stopped]
    lines += ["", f"All files of this run are under `{RunDirectory.for_config(config).path}`.", ""]
    return "\n".join(lines)


def _quote(text: str) -> str:
    """Return text as a Markdown block without formatting."""
    return f"```\n{text}\n```"


def _choose_runner(config: RunConfig, stage: Literal["train", "evaluate"]) -> Callable[[RunConfig, str], StageOutcome]:
    """Return the function that runs a stage: in this process, or by a job that a child process launches."""
    in_process = {"train": local.train, "evaluate": local.evaluate}[stage]
    if config.launch.backend == "local":
        return in_process
    from podscale.stages import launcher_process

    if not launcher_process.is_launched(config, stage):
        return in_process
    return lambda document, shard_set: launcher_process.launch_in_child(document, stage, shard_set)


def _stop_jobs(config: RunConfig, state: str) -> str:
    if config.launch.backend == "local":
        return ""
    from podscale.stages import on_cluster

    members = [member.config for member in ensemble_members.ensemble_members(config)]
    return "\n\n".join(on_cluster.end_jobs(document, state) for document in (config, *members))


def _worker_count() -> int:
    return env.read_number(env.SHARD_WORKERS) or 0


def _shard_set_location(shard_set: Any) -> str:
    try:
        return str(json.loads(Path(shard_set.path).read_text(encoding="utf-8"))["location"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"not the manifest artifact of a shard set ({error})", field=str(shard_set.path)) from error


def _flat_copy(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if isinstance(value, (str, int, float))}


def _link_or_copy(source: str, target: str) -> str:
    Path(target).unlink(missing_ok=True)  # of an earlier attempt; a copy would be written through its link
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
    return target
