"""The drafter's cache: windows, chunks, cutting back, types, and refusals that change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafter_rig import assert_trace, expect, features, make_case, make_drafter, relative_error
from random_drafters import RandomCase, random_case

from dspine_local._native import ContextLengthError, Drafter

pytestmark = pytest.mark.native

WINDOW = 48
ANCHOR = 9
LAYERS: dict[str, list[str] | None] = {
    "all": None,
    "some": ["full_attention", "sliding_attention"],
}


def sliding_case(folder: Path, layers: str, **options: Any) -> RandomCase:
    return random_case(folder, seed=1, sliding_window=WINDOW, layer_types=LAYERS[layers], n_context=4, **options)


def commit_in_chunks(drafter: Drafter, seq: int, hidden: Any, sizes: tuple[int, ...]) -> None:
    start = 0
    for size in itertools.cycle(sizes):
        if start == len(hidden):
            return
        drafter.commit(seq, hidden[start : start + size])
        start = min(start + size, len(hidden))


@pytest.mark.parametrize("n_context", [1, WINDOW - 1, WINDOW, WINDOW + 1, 64, 4 * WINDOW, 700])
@pytest.mark.parametrize("layers", LAYERS)
def test_window(tmp_path: Path, layers: str, n_context: int) -> None:
    case = sliding_case(tmp_path, layers)
    hidden = features(case, n_context, seed=n_context)
    expected = expect(case, hidden, ANCHOR)
    drafter = make_drafter(case.drafter, case.inputs, n_ctx=1024, n_seq=4)
    for seq, sizes in enumerate(((n_context,), (7,), (1, 13, 50), (113,))):
        commit_in_chunks(drafter, seq, hidden, sizes)
        assert drafter.length(seq) == n_context
        assert_trace(drafter.trace(seq, ANCHOR, 7), expected)


@pytest.mark.parametrize("layers", LAYERS)
def test_growing_context_with_drafts_between(tmp_path: Path, layers: str) -> None:
    """As the engine does it: a draft of some length, then a few more positions, far past the ring's size."""
    case = sliding_case(tmp_path, layers, block_size=16)
    drafter = make_drafter(case.drafter, case.inputs)
    hidden = features(case, 300, seed=0)
    sizes = itertools.cycle((1, 16, 3, 7, 2, 11))
    n = 0
    while n < len(hidden):
        size = min(next(sizes), len(hidden) - n)
        drafter.commit(0, hidden[n : n + size])
        n += size
        (draft,) = drafter.draft([(0, n % 320)], 15 if n % 3 else 4)
        if n % 5 == 0:
            assert draft.tokens == expect(case, hidden[:n], n % 320)["selected"][: len(draft.tokens)].tolist()


@pytest.mark.parametrize("architecture", ["DSpineDraftModel", "DFlashDraftModel"])
def test_a_draft_changes_nothing(tmp_path: Path, architecture: str) -> None:
    case = sliding_case(tmp_path, "some", architecture=architecture)
    drafter = make_drafter(case.drafter, case.inputs)
    hidden = features(case, 90, seed=0)
    drafter.commit(0, hidden[:70])
    first = drafter.draft([(0, ANCHOR)], 7)[0]
    for anchor in (1, 2, 3):
        drafter.draft([(0, anchor)], 7)
    again = drafter.draft([(0, ANCHOR)], 7)[0]
    assert (again.tokens, again.probabilities) == (first.tokens, first.probabilities)
    assert drafter.length(0) == 70
    drafter.commit(0, hidden[70:])
    assert drafter.draft([(0, ANCHOR)], 7)[0].tokens == expect(case, hidden, ANCHOR)["selected"].tolist()


def test_truncate_then_recommit_equals_fresh(tmp_path: Path) -> None:
    case = random_case(tmp_path, seed=1)
    drafter = make_drafter(case.drafter, case.inputs)
    hidden, other = features(case, 150, seed=0), features(case, 60, seed=1)
    drafter.commit(0, hidden)
    drafter.draft([(0, 3)], 7)
    for n in (149, 130, 65, 64, 63, 1):
        assert drafter.reusable(0, n) == n
        drafter.truncate(0, n)
        assert drafter.length(0) == n
        assert drafter.draft([(0, ANCHOR)], 7)[0].tokens == expect(case, hidden[:n], ANCHOR)["selected"].tolist()
        drafter.commit(0, other)
        joined = np.concatenate([hidden[:n], other])
        assert_trace(drafter.trace(0, ANCHOR, 7), expect(case, joined, ANCHOR))
        drafter.truncate(0, n)
    drafter.truncate(0, 0)
    assert drafter.length(0) == drafter.reusable(0, 5) == 0
    drafter.commit(0, other)
    assert_trace(drafter.trace(0, ANCHOR, 7), expect(case, other, ANCHOR))


