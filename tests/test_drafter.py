"""The native drafter against the golden cases and the numpy reference, shape by shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafter_rig import TOLERANCE, assert_trace, expect, features, make_case, make_drafter, relative_error
from random_drafters import random_case
from reference import read_tensors

pytestmark = pytest.mark.native

ORDERS = ("path", "full")
SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "no_gqa": {"n_head": 4, "n_head_kv": 4},
    "one_kv_head": {"n_head": 6, "n_head_kv": 1, "head_dim": 16},
    "one_head": {"n_head": 1, "n_head_kv": 1, "head_dim": 64},
    "wide_heads": {"hidden_size": 48, "n_head": 4, "n_head_kv": 2, "head_dim": 32},
    "narrow_heads": {"hidden_size": 96, "n_head": 2, "n_head_kv": 1, "head_dim": 16},
    "odd_width": {"hidden_size": 40, "ffn": 56, "rank": 24, "message": 12, "head_dim": 8},
    "one_layer": {"n_layers": 1},
    "one_tap": {"n_taps": 1},
    "five_taps": {"n_taps": 5, "n_layers": 3},
    "rank_below_message": {"rank": 8, "message": 32},
    "one_candidate": {"top_k": 1},
    "block_of_2": {"block_size": 2},
    "block_of_16": {"block_size": 16, "top_k": 16},
    "odd_vocabulary": {"vocab": 257},
    "few_tokens": {"vocab": 33, "top_k": 4, "block_size": 4},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "yarn_scaled": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 0.9,
            "beta_fast": 16,
            "beta_slow": 2,
        }
    },
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "low_theta": {"rope_theta": 1000.0},
    "one_position": {"n_context": 1},
    "long_context": {"n_context": 300},
    "window": {"sliding_window": 9, "n_context": 40},
    "window_on_one_layer": {
        "sliding_window": 9,
        "n_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "n_context": 40,
    },
    "window_below_block": {"sliding_window": 5, "block_size": 12, "n_context": 40},
    "window_of_one": {"sliding_window": 1, "n_context": 20},
    "window_above_context": {"sliding_window": 200, "n_context": 40},
    "bf16": {"dtype": "BF16"},
    "f16": {"dtype": "F16"},
    "shards": {"n_shards": 3},
}
DFLASH: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "bidirectional_window": {"sliding_window": 9, "n_context": 40},
    "bidirectional_window_below_block": {"sliding_window": 5, "block_size": 12, "n_context": 40},
    "causal_window": {"sliding_window": 9, "n_context": 40, "is_causal": True},
    "block_of_16": {"block_size": 16, "n_layers": 3},
    "block_of_2": {"block_size": 2},
}


@pytest.mark.parametrize("order", ORDERS)
def test_golden(golden_case: Path, tmp_path_factory: pytest.TempPathFactory, order: str) -> None:
    case = dict(np.load(golden_case / "case.npz"))
    checkpoint = tmp_path_factory.mktemp("golden") / "drafter"
    checkpoint.symlink_to(golden_case / "drafter")
    drafter = make_drafter(checkpoint, case, order=order)
    assert drafter.order == order
    drafter.commit(0, case["target_hidden"])
    anchor, n_draft = int(case["anchor_id"]), drafter.max_draft
    assert n_draft == len(case["selected"])
    assert_trace(drafter.trace(0, anchor, n_draft), case)
    for n in range(1, n_draft + 1):
        (draft,) = drafter.draft([(0, anchor)], n)
        assert draft.tokens == case["selected"][:n].tolist()
        cut = {name: case[name][:n] for name in ("logits", "candidates", "scores", "selected")}
        assert_trace(drafter.trace(0, anchor, n), cut)


@pytest.mark.parametrize("shape", SHAPES)
def test_random_shape(tmp_path: Path, shape: str) -> None:
    case, drafter = make_case(tmp_path, seed=3, **SHAPES[shape])
    anchor, n = int(case.inputs["anchor_id"]), drafter.max_draft
    assert_trace(drafter.trace(0, anchor, n), case.expected)
    full = make_drafter(case.drafter, case.inputs, order="full")
    full.commit(0, case.inputs["target_hidden"])
    for native in (drafter, full):
        (draft,) = native.draft([(0, anchor)], n)
        assert draft.tokens == case.expected["selected"].tolist()
        np.testing.assert_allclose(draft.probabilities, case.expected["path_probabilities"], rtol=1e-4)


@pytest.mark.parametrize("shape", DFLASH)
def test_dflash(tmp_path: Path, shape: str) -> None:
    case, drafter = make_case(tmp_path, seed=5, architecture="DFlashDraftModel", **DFLASH[shape])
    assert not drafter.has_injection
    anchor = int(case.inputs["anchor_id"])
    trace = drafter.trace(0, anchor, drafter.max_draft)
    np.testing.assert_array_equal(trace["selected"], case.expected["selected"])
    for name in ("final_hidden", "logits"):
        assert relative_error(trace[name], case.expected[name]) <= TOLERANCE, name
    for n in range(1, drafter.max_draft + 1):
        (draft,) = drafter.draft([(0, anchor)], n)
        assert draft.tokens == case.expected["selected"][:n].tolist()
        assert draft.probabilities == []


@pytest.mark.parametrize("order", ORDERS)
def test_several_sequences_give_what_they_give_alone(tmp_path: Path, order: str) -> None:
    case = random_case(tmp_path, seed=1, sliding_window=20, layer_types=["full_attention", "sliding_attention"])
    drafter = make_drafter(case.drafter, case.inputs, n_seq=5, order=order)
    lengths, anchors = (3, 70, 1, 130, 24), (7, 300, 7, 0, 319)
    alone = []
    for seq, (length, anchor) in enumerate(zip(lengths, anchors, strict=True)):
        hidden = features(case, length, seed=10 + seq)
        drafter.commit(seq, hidden)
        alone.append(expect(case, hidden, anchor)["selected"].tolist())
        assert drafter.draft([(seq, anchor)], 7)[0].tokens == alone[-1]
    for chosen in ([0, 1, 2, 3, 4], [4, 2, 0], [3, 1], [1, 3], [2], [4, 3, 2, 1, 0]):
        for n in (7, 1, 4):
            drafts = drafter.draft([(seq, anchors[seq]) for seq in chosen], n)
            assert [d.tokens for d in drafts] == [alone[seq][:n] for seq in chosen]
    assert [drafter.length(seq) for seq in range(5)] == list(lengths)
    assert drafter.draft([], 3) == []


def test_probabilities_do_not_depend_on_the_company(tmp_path: Path) -> None:
    case = random_case(tmp_path, seed=2)
    drafter = make_drafter(case.drafter, case.inputs, n_seq=2)
    for seq in range(2):
        drafter.commit(seq, features(case, 10 + seq, seed=seq))
    alone = [drafter.draft([(seq, 5)], 7)[0].probabilities for seq in range(2)]
    together = [d.probabilities for d in drafter.draft([(0, 5), (1, 5)], 7)]
    np.testing.assert_allclose(together, alone, rtol=1e-5)


def test_many_shapes_of_graphs_in_turn(tmp_path: Path) -> None:
    """More shapes than graphs are kept ready: none may read another's memory."""
    case = random_case(tmp_path, seed=4, block_size=16)
    drafter = make_drafter(case.drafter, case.inputs, n_seq=3)
    hidden = features(case, 200, seed=1)
    whole = {n: expect(case, hidden[:n], 9)["selected"].tolist() for n in (1, 63, 64, 65, 130, 200)}
    for start in range(3):
        for seq in range(3):
            drafter.truncate(seq, 0)
        done = [0, 0, 0]
        for n, tokens in whole.items():
            for seq in range(3):
                drafter.commit(seq, hidden[done[seq] : n])
                done[seq] = n
            for k in range(1 + start, 16, 3):
                drafts = drafter.draft([((seq + k) % 3, 9) for seq in range(1 + k % 3)], k)
                assert all(d.tokens == tokens[:k] for d in drafts)


def test_properties(tmp_path: Path) -> None:
    case, drafter = make_case(tmp_path, target_layer_ids=[1, 4])
    assert (drafter.block_size, drafter.max_draft, drafter.n_taps, drafter.n_embd) == (8, 7, 2, 64)
    assert drafter.target_layers == [2, 5]  # llama.cpp counts layer inputs
    assert drafter.has_injection
    assert drafter.device == "CPU"
    assert drafter.order == "path"
    n_values = sum(w.size for name, w in read_tensors(case.drafter).items() if name != "transfer_ready")
    assert 4 * n_values <= drafter.weight_bytes <= 4.2 * n_values
    assert drafter.cache_bytes >= 2 * 2 * (512 + 8) * 32 * 4
    assert drafter.compute_bytes > 0
