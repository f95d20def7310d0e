"""Streamed text equals the whole text: characters of several bytes, and stop texts at any place."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine_local.text import TextStream


def stream(data: bytes, cuts: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """Feed the bytes in parts that end at the cuts."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    text = TextStream(stop)
    pieces = [text.feed(data[a:b]) for a, b in pairwise(edges)]
    return [*pieces, text.finish()], text.stopped


@given(st.text(), st.lists(st.integers(min_value=0), max_size=8))
def test_pieces_join_to_the_text(text: str, cuts: list[int]) -> None:
    data = text.encode("utf-8", errors="replace")
    assert "".join(stream(data, cuts)[0]) == data.decode("utf-8")


@given(st.binary(), st.lists(st.integers(min_value=0), max_size=8))
def test_bytes_that_are_no_text_become_replacement_characters(data: bytes, cuts: list[int]) -> None:
    assert "".join(stream(data, cuts)[0]) == data.decode("utf-8", errors="replace")


@given(st.text(alphabet="ab"), st.text(alphabet="ab", min_size=1, max_size=4), st.lists(st.integers(0), max_size=8))
def test_nothing_of_a_stop_text_or_behind_it_is_seen(text: str, stop: str, cuts: list[int]) -> None:
    pieces, stopped = stream(text.encode(), cuts, (stop,))
    assert "".join(pieces) == text.split(stop)[0]
    assert stopped == (stop in text)


@pytest.mark.parametrize("text", ["👩‍👩‍👧 family", "漢字かな交じり文", "naïve café", "\N{MUSICAL SYMBOL G CLEF}"])
def test_every_piece_is_whole_characters(text: str) -> None:
    data = text.encode()
    for at in range(len(data)):
        pieces, _ = stream(data, [at])
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)


def test_the_earliest_of_several_stop_texts_ends_the_answer() -> None:
    pieces, stopped = stream(b"one two three", [5], ("three", "two"))
    assert ("".join(pieces), stopped) == ("one ", True)
