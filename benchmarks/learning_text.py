"""What learning.md says beside its figures."""

SETTING: list[str] = []
QUESTIONS = {"a": "", "b": "", "c": "", "d": "", "e": ""}
READING = {"a": "", "b": "", "c": "", "d": "", "e": ""}
