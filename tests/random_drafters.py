"""Random drafter checkpoints and cases of any shape, written as a user would download them.

Weights are scaled so that every part matters: a write moves a slot's output by about half its length, and the
gates are neither open nor shut. Fixtures and parity tests call this; nothing is trained here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from reference import ReferenceDrafter

Array = npt.NDArray[Any]

MIN_MARGIN = 1e-4


@dataclass(frozen=True)
class RandomCase:
    """A case folder's inputs and the reference's outputs, as in the golden cases."""

    path: Path
    inputs: dict[str, Array]
    expected: dict[str, Array]

    @property
    def drafter(self) -> Path:
        return self.path / "drafter"


def random_checkpoint(
    path: Path | str,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    n_layers: int = 2,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 16,
    ffn: int = 128,
    n_taps: int = 2,
    block_size: int = 8,
    rank: int = 32,
    message: int = 16,
    top_k: int = 8,
    vocab: int = 320,
    sliding_window: int | None = None,
    layer_types: Sequence[str] | None = None,
    architecture: str = "DSpineDraftModel",
    rope_theta: float = 1e6,
    rope_scaling: dict[str, Any] | None = None,
    max_position_embeddings: int = 4096,
    num_target_layers: int = 8,
    target_layer_ids: Sequence[int] | None = None,
    mask_token_id: int | None = None,
    is_causal: bool | None = None,
    dtype: str = "F32",
    n_shards: int = 1,
    transfer_ready: bool = True,
    config_changes: dict[str, Any] | None = None,
) -> Path:
    """Write a random checkpoint: layout 1 for DSpineDraftModel, layout 3 for DFlashDraftModel.

    Args:
        path: The folder to make; ``config.json`` and ``model.safetensors`` (or its shards) go there.
        sliding_window: Window of the layers that slide, all of them unless ``layer_types`` says which.
        rope_scaling: E.g. ``{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}``.
        target_layer_ids: Tapped target layers (HF ids); spread below the target's last layer when None.
        mask_token_id: The last token of the vocabulary when None.
        is_causal: Causal inside the block; when None true for DSpine, and unsaid for DFlash.
        dtype: Stored type of every weight: F32, F16 or BF16.
        config_changes: Top-level config entries to add or replace, for tests of unknown or wrong keys.
    Returns:
        The folder.
    """
    rng = np.random.default_rng(seed)
    injection = architecture == "DSpineDraftModel"
    taps = spread_taps(n_taps, num_target_layers) if target_layer_ids is None else list(target_layer_ids)
    if layer_types is None:
        layer_types = ["full_attention" if sliding_window is None else "sliding_attention"] * n_layers
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen3",
        "hidden_size": hidden_size,
        "intermediate_size": ffn,
        "num_attention_heads": n_head,
        "num_key_value_heads": n_head_kv,
        "head_dim": head_dim,
        "num_hidden_layers": n_layers,
        "num_target_layers": num_target_layers,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "block_size": block_size,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default", **(rope_scaling or {})},
        "rope_theta": rope_theta,
        "max_position_embeddings": max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": sliding_window is not None,
        "sliding_window": sliding_window,
        "layer_types": list(layer_types),
        "dflash_config": {
            "block_size": block_size,
            "mask_token_id": vocab - 1 if mask_token_id is None else mask_token_id,
            "target_layer_ids": taps,
        },
        "hidden_act": "silu",
    }
    if injection:
        config["dspine_config"] = {"transfer_rank": rank, "message_size": message, "top_k": top_k}
    if injection or is_causal is not None:
        config["is_causal"] = True if is_causal is None else is_causal
    config |= config_changes or {}

    def matrix(n_rows: int, n_cols: int, gain: float = 1.0) -> Array:
        return gain / math.sqrt(n_cols) * rng.standard_normal((n_rows, n_cols), dtype=np.float32)

    def norm(n: int) -> Array:
        return 1.0 + 0.2 * rng.standard_normal(n, dtype=np.float32)

    tensors: dict[str, Array] = {
        "fc.weight": matrix(hidden_size, len(taps) * hidden_size),
        "hidden_norm.weight": norm(hidden_size),
        "norm.weight": norm(hidden_size),
    }
    for il in range(n_layers):
        tensors |= {
            f"layers.{il}.input_layernorm.weight": norm(hidden_size),
            f"layers.{il}.post_attention_layernorm.weight": norm(hidden_size),
            # Doubled, so that attention is peaked and a wrong key or position shows.
            f"layers.{il}.self_attn.q_norm.weight": 2 * norm(head_dim),
            f"layers.{il}.self_attn.k_norm.weight": norm(head_dim),
            f"layers.{il}.self_attn.q_proj.weight": matrix(n_head * head_dim, hidden_size),
            f"layers.{il}.self_attn.k_proj.weight": matrix(n_head_kv * head_dim, hidden_size),
            f"layers.{il}.self_attn.v_proj.weight": matrix(n_head_kv * head_dim, hidden_size),
            f"layers.{il}.self_attn.o_proj.weight": matrix(hidden_size, n_head * head_dim),
            f"layers.{il}.mlp.gate_proj.weight": matrix(ffn, hidden_size),
            f"layers.{il}.mlp.up_proj.weight": matrix(ffn, hidden_size),
            f"layers.{il}.mlp.down_proj.weight": matrix(hidden_size, ffn),
        }
    if injection:
        codes = rng.standard_normal((vocab, rank), dtype=np.float32)
        tensors |= {
            "injection.message.weight": matrix(message, rank),
            "injection.receiver_gate.weight": matrix(message, rank),
            "injection.predecessor_gate.weight": matrix(message, rank),
            "injection.bias": 0.5 * rng.standard_normal(message, dtype=np.float32),
            "transfer_codes": codes / np.linalg.norm(codes, axis=-1, keepdims=True),
        }
        for il in range(n_layers):
            tensors[f"injection.readouts.{il}.weight"] = matrix(rank, hidden_size)
            tensors[f"injection.writes.{il}.weight"] = matrix(hidden_size, message)

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    stored = {name: encode(value, dtype) for name, value in tensors.items()}
    if injection:
        stored["transfer_ready"] = encode(np.array(transfer_ready), "BOOL")
    write_shards(folder, stored, n_shards)
    return folder


def spread_taps(n_taps: int, num_target_layers: int) -> list[int]:
    """HF ids of ``n_taps`` layers, evenly from the first one on; never the last, which llama.cpp cannot tap."""
    if n_taps >= num_target_layers:
        raise ValueError(f"{n_taps} taps need a target of at least {n_taps + 1} layers, got {num_target_layers}")
    return [i * (num_target_layers - 1) // n_taps for i in range(n_taps)]


def encode(values: Array, dtype: str) -> tuple[str, Array]:
    """One tensor as safetensors stores it; bfloat16 by round-to-nearest-even on the bits."""
    if dtype == "BF16":
        bits = values.astype(np.float32).view(np.uint32)
        return dtype, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return dtype, values.astype({"F32": np.float32, "F16": np.float16, "BOOL": np.bool_}[dtype])


def write_shards(folder: Path, stored: dict[str, tuple[str, Array]], n_shards: int) -> None:
    """``model.safetensors``, or that many shards with the index file that lists them."""
    if n_shards == 1:
        write_safetensors(folder / "model.safetensors", stored)
        return
    weight_map: dict[str, str] = {}
    for i in range(n_shards):
        file = f"model-{i + 1:05}-of-{n_shards:05}.safetensors"
        shard = {name: stored[name] for name in sorted(stored)[i::n_shards]}
        write_safetensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(a.nbytes for _, a in stored.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_safetensors(file: Path, tensors: dict[str, tuple[str, Array]]) -> None:
    """A safetensors file, by hand: its numpy API knows no bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, values) in tensors.items():
        start, end = end, end + values.nbytes
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    file.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(a.tobytes() for _, a in tensors.values()))


