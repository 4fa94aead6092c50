"""How a check across sections says what is wrong."""

from pydantic_core import PydanticCustomError


def conflict(key: str, message: str) -> PydanticCustomError:
    """An error of a cross-section check; `key` is the dotted field a person should change first."""
    return PydanticCustomError("conflict", "{message}", {"key": key, "message": message})
