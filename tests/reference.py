"""The DSpine and DFlash drafters in plain numpy: what the native drafter is checked against.

Written from the method's equations alone, one block at a time, float64 by default. It reads checkpoint folders
as users download them; nothing here is shared with the converter or the engine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.utility import SafetensorsLocal

Array = npt.NDArray[Any]

RAW_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's hyperparameters. ``windows`` holds one sliding window per layer, None where attention is full."""

    injection: bool
    causal: bool
    hidden_size: int
    n_layers: int
    n_head: int
    n_head_kv: int
    head_dim: int
    rms_eps: float
    block_size: int
    top_k: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    inv_freq: Array
    rope_scale: float

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> DrafterConfig:
        """Read ``config.json``, which the reference layout nests under "config"."""
        config = config.get("config", config)
        (architecture,) = config["architectures"]
        if architecture not in ("DSpineDraftModel", "DFlashDraftModel"):
            raise ValueError(f"architecture {architecture!r} is neither DSpineDraftModel nor DFlashDraftModel")
        injection = architecture == "DSpineDraftModel"
        dflash, dspine = config["dflash_config"], config.get("dspine_config", {})
        n_layers = config["num_hidden_layers"]
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        layer_types = config.get("layer_types") or ["full_attention"] * n_layers
        inv_freq, rope_scale = rope_frequencies(config)
        causal = config.get("is_causal")
        return cls(
            injection=injection,
            causal=dflash.get("causal", injection) if causal is None else causal,
            hidden_size=config["hidden_size"],
            n_layers=n_layers,
            n_head=config["num_attention_heads"],
            n_head_kv=config["num_key_value_heads"],
            head_dim=head_dim_of(config),
            rms_eps=config["rms_norm_eps"],
            block_size=config.get("block_size", dflash.get("block_size", 16)),
            top_k=dspine.get("top_k", 16) if injection else 1,
            mask_token_id=dflash["mask_token_id"],
            target_layer_ids=tuple(dflash["target_layer_ids"]),
            windows=tuple(window if kind == "sliding_attention" else None for kind in layer_types),
            inv_freq=inv_freq,
            rope_scale=rope_scale,
        )