@pytest.mark.parametrize("layers", LAYERS)
def test_what_a_ring_can_be_cut_back_to(tmp_path: Path, layers: str) -> None:
    """Cut back to what `reusable` says and read on from there: the next drafts are a fresh cache's."""
    case = sliding_case(tmp_path, layers)
    hidden = features(case, 200, seed=0)
    drafter = make_drafter(case.drafter, case.inputs, n_seq=2)
    reference = {n: expect(case, hidden[:n], ANCHOR)["selected"].tolist() for n in range(4, 201, 4)}
    possible = []
    for n in range(0, 201, 4):
        drafter.truncate(0, 0)
        drafter.commit(0, hidden)
        drafter.draft([(0, 3)], 7)
        if drafter.reusable(0, n) == n:
            possible.append(n)
            drafter.truncate(0, n)
            if n > 0:
                assert drafter.draft([(0, ANCHOR)], 7)[0].tokens == reference[n]
        else:
            shorter = drafter.reusable(0, n)
            assert shorter == max(0, n - (WINDOW - 1))
            drafter.truncate(0, shorter)
            drafter.commit(0, hidden[shorter:n])
            assert drafter.draft([(0, ANCHOR)], 7)[0].tokens == reference[n]
    # A rejected draft of this round is always within reach.
    assert {0, 192, 196, 200} <= set(possible)
    assert 4 not in possible
    assert drafter.reusable(0, 10_000) == drafter.length(0)
    # A context that has not yet filled the ring can be cut back to anything.
    drafter.commit(1, hidden[:20])
    assert all(drafter.reusable(1, n) == n for n in range(21))


def test_a_sliding_cache_is_bounded_by_its_window(tmp_path: Path) -> None:
    case = sliding_case(tmp_path, "all")
    small, large = (make_drafter(case.drafter, case.inputs, n_ctx=n).cache_bytes for n in (256, 16384))
    assert small == large
    full = random_case(tmp_path / "full", seed=1)
    assert make_drafter(full.drafter, full.inputs, n_ctx=16384).cache_bytes > 32 * small


def test_what_a_long_prompt_leaves_behind_the_window_is_never_read(tmp_path: Path) -> None:
    """Committing it would cost as much as all layers' keys and values of the whole prompt."""
    case = sliding_case(tmp_path, "all")
    hidden = features(case, 700, seed=3)
    expected = make_drafter(case.drafter, case.inputs, n_ctx=1024)
    expected.commit(0, hidden)
    spoilt = hidden.copy()
    spoilt[: 700 - 4 * WINDOW] = np.nan
    drafter = make_drafter(case.drafter, case.inputs, n_ctx=1024)
    drafter.commit(0, spoilt)
    assert drafter.length(0) == 700
    draft, wanted = drafter.draft([(0, ANCHOR)], 7)[0], expected.draft([(0, ANCHOR)], 7)[0]
    assert draft.tokens == wanted.tokens
    assert draft.probabilities == wanted.probabilities


@pytest.mark.parametrize(("cache_type", "limit"), [("f32", 1e-5), ("f16", 2e-3), ("q8_0", 1.5e-2)])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_cache_type(tmp_path: Path, cache_type: str, limit: float, window: int | None) -> None:
    case = random_case(tmp_path, seed=2, head_dim=32, n_context=120, sliding_window=window)
    drafter = make_drafter(case.drafter, case.inputs, cache_type=cache_type)
    drafter.commit(0, case.inputs["target_hidden"])
    trace = drafter.trace(0, int(case.inputs["anchor_id"]), 7)
    for name in ("logits", "final_hidden"):
        assert relative_error(trace[name], case.expected[name]) < limit, name
    # What decides acceptance: the same candidates, and the same tokens chosen among them.
    shared = [np.isin(a, b).mean() for a, b in zip(trace["candidates"], case.expected["candidates"], strict=True)]
    assert np.mean(shared) > (0.99 if cache_type == "f32" else 0.9)
    np.testing.assert_array_equal(trace["selected"], case.expected["selected"])


def test_cache_types_differ_in_size(tmp_path: Path) -> None:
    case = random_case(tmp_path, seed=2, head_dim=32)
    f32, f16, q8 = (make_drafter(case.drafter, case.inputs, cache_type=t).cache_bytes for t in ("f32", "f16", "q8_0"))
    assert f32 == 2 * f16
    assert q8 == pytest.approx(f16 * 17 / 32, rel=0.01)


