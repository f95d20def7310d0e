"""The numpy reference against the golden cases, and its own laws: what the native drafter's tests then rely on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_drafters import MIN_MARGIN, RandomCase, random_case, random_checkpoint, smallest_margin
from reference import ReferenceDrafter, read_tensors, rope_frequencies

FLOATS = ("pre_injection", "post_injection", "layer_features", "final_hidden", "logits", "scores")
SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "full_block": {"block_size": 16, "top_k": 16, "n_layers": 3},
    "window_smaller_than_block": {"sliding_window": 5, "block_size": 12, "n_context": 40},
    "mixed_windows": {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"], "dtype": "BF16"},
    "no_context": {"n_context": 0},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "sharded": {"n_shards": 3, "dtype": "F16"},
    "dflash": {"architecture": "DFlashDraftModel"},
}


def run(case: RandomCase, **changes: Any) -> dict[str, Any]:
    """Draft a random case again, with some arguments changed."""
    return draft(ReferenceDrafter.load(case.drafter), case.inputs, **changes)


def draft(drafter: ReferenceDrafter, inputs: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    names = ("target_embed", "target_head", "target_hidden", "anchor_id", "anchor_pos")
    arguments: dict[str, Any] = {name: inputs[name] for name in names} | changes
    return drafter.draft(**arguments)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_golden(golden_case: Path, dtype: type) -> None:
    case = np.load(golden_case / "case.npz")
    drafter = ReferenceDrafter.load(golden_case / "drafter", dtype)
    out = draft(drafter, case)
    for name in FLOATS:
        assert out[name].dtype == dtype
        assert np.linalg.norm(out[name] - case[name]) <= 1e-5 * np.linalg.norm(case[name]), name
    np.testing.assert_array_equal(out["candidates"], case["candidates"])
    np.testing.assert_array_equal(out["selected"], case["selected"])
    assert np.all((out["path_probabilities"] > 0) & (out["path_probabilities"] <= 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_random_case_has_no_near_ties(tmp_path: Path, shape: str) -> None:
    case = random_case(tmp_path, seed=3, **SHAPES[shape])
    assert smallest_margin(case.expected) > 0.9 * MIN_MARGIN
    stored = np.load(tmp_path / "case.npz")
    assert set(stored) == set(case.inputs) | set(case.expected)
    np.testing.assert_array_equal(stored["selected"], run(case)["selected"])


def test_injection_matters(tmp_path: Path) -> None:
    case = random_case(tmp_path)
    pre, post = case.expected["pre_injection"], case.expected["post_injection"]
    np.testing.assert_array_equal(pre[:, 0], post[:, 0])
    assert np.linalg.norm((post - pre)[:, 1:]) > 0.2 * np.linalg.norm(pre[:, 1:])


@pytest.mark.parametrize("n_draft", [1, 2, 6])
def test_a_cut_block_gives_the_first_proposals(tmp_path: Path, n_draft: int) -> None:
    case = random_case(tmp_path)
    cut = run(case, n_draft=n_draft)
    np.testing.assert_array_equal(cut["selected"], case.expected["selected"][:n_draft])
    np.testing.assert_allclose(cut["scores"], case.expected["scores"][:n_draft], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_draft", [0, 8])
def test_n_draft_out_of_range(tmp_path: Path, n_draft: int) -> None:
    with pytest.raises(ValueError, match=r"n_draft must be 1\.\.7"):
        run(random_case(tmp_path), n_draft=n_draft)


def test_dflash_selects_the_argmax_and_sees_the_whole_block(tmp_path: Path) -> None:
    case = random_case(tmp_path / "bidirectional", architecture="DFlashDraftModel")
    np.testing.assert_array_equal(case.expected["selected"], case.expected["logits"].argmax(axis=-1))
    assert case.expected["candidates"].shape == (7, 1)
    np.testing.assert_array_equal(run(case, n_draft=3)["selected"], case.expected["selected"][:3])
    random_checkpoint(tmp_path / "causal", architecture="DFlashDraftModel", is_causal=True)
    causal = ReferenceDrafter.load(tmp_path / "causal")
    assert causal.config.causal
    assert not np.allclose(draft(causal, case.inputs)["logits"][0], case.expected["logits"][0])


def test_only_the_window_is_seen(tmp_path: Path) -> None:
    window = 9
    case = random_case(tmp_path, sliding_window=window, n_context=40)
    hidden = case.inputs["target_hidden"]
    kept = run(case, target_hidden=hidden[-(window - 1) :])
    np.testing.assert_allclose(kept["logits"], case.expected["logits"], rtol=1e-5, atol=1e-5)
    fewer = run(case, target_hidden=hidden[-(window - 2) :])
    assert not np.allclose(fewer["logits"], case.expected["logits"], atol=1e-3)


def test_bfloat16_is_read_by_its_bits(tmp_path: Path) -> None:
    exact = read_tensors(random_checkpoint(tmp_path / "f32"))
    rounded = read_tensors(random_checkpoint(tmp_path / "bf16", dtype="BF16"))
    assert exact.keys() == rounded.keys()
    for name in exact.keys() - {"transfer_ready"}:
        np.testing.assert_allclose(rounded[name], exact[name], rtol=2.0**-8)
        assert not np.any(rounded[name].view(np.uint32) & 0xFFFF)


def test_unready_codes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="transfer_ready"):
        ReferenceDrafter.load(random_checkpoint(tmp_path, transfer_ready=False))


def test_rope_types() -> None:
    config: dict[str, Any] = {"head_dim": 64, "rope_theta": 1e4, "max_position_embeddings": 2048}
    plain, scale = rope_frequencies(config)
    assert (plain[0], scale) == (1.0, 1.0)
    linear, _ = rope_frequencies(config | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    np.testing.assert_allclose(linear, plain / 2)
    yarn, scale = rope_frequencies(config | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    # Fast pairs keep their frequency, slow ones are interpolated: bounds 8 and 21 for these numbers.
    np.testing.assert_allclose(yarn[:9], plain[:9])
    np.testing.assert_allclose(yarn[21:], plain[21:] / 4)
    np.testing.assert_allclose(yarn[10], plain[10] * (11 / 13 + 2 / 13 / 4))
    assert scale == pytest.approx(1.1386294)
    with pytest.raises(ValueError, match="dynamic"):
        rope_frequencies(config | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
