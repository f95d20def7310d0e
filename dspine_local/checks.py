"""Checks of options and texts: each error says what was given and what is expected, nothing is made to fit."""

from __future__ import annotations

from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
FLOAT32_MAX = 3.4028234663852886e38


class OptionError(ValueError):
    """A wrong value of a named option. The command line says it with its own name of the option."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        super().__init__(name, value, expected)
        self.name, self.value, self.expected = name, value, expected

    def __str__(self) -> str:
        return f"{self.name} = {shown(self.value)}, expected {self.expected}"


def shown(value: object) -> str:
    """A value for a message, on one line and not too long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def need_integer(name: str, value: object, low: int, high: int = INT32_MAX) -> None:
    """An integer in [low, high]; True and False are none."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= value <= high:  # type: ignore[operator]
        raise OptionError(name, value, f"an integer from {low} to {high}")


def need_number(name: str, value: object, low: float = -FLOAT32_MAX, high: float = FLOAT32_MAX) -> None:
    """A finite number in [low, high]."""
    # What is not a number fails both comparisons, and infinity is beyond float32.
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= value <= high:  # type: ignore[operator]
        if high < FLOAT32_MAX:
            expected = f"a number from {low:g} to {high:g}"
        else:
            expected = "a finite number" if low < 0 else f"a finite number of at least {low:g}"
        raise OptionError(name, value, expected)


def need_positive(name: str, value: object) -> None:
    """A finite number above 0."""
    need_number(name, value)
    if value <= 0:  # type: ignore[operator]
        raise OptionError(name, value, "a number above 0")


def need_flag(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise OptionError(name, value, "True or False")


def need_choice(name: str, value: object, choices: Collection[str]) -> None:
    """One of these texts."""
    if not isinstance(value, str) or value not in choices:
        raise OptionError(name, value, f"one of {', '.join(choices)}")


def need_collection(name: str, value: object, of: str) -> Collection[Any]:
    """A list, tuple or the like, but no text: its items are the caller's to check."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | bytearray | dict):
        raise OptionError(name, value, f"a list of {of}")
    return value


def need_text(name: str, value: object) -> None:
    """Text that UTF-8 can encode, without a NUL character."""
    if not isinstance(value, str):
        raise OptionError(name, value, "text")
    check_encodable(name, value)
    if "\0" in value:
        raise OptionError(name, value, "text without a NUL character")


def check_encodable(what: str, text: str) -> None:
    """Refuse what UTF-8 cannot encode: half of a surrogate pair, or a byte that Python could not decode.

    Raises:
        ValueError: With the place and what is there.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Python keeps bytes that it could not decode, of arguments for example, as U+DC80 to U+DCFF.
        found = f"the byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"the lone surrogate U+{code:04X}"
        offset = len(text[: error.start].encode())
        raise ValueError(f"{what} has {found} at byte {offset}, expected UTF-8") from error


def decode_utf8(what: str, data: bytes) -> str:
    """Text of bytes, line ends as in Python.

    Raises:
        ValueError: Not UTF-8; with the place and what is there.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} has the byte 0x{data[error.start]:02x} at byte {error.start}, expected UTF-8"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
