"""The table at the end of a run."""

from podscale.runs import StageOutcome

OVERHEAD_GOAL = 0.10
"""The pipeline's own share of the time should stay below this."""


def stage_table(outcomes: dict[str, StageOutcome], seconds: float) -> str:
    """Seconds and share of each stage of a launch, and of the pipeline around them.

    seconds: wall time of the whole launch.
    """
    spent, overhead = stage_seconds(outcomes), pipeline_seconds(outcomes, seconds)
    width = max([10, *map(len, outcomes)])
    lines = [f"{'stage':<{width}}{'seconds':>9}{'share':>8}"]
    for stage, outcome in outcomes.items():
        note = "  finished before" if outcome.reused else "" if outcome.is_done else f"  exit code {outcome.exit_code}"
        lines.append(f"{stage:<{width}}{spent[stage]:>9.1f}{spent[stage] / seconds:>8.0%}{note}")
    goal = f"  (goal: below {OVERHEAD_GOAL:.0%})" if any(spent.values()) else ""
    lines.append(f"{'pipeline':<{width}}{overhead:>9.1f}{overhead / seconds:>8.0%}{goal}")
    lines.append(f"{'total':<{width}}{seconds:>9.1f}")
    return "\n".join(lines)


def stage_seconds(outcomes: dict[str, StageOutcome]) -> dict[str, float]:
    """Seconds that each stage took in this launch: none where it was finished before."""
    return {stage: 0.0 if outcome.reused else outcome.seconds for stage, outcome in outcomes.items()}


def pipeline_seconds(outcomes: dict[str, StageOutcome], seconds: float) -> float:
    """What is left of the launch's wall time besides its stages."""
    return max(0.0, seconds - sum(stage_seconds(outcomes).values()))
