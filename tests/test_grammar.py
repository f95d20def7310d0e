"""Integers as grammars; whole schemas are tried on a model in test_server.py."""

from __future__ import annotations

import re

import pytest

from dspine_local.grammar.integers import integer_bounds, integer_rule

BOUNDS = (-1234, -100, -99, -10, -1, 0, 1, 7, 9, 10, 19, 99, 100, 105, 1000, 54321)


@pytest.mark.parametrize("low", [None, *BOUNDS])
@pytest.mark.parametrize("high", [None, *BOUNDS])
def test_integers_between_bounds(low: int | None, high: int | None) -> None:
    if low is not None and high is not None and low > high:
        with pytest.raises(ValueError, match="there are none"):
            integer_bounds({"minimum": low, "maximum": high})
        return
    expression = re.compile(integer_rule(low, high).replace('"', "").replace(" ", ""))
    for value in {b + d for b in BOUNDS for d in (-11, -1, 0, 1, 11)} | {10**17, -(10**17)}:
        inside = (low is None or value >= low) and (high is None or value <= high)
        assert bool(expression.fullmatch(str(value))) == inside, value
    for other in ("", "-", "-0", "00", "01", "1.0"):
        assert not expression.fullmatch(other)


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [
        ({}, (None, None)),
        ({"minimum": 0.5, "maximum": 9.5}, (1, 9)),
        ({"minimum": 0, "exclusiveMinimum": 0}, (1, None)),
        ({"exclusiveMinimum": 1.5, "exclusiveMaximum": 4}, (2, 3)),
        ({"maximum": -3, "exclusiveMaximum": 7}, (None, -3)),
    ],
)
def test_bounds(schema: dict[str, float], bounds: tuple[int | None, int | None]) -> None:
    assert integer_bounds(schema) == bounds
