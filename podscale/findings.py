"""What an examination found: one line each, with what to do where something is missing."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from podscale.errors import ExitCode
from podscale.terminal import paint

CheckStatus = Literal["ok", "note", "missing"]
STATUS_STYLES = {"ok": "green", "note": "yellow", "missing": "bold red"}


@dataclass(frozen=True)
class CheckResult:
    """One line: what was looked at, what was found, and what to do where something is missing."""

    subject: str
    verdict: CheckStatus
    found: str
    advice: str = ""


def print_check_results(results: Sequence[CheckResult], *, as_json: bool) -> int:
    """Prints the findings; the exit code is 2 where something is missing."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in results], indent=2))
    else:
        print("\n".join(_result_lines(results)))
    return int(ExitCode.BAD_INPUT if any(finding.verdict == "missing" for finding in results) else ExitCode.DONE)


def _result_lines(results: Sequence[CheckResult]) -> Iterator[str]:
    width = max(len(finding.subject) for finding in results)
    for finding in results:
        word = paint(f"{finding.verdict:<7}", STATUS_STYLES[finding.verdict], sys.stdout)
        advice = f" -> {finding.advice}" if finding.advice else ""
        yield f"{word}  {finding.subject:<{width}}  {finding.found}{advice}"
