"""Typed access to a checkpoint's JSON config that leaves no key unread."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NoReturn

from dspine_local.errors import ModelFormatError

_REQUIRED: Any = object()


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: Not UTF-8, not JSON, not an object, or a key given twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ModelFormatError(f"'{path}' gives the key '{twice}' twice")
        return values

    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"'{path}' is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFormatError(f"'{path}' holds a JSON {type(values).__name__}, expected an object")
    return values


class Section:
    """One JSON object of a config. Every getter marks its key as read; ``refuse_others`` names what is left.

    Args:
        values: The object.
        file: Where it was read, for messages.
        path: The object's own place in the file, e.g. ``"dflash_config."``.
    """

    def __init__(self, values: Mapping[str, Any], file: Path, path: str = "") -> None:
        self._values = values
        self._file = file
        self._path = path
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there and not null; a null key counts as read."""
        self._read.add(key)
        return self._values.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: Any = _REQUIRED) -> int:
        """An integer in [low, high]."""
        value = self._get(key, default)
        if type(value) is not int or not low <= value <= high:
            self.refuse(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: Any = _REQUIRED, *, low: float = 0.0) -> float:
        """A finite number, positive and not below ``low``."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0 or value < low:
            self.refuse(key, f"a number of at least {low:g}" if low > 0 else "a positive number")
        return float(value)

    def boolean(self, key: str, default: Any = _REQUIRED) -> bool:
        """True or false."""
        value = self._get(key, default)
        if type(value) is not bool:
            self.refuse(key, "true or false")
        return value

    def text(self, key: str, known: Container[str], expected: str, default: Any = _REQUIRED) -> str:
        """A string out of ``known``; ``expected`` lists them in words."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in known:
            self.refuse(key, expected)
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers, not empty."""
        value = self._get(key, _REQUIRED)
        if not isinstance(value, list) or not value or any(type(item) is not int for item in value):
            self.refuse(key, "a list of integers, not empty")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings."""
        value = self._get(key, _REQUIRED)
        if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
            self.refuse(key, "a list of strings")
        return value

    def fixed(self, key: str, *allowed: Any) -> None:
        """Accept an absent or null key, or one of these values."""
        if self.has(key) and not any(self._values[key] == a and type(self._values[key]) is type(a) for a in allowed):
            self.refuse(key, " or ".join(json.dumps(a) for a in allowed))

    def section(self, key: str) -> Section:
        """A nested object."""
        value = self._get(key, _REQUIRED)
        if not isinstance(value, dict):
            self.refuse(key, "an object")
        return Section(value, self._file, f"{self._path}{key}.")

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise for a key's value, naming both."""
        value = json.dumps(self._values.get(key))
        shown = value if len(value) <= 80 else value[:77] + "..."
        raise ModelFormatError(f"'{self._file}' has {self._path}{key} = {shown}, expected {expected}")

    def refuse_others(self, ignored: Container[str] = ()) -> None:
        """Raise for the first key that no getter read and that is not known to be without effect."""
        for key in self._values:
            if key not in self._read and key not in ignored:
                self.refuse(key, "no such key: this converter does not know what it means for drafting")

    def _get(self, key: str, default: Any) -> Any:
        if self.has(key):
            return self._values[key]
        if default is _REQUIRED:
            raise ModelFormatError(f"'{self._file}' has no {self._path}{key}")
        return default