def head_dim_of(config: dict[str, Any]) -> int:
    """The width of one attention head, which need not be hidden size / heads."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_frequencies(config: dict[str, Any]) -> tuple[Array, float]:
    """Inverse frequencies [head_dim / 2] and the factor on cos and sin, as Hugging Face defines each rope type.

    Raises:
        ValueError: A rope type other than default, linear or yarn, or a partly rotated head.
    """
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    dim = head_dim_of(config)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported")
    inv_freq = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if kind == "default":
        return inv_freq, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return inv_freq / factor, 1.0
    if kind != "yarn":
        raise ValueError(f"rope type {kind!r} is not one of default, linear, yarn")

    n_ctx_orig = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]

    def correction_dim(n_rotations: float) -> float:
        return float(dim * math.log(n_ctx_orig / (n_rotations * 2 * math.pi)) / (2 * math.log(theta)))

    low, high = correction_dim(rope.get("beta_fast") or 32), correction_dim(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = magnitude(1.0)
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            attention_factor = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return inv_freq / factor * interpolated + inv_freq * (1 - interpolated), float(attention_factor)


def read_tensors(folder: Path) -> dict[str, Array]:
    """Every tensor of a folder's ``*.safetensors`` files, bfloat16 widened to float32 by its bits."""
    tensors: dict[str, Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in SafetensorsLocal(file).tensors.items():
            values = np.frombuffer(tensor.mmap_bytes().tobytes(), dtype=RAW_DTYPES[tensor.dtype])
            if tensor.dtype == "BF16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            tensors[name] = values.reshape(tensor.shape)
    return tensors


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    """The logistic function, written so that no exponential overflows."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class ReferenceDrafter:
    """One drafter checkpoint. ``w`` maps the checkpoint's tensor names to arrays, "codes" to the token codes."""

    def __init__(self, config: DrafterConfig, weights: dict[str, Array]) -> None:
        self.config = config
        self.w = weights

    @classmethod
    def load(cls, checkpoint_dir: Path | str, dtype: npt.DTypeLike = np.float64) -> ReferenceDrafter:
        """Read a checkpoint folder of layout 1 (export), 2 (reference) or 3 (DFlash).

        Raises:
            ValueError: Unknown architecture or rope, or codes that were never made (``transfer_ready`` false).
        """
        folder = Path(checkpoint_dir)
        config = DrafterConfig.from_json(json.loads((folder / "config.json").read_text()))
        tensors = read_tensors(folder)
        if not bool(tensors.pop("transfer_ready", np.array(True))):
            raise ValueError("transfer_ready is false: the checkpoint's token codes were never computed")
        weights = {name: value.astype(dtype) for name, value in tensors.items()}
        if "transfer_codes" in weights:
            weights["codes"] = weights.pop("transfer_codes")
        return cls(config, weights)

    def context_kv(self, target_hidden: Array, first_pos: int = 0) -> tuple[Array, Array]:
        """Cached keys (after rope) and values of committed positions.

        Args:
            target_hidden: Tapped target features [n, n_taps * D] of positions first_pos .. first_pos + n - 1.
        Returns:
            Keys and values, each [L, n, n_head_kv, head_dim].
        Source: docs/method.md.
        """
        c = self.config
        features = rms_norm(target_hidden @ self.w["fc.weight"].T, self.w["hidden_norm.weight"], c.rms_eps)
        positions = first_pos + np.arange(len(features))
        kv = [self._keys_values(il, features, positions) for il in range(c.n_layers)]
        return np.stack([k for k, _ in kv]), np.stack([v for _, v in kv])

    def draft(
        self,
        target_embed: Array,
        target_head: Array,
        target_hidden: Array,
        anchor_id: int,
        anchor_pos: int,
        n_draft: int | None = None,
    ) -> dict[str, Array]:
        """Draft one block and return every intermediate that the golden cases hold.

        Args:
            target_embed: Token embedding [V, D].
            target_head: Output matrix [V, D].
            target_hidden: Tapped features [n, n_taps * D] of the n positions just before the anchor.
            anchor_id: The last emitted token.
            anchor_pos: Its position.
            n_draft: Proposals wanted, 1 .. block_size - 1; the whole block when None.
        Returns:
            pre_injection, post_injection, layer_features (DSpine only), final_hidden, logits, candidates, scores,
            selected, and path_probabilities [n_draft]: q_j of each selected token (DFlash: over the vocabulary).
        Source: docs/method.md.
        """
        c, dtype = self.config, self.w["fc.weight"].dtype
        embed, head = target_embed.astype(dtype), target_head.astype(dtype)
        n_draft = c.block_size - 1 if n_draft is None else n_draft
        if not 1 <= n_draft < c.block_size:
            raise ValueError(f"n_draft must be 1..{c.block_size - 1}, got {n_draft}")
        # Only a causal block may be cut short: a bidirectional one lets early slots see the later ones.
        n_block = n_draft + 1 if c.causal else c.block_size

        n_ctx = len(target_hidden)
        context = self.context_kv(target_hidden.astype(dtype), anchor_pos - n_ctx)
        x = embed[[anchor_id] + [c.mask_token_id] * (n_block - 1)]
        pre, post, features = [], [], []
        for il in range(c.n_layers):
            y = self._layer(il, x, context[0][il], context[1][il], anchor_pos)
            pre.append(y)
            x = self._inject(il, y, anchor_id) if c.injection else y
            post.append(x)
            if c.injection:
                features.append(self._readout(il, x))

        final = rms_norm(x, self.w["norm.weight"], c.rms_eps)
        logits = final[1 : n_draft + 1] @ head.T
        candidates = np.argsort(-logits, axis=-1, kind="stable")[:, : c.top_k].astype(np.int32)
        out = {
            "pre_injection": np.stack(pre),
            "post_injection": np.stack(post),
            "final_hidden": final,
            "logits": logits,
            "candidates": candidates,
        }
        if not c.injection:
            out["scores"] = np.take_along_axis(logits, candidates, axis=-1)[:, :, None]
            out["selected"] = candidates[:, 0]
            out["path_probabilities"] = softmax(logits).max(axis=-1)
            return out
        out["layer_features"] = np.stack(features)
        out["scores"] = self._transitions(pre[-1][1 : n_draft + 1], candidates, head, anchor_id)
        out["selected"], out["path_probabilities"] = self._walk(candidates, out["scores"])
        return out

    def _keys_values(self, il: int, x: Array, positions: Array) -> tuple[Array, Array]:
        attn, shape = f"layers.{il}.self_attn.", (len(x), self.config.n_head_kv, self.config.head_dim)
        k = (x @ self.w[attn + "k_proj.weight"].T).reshape(shape)
        k = self._rope(rms_norm(k, self.w[attn + "k_norm.weight"], self.config.rms_eps), positions)
        return k, (x @ self.w[attn + "v_proj.weight"].T).reshape(shape)

    def _rope(self, x: Array, positions: Array) -> Array:
        """Rotate the pairs (i, i + head_dim / 2) of every head; x is [n, heads, head_dim]."""
        angle = positions[:, None, None] * self.config.inv_freq
        cos, sin = np.cos(angle) * self.config.rope_scale, np.sin(angle) * self.config.rope_scale
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

    def _layer(self, il: int, x: Array, context_k: Array, context_v: Array, anchor_pos: int) -> Array:
        """One Qwen3 layer over the block; the context's keys and values come before the block's own."""
        c, layer = self.config, f"layers.{il}."
        n_block, n_ctx = len(x), len(context_k)
        positions = anchor_pos + np.arange(n_block)
        h = rms_norm(x, self.w[layer + "input_layernorm.weight"], c.rms_eps)
        q = (h @ self.w[layer + "self_attn.q_proj.weight"].T).reshape(n_block, c.n_head, c.head_dim)
        q = self._rope(rms_norm(q, self.w[layer + "self_attn.q_norm.weight"], c.rms_eps), positions)
        k, v = self._keys_values(il, h, positions)
        groups = c.n_head // c.n_head_kv
        k = np.concatenate([context_k, k]).repeat(groups, axis=1)
        v = np.concatenate([context_v, v]).repeat(groups, axis=1)

        distance = positions[:, None] - np.arange(anchor_pos - n_ctx, anchor_pos + n_block)
        visible = distance >= 0 if c.causal else np.ones_like(distance, dtype=bool)
        if (window := c.windows[il]) is not None:
            visible &= distance < window
        kq = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(c.head_dim)
        attended = np.einsum("hqk,khd->qhd", softmax(np.where(visible, kq, -np.inf)), v).reshape(n_block, -1)
        h = x + attended @ self.w[layer + "self_attn.o_proj.weight"].T

        f = rms_norm(h, self.w[layer + "post_attention_layernorm.weight"], c.rms_eps)
        gate = f @ self.w[layer + "mlp.gate_proj.weight"].T
        up = f @ self.w[layer + "mlp.up_proj.weight"].T
        return h + (gate * sigmoid(gate) * up) @ self.w[layer + "mlp.down_proj.weight"].T

    def _readout(self, il: int, y: Array) -> Array:
        f = y @ self.w[f"injection.readouts.{il}.weight"].T
        return math.sqrt(f.shape[-1]) * f / np.maximum(np.linalg.norm(f, axis=-1, keepdims=True), 1e-12)

    def _write(self, il: int, y: Array, receiver: Array, predecessor: Array) -> Array:
        """The slots' outputs y [..., D] after the gated message of their predecessors [..., r]."""
        gate = sigmoid(
            receiver @ self.w["injection.receiver_gate.weight"].T
            + predecessor @ self.w["injection.predecessor_gate.weight"].T
            + self.w["injection.bias"]
        )
        message = gate * (predecessor @ self.w["injection.message.weight"].T)
        scale = np.linalg.norm(y, axis=-1, keepdims=True) / math.sqrt(y.shape[-1])
        return y + scale * (message @ self.w[f"injection.writes.{il}.weight"].T)

    def _code(self, token: int | Array) -> Array:
        codes = self.w["codes"]
        return math.sqrt(codes.shape[-1]) * codes[token]

    def _inject(self, il: int, y: Array, anchor_id: int) -> Array:
        """All slots at once: each reads what its predecessor held before any write. docs/method.md."""
        f = self._readout(il, y[1:])
        predecessors = np.concatenate([self._code(anchor_id)[None], f[:-1]])
        return np.concatenate([y[:1], self._write(il, y[1:], f, predecessors)])

    def _transitions(self, y: Array, candidates: Array, head: Array, anchor_id: int) -> Array:
        """s_j(t, c) [n_draft, K, K] from the last layer's output before its write. docs/method.md."""
        il = self.config.n_layers - 1
        tokens = np.concatenate([np.full_like(candidates[:1], anchor_id), candidates[:-1]])
        written = self._write(il, y[:, None], self._readout(il, y)[:, None], self._code(tokens))
        u = rms_norm(written, self.w["norm.weight"], self.config.rms_eps)
        return np.einsum("jtd,jcd->jtc", u, head[candidates])

    @staticmethod
    def _walk(candidates: Array, scores: Array) -> tuple[Array, Array]:
        """The greedy path through the transitions, and the drafter's probability of each of its steps."""
        selected, probabilities, previous = [], [], 0
        for tokens, transitions in zip(candidates, scores, strict=True):
            row = transitions[previous]
            previous = int(row.argmax())
            selected.append(tokens[previous])
            probabilities.append(softmax(row)[previous])
        return np.array(selected, dtype=np.int32), np.array(probabilities)
