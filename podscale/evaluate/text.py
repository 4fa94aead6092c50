"""Text from outside (class names, paths, messages) made fit to be shown."""

import unicodedata


def printable(value: str | bytes) -> str:
    """Text that any browser can show: bytes as UTF-8 with \\xNN for the rest, control characters as \\xNN."""
    decoded = value.decode("utf-8", errors="backslashreplace") if isinstance(value, bytes) else value
    return "".join(c if _shows(c) else f"\\x{ord(c):02x}" for c in decoded)


def _shows(c: str) -> bool:
    return c in "\n\t" or c.isprintable() or unicodedata.category(c) == "Zs"
