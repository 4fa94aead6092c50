"""Numbers, and text from outside (class names, paths, messages), made fit to be shown to people."""

import unicodedata


def count(number: int, noun: str) -> str:
    """1234, 'image' -> '1,234 images'; 2, 'process' -> '2 processes'."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as 1:02:03 or 2:03."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def human_bytes(number: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "bytes" or number >= 100 else f"{number:.1f} {unit}"


def printable(value: str | bytes) -> str:
    """Text that any browser or terminal can show: bytes as UTF-8 with \\xNN for the rest, controls as \\xNN."""
    decoded = value.decode("utf-8", errors="backslashreplace") if isinstance(value, bytes) else value
    return "".join(c if _shows(c) else f"\\x{ord(c):02x}" for c in decoded)


def one_line(value: str | bytes) -> str:
    """As `printable`, with ' | ' between lines."""
    return " | ".join(printable(value).replace("\t", " ").splitlines())


def _shows(c: str) -> bool:
    return c in "\n\t" or c.isprintable() or unicodedata.category(c) == "Zs"