@pytest.mark.parametrize(
    ("outtype", "limit"),
    [("f16", 2e-3), ("bf16", 1.5e-2), ("q8_0", 4e-2), ("q6_k", 0.1), ("q5_k", 0.2), ("q4_k", 0.35), ("q4_0", 0.4)],
)
def test_quantized_weights(tmp_path: Path, outtype: str, limit: float) -> None:
    # Rows of 256, so that no K-quant falls back to another type.
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "ffn": 256, "rank": 256, "message": 256}
    case = random_case(tmp_path, seed=3, **sizes)
    anchor = int(case.inputs["anchor_id"])
    for order in ("path", "full"):
        drafter = make_drafter(case.drafter, case.inputs, outtype=outtype, order=order)
        drafter.commit(0, case.inputs["target_hidden"])
        trace = drafter.trace(0, anchor, 7)
        assert relative_error(trace["logits"], case.expected["logits"]) < limit
        (draft,) = drafter.draft([(0, anchor)], 7)
        assert draft.tokens == trace["selected"].tolist()
        assert all(0 < p <= 1 for p in draft.probabilities)


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Drafter, Any], object]]] = {
    "n_draft_0": (ValueError, "draft 0 tokens, expected 1 to 7", lambda d, _: d.draft([(0, 1)], 0)),
    "n_draft_8": (ValueError, "draft 8 tokens, expected 1 to 7", lambda d, _: d.draft([(0, 1)], 8)),
    "negative_seq": (ValueError, "no sequence -1, the drafter has 2", lambda d, _: d.draft([(-1, 1)], 3)),
    "high_seq": (ValueError, "no sequence 2, the drafter has 2", lambda d, _: d.draft([(0, 1), (2, 1)], 3)),
    "twice": (ValueError, "sequence 0 has two blocks", lambda d, _: d.draft([(0, 1), (0, 2)], 3)),
    "negative_anchor": (ValueError, "token -1 is outside the vocabulary of 320", lambda d, _: d.draft([(0, -1)], 3)),
    "high_anchor": (ValueError, "token 320 is outside the vocabulary of 320", lambda d, _: d.draft([(0, 320)], 3)),
    "nothing_committed": (ValueError, "sequence 1 has no committed", lambda d, _: d.draft([(0, 1), (1, 1)], 3)),
    "trace_anchor": (ValueError, "token 320 is outside", lambda d, _: d.trace(0, 320, 3)),
    "length_of_none": (ValueError, "no sequence 7, the drafter has 2", lambda d, _: d.length(7)),
    "reusable_of_none": (ValueError, "no sequence -3, the drafter has 2", lambda d, _: d.reusable(-3, 0)),
    "truncate_of_none": (ValueError, "no sequence 2, the drafter has 2", lambda d, _: d.truncate(2, 0)),
    "truncate_up": (ValueError, "holds 24 positions of sequence 0 and cannot", lambda d, _: d.truncate(0, 25)),
    "truncate_negative": (ValueError, "holds 24 positions of sequence 0 and cannot", lambda d, _: d.truncate(0, -1)),
    "commit_seq": (ValueError, "no sequence 9, the drafter has 2", lambda d, x: d.commit(9, x)),
    "commit_width": (ValueError, r"shape \[24, 64\], expected \[\*, 128\]", lambda d, x: d.commit(0, x[:, :64])),
    "commit_1d": (ValueError, r"shape \[128\], expected \[\*, 128\]", lambda d, x: d.commit(0, x[0])),
    "commit_too_many": (
        ContextLengthError,
        "append 24 positions to the 24 of sequence 0: its cache ends at 40",
        lambda d, x: d.commit(0, x),
    ),
    "commit_nothing": (ContextLengthError, "append 0 positions", lambda d, x: d.commit(0, x[:0])),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_arguments_change_nothing(tmp_path: Path, what: str) -> None:
    case = random_case(tmp_path, seed=6)
    drafter = make_drafter(case.drafter, case.inputs, n_ctx=40, n_seq=2)
    hidden, anchor = case.inputs["target_hidden"], int(case.inputs["anchor_id"])
    drafter.commit(0, hidden)
    error, message, action = REFUSED[what]
    with pytest.raises(error, match=message):
        action(drafter, hidden)
    assert (drafter.length(0), drafter.length(1)) == (24, 0)
    assert drafter.draft([(0, anchor)], 7)[0].tokens == case.expected["selected"].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_type": "q8_0"}, "q8_0 cache needs heads in multiples of 32, the drafter's have 16"),
        ({"cache_type": "q4_0"}, "cache cannot be q4_0, expected f16, f32 or q8_0"),
        ({"cache_type": "int8"}, "unknown tensor type 'int8', expected one of"),
        ({"order": "sideways"}, "unknown transition order 'sideways', expected auto, path or full"),
        ({"n_seq": 0}, "n_seq = 0"),
        ({"n_ctx": 0}, "n_ctx = 0"),
    ],
)
def test_refused_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    case = random_case(tmp_path, seed=6)
    with pytest.raises(ValueError, match=message):
        make_drafter(case.drafter, case.inputs, **options)


def test_the_last_position_of_a_full_cache_still_drafts(tmp_path: Path) -> None:
    case, _ = make_case(tmp_path, seed=6, block_size=16)
    hidden = features(case, 64, seed=0)
    drafter = make_drafter(case.drafter, case.inputs, n_ctx=64)
    drafter.commit(0, hidden)
    assert drafter.draft([(0, ANCHOR)], 15)[0].tokens == expect(case, hidden, ANCHOR)["selected"].tolist()