def random_case(
    path: Path | str,
    *,
    seed: int = 0,
    n_context: int = 24,
    n_draft: int | None = None,
    min_margin: float = MIN_MARGIN,
    max_tries: int = 500,
    **checkpoint: Any,
) -> RandomCase:
    """Write a case folder in the golden format, ``drafter/`` and ``case.npz``, without near ties.

    Args:
        n_context: Committed positions; the anchor's position.
        n_draft: Proposals in the expected outputs; the whole block when None.
        min_margin: Least gap between neighbouring candidates (the K+1st too) and between each transition row's best
            two scores, relative to the row's largest magnitude. Inputs are drawn again until it holds.
        checkpoint: Arguments of random_checkpoint.
    Raises:
        RuntimeError: No draw met the margin.
    """
    folder = Path(path)
    drafter = ReferenceDrafter.load(random_checkpoint(folder / "drafter", seed=seed, **checkpoint))
    n_vocab, width = checkpoint.get("vocab", 320), drafter.w["fc.weight"].shape
    rng = np.random.default_rng(seed + 1)

    def normal(*shape: int, gain: float = 1.0) -> Array:
        return gain * rng.standard_normal(shape, dtype=np.float32)

    for _ in range(max_tries):
        inputs: dict[str, Array] = {
            "target_embed": normal(n_vocab, width[0]),
            "target_head": normal(n_vocab, width[0], gain=2 / math.sqrt(width[0])),
            "target_hidden": normal(n_context, width[1]),
            "anchor_id": np.array(rng.integers(n_vocab), dtype=np.int32),
            "anchor_pos": np.array(n_context, dtype=np.int32),
        }
        expected = drafter.draft(
            inputs["target_embed"],
            inputs["target_head"],
            inputs["target_hidden"],
            int(inputs["anchor_id"]),
            n_context,
            n_draft,
        )
        if smallest_margin(expected) > min_margin:
            expected = {name: a if a.dtype == np.int32 else a.astype(np.float32) for name, a in expected.items()}
            arrays: dict[str, Any] = inputs | expected
            np.savez(folder / "case.npz", **arrays)
            return RandomCase(folder, inputs, expected)
    raise RuntimeError(f"no draw of {max_tries} had margins above {min_margin}: use a larger vocabulary or a smaller K")


def smallest_margin(outputs: dict[str, Array]) -> float:
    """The closest call of a draft: between candidate ranks 1 .. K + 1, or a transition row's best two scores."""

    def gaps(rows: Array, n_best: int) -> float:
        best = -np.sort(-rows, axis=-1)[..., :n_best]
        scale = np.abs(rows).max(axis=-1, keepdims=True)
        return float((-np.diff(best, axis=-1) / scale).min(initial=np.inf))

    n_candidates = outputs["candidates"].shape[-1]
    return min(gaps(outputs["logits"], n_candidates + 1), gaps(outputs["scores"], 2))
