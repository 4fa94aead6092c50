"""Formatting of numbers and of untrusted text (class names, paths, messages) for display."""

import difflib
import unicodedata
from collections.abc import Iterable, Sequence


def format_count(number: int, noun: str) -> str:
    """1234, 'image' -> '1,234 images'; 2, 'process' -> '2 processes'."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds as 1:02:03 or 2:03."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_bytes(number: float) -> str:
    """Format a `number` of bytes: 1536 -> '1.5 KiB'."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "bytes" or number >= 100 else f"{number:.1f} {unit}"


def format_ranks(ranks: Sequence[int]) -> str:
    """[2] -> 'rank 2'; [0, 1, 2, 5] -> 'ranks 0 to 2 and 5'; the ranks must be sorted."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [part for run in runs for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {join_words(parts)}"


def join_words(words: Sequence[str], before_last: str = "and") -> str:
    """['a', 'b', 'c'] -> 'a, b and c'."""
    return ", ".join(words[:-1]) + (f" {before_last} " if len(words) > 1 else "") + "".join(words[-1:])


def printable(value: str | bytes) -> str:
    """Return text for any browser or terminal, with other bytes and control characters as \\xNN."""
    decoded = value.decode("utf-8", errors="backslashreplace") if isinstance(value, bytes) else value
    return "".join(c if _is_printable(c) else f"\\x{ord(c):02x}" for c in decoded)


def one_line(value: str | bytes) -> str:
    """Return `printable` text on one line, with ' | ' between the lines."""
    return " | ".join(printable(value).replace("\t", " ").splitlines())


def _is_printable(c: str) -> bool:
    return c in "\n\t" or c.isprintable() or unicodedata.category(c) == "Zs"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its type if it has none."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def suggest_similar(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the hint with the known name that is most similar; "" if none is."""
    similar = difflib.get_close_matches(name, list(known), 1, 0.6)
    return f"Did you mean {prefix}{similar[0]}?" if similar else ""
