"""Integers between two bounds as GBNF: what their digits may be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

_MAX_DIGITS = 18


def integer_bounds(schema: dict[str, Any]) -> tuple[int | None, int | None]:
    """The lowest and highest integer that a JSON schema allows; None without such a bound.

    Raises:
        ValueError: A bound is no number that can be reached, or no integer lies between them.
    """
    lowest, highest = schema.get("minimum"), schema.get("maximum")
    low = None if lowest is None else math.ceil(_number("minimum", lowest))
    high = None if highest is None else math.floor(_number("maximum", highest))
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if above is not None:
        least = math.floor(_number("exclusiveMinimum", above)) + 1
        low = least if low is None else max(low, least)
    if below is not None:
        most = math.ceil(_number("exclusiveMaximum", below)) - 1
        high = most if high is None else min(high, most)
    if low is not None and high is not None and low > high:
        raise ValueError(f"the JSON schema allows integers from {low} to {high}: there are none")
    return low, high


def integer_rule(low: int | None, high: int | None) -> str:
    """GBNF of the integers from ``low`` to ``high``; without a bound, of up to 18 digits."""
    parts: list[str] = []
    if low is None or low < 0:
        largest = None if low is None else -low  # without its sign
        smallest = 1 if high is None or high >= 0 else -high
        parts += [f'"-" {digits}' for digits in _digits(smallest, largest)]
    if high is None or high >= 0:
        parts += _digits(max(low or 0, 0), high)
    return " | ".join(parts)


def _number(name: str, value: Any) -> int | float:
    limit = 10**_MAX_DIGITS
    if isinstance(value, bool) or not isinstance(value, int | float) or not -limit < value < limit:
        raise ValueError(f"the JSON schema has {name} = {value!r}, expected a number of at most {_MAX_DIGITS} digits")
    return value


def _digits(low: int, high: int | None) -> Iterator[str]:
    """Alternatives for 0 <= low <= high, by the number of digits."""
    for n in range(len(str(low)), _MAX_DIGITS + 1 if high is None else len(str(high)) + 1):
        if high is None and n > len(str(low)):  # every longer number
            yield f"[1-9] [0-9]{{{n - 1},{_MAX_DIGITS - 1}}}"
            return
        first = low if n == len(str(low)) else 10 ** (n - 1)
        last = high if high is not None and n == len(str(high)) else 10**n - 1
        yield from _same_length(str(first), str(last))


def _same_length(low: str, high: str) -> Iterator[str]:
    """Alternatives for two numbers of equally many digits."""
    n_rest = len(low) - 1
    if not n_rest or low[0] == high[0]:
        head = _range(low[0], high[0])
        yield from (f"{head} {rest}" for rest in _same_length(low[1:], high[1:])) if n_rest else [head]
        return
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * n_rest:
        yield from (f"{_range(low[0], low[0])} {rest}" for rest in _same_length(low[1:], "9" * n_rest))
        first += 1
    tail: list[str] = []
    if high[1:] != "9" * n_rest:
        tail = [f"{_range(high[0], high[0])} {rest}" for rest in _same_length("0" * n_rest, high[1:])]
        last -= 1
    if first <= last:
        yield f"{_range(str(first), str(last))} [0-9]{{{n_rest}}}"
    yield from tail


def _range(low: str, high: str) -> str:
    return f'"{low}"' if low == high else f"[{low}-{high}]"
