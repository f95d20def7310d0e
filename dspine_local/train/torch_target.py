"""A dense target in PyTorch, read from its GGUF: features several times faster than one llama.cpp decode per sequence.

Architectures ``llama`` and ``qwen3``; others go through llama.cpp (features.py). Weights are dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from dspine_local.train.weights import TargetWeights

ARCHITECTURES = ("llama", "qwen3")
FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class _Layer:
    attn_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


def is_supported(weights: TargetWeights) -> bool:
    """Whether this forward computes what llama.cpp would: a known architecture without biases, experts or scaling."""
    names = weights.names()
    extras = (".bias", "_exps.weight", "ffn_gate_inp.weight", "attn_qkv.weight")
    return (
        weights.arch in ARCHITECTURES
        and not any(name.endswith(extras) for name in names)
        and weights.key("rope.scaling.type", "none") == "none"
        and weights.key("rope.dimension_count", 0) in (0, _head_dim(weights))
    )


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it much faster than float32."""
    has_matrix_units = device.type == "cuda" or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_matrix_units else torch.float32


def _head_dim(weights: TargetWeights) -> int:
    return int(
        weights.key("attention.key_length", weights.key("embedding_length") // weights.key("attention.head_count"))
    )


@dataclass
class KvCache:
    """Keys and values per layer, [slots, KV heads, positions, head_dim]; ``slot`` is where ``read`` writes."""

    k: list[Tensor]
    v: list[Tensor]
    slot: int = 0


# (layer, queries, keys, values), each [B, heads, n, head_dim], to [B, heads, n, head_dim].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class TorchTarget:
    """The forward pass of a target.

    Args:
        dtype: Of matrices, keys and values; None is the device's fast one. What layers add up is float32.
    Raises:
        ValueError: An architecture, or a feature of it, that is not implemented here.
    """

    def __init__(self, weights: TargetWeights, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
        if not is_supported(weights):
            raise ValueError(f"'{weights.path}' (architecture '{weights.arch}') has no PyTorch forward here")
        self.n_layers = int(weights.key("block_count"))
        self.n_heads = int(weights.key("attention.head_count"))
        self.n_heads_kv = int(weights.key("attention.head_count_kv", self.n_heads))
        self.head_dim = _head_dim(weights)
        self.eps = float(weights.key("attention.layer_norm_rms_epsilon"))
        # llama's GGUF rotates neighbours (2i, 2i + 1), qwen3's the halves of a head.
        self._neighbours = weights.arch == "llama"
        self.device = torch.device(device)
        self.dtype = fast_dtype(self.device) if dtype is None else dtype

        def load(name: str) -> Tensor:
            values = torch.from_numpy(np.array(weights.tensor(name))).to(device)
            return values.to(self.dtype) if values.ndim > 1 else values

        theta = float(weights.key("rope.freq_base", 10000.0))
        inv_freq = theta ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        if weights.has("rope_freqs.weight"):
            inv_freq = inv_freq / torch.from_numpy(weights.tensor("rope_freqs.weight")).double()
        self._inv_freq = inv_freq.to(device)
        self.embedding = load("token_embd.weight")
        self.output_norm = load("output_norm.weight")
        self.head = load("output.weight") if weights.has("output.weight") else self.embedding
        self.layers = []
        for il in range(self.n_layers):
            blk = f"blk.{il}."
            has_norms = weights.has(blk + "attn_q_norm.weight")
            self.layers.append(
                _Layer(
                    load(blk + "attn_norm.weight"),
                    load(blk + "attn_q.weight"),
                    load(blk + "attn_k.weight"),
                    load(blk + "attn_v.weight"),
                    load(blk + "attn_output.weight"),
                    load(blk + "ffn_norm.weight"),
                    torch.cat([load(blk + "ffn_gate.weight"), load(blk + "ffn_up.weight")]),
                    load(blk + "ffn_down.weight"),
                    load(blk + "attn_q_norm.weight") if has_norms else None,
                    load(blk + "attn_k_norm.weight") if has_norms else None,
                )
            )

    @torch.no_grad()
    def read(self, tokens: Tensor, taps: Sequence[int], keep: KvCache | None = None) -> tuple[Tensor, Tensor]:
        """Tapped layer outputs [B, n, T * D] and hidden states behind the output norm [B, n, D].

        Args:
            tokens: Token ids [B, n]; shorter sequences are padded on the right with anything.
            taps: Layer outputs, numbered from 0.
            keep: Where keys and values of a single sequence go, for ``step`` to continue from.
        """
        n = tokens.shape[1]
        cos, sin = self._angles(torch.arange(n, device=self.device))

        def attend(il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if keep is not None:
                keep.k[il][keep.slot, :, :n], keep.v[il][keep.slot, :, :n] = k[0], v[0]
            groups = self.n_heads // self.n_heads_kv
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(self.head_dim))

        return self._forward(tokens, cos, sin, taps, attend)

    @torch.no_grad()
    def step(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int], cache: KvCache) -> tuple[Tensor, Tensor]:
        """One more token of every sequence: the same as ``read``, for [B, 1].

        Args:
            tokens: Token ids [B].
            lengths: Positions that each sequence has in the cache [B].
        """
        cos, sin = self._angles(lengths[:, None])
        n_batch, n_keys = len(tokens), int(lengths.max()) + 1
        mask = (torch.arange(n_keys, device=self.device) <= lengths[:, None])[:, None, None]
        every = torch.arange(n_batch, device=self.device)

        def attend(il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.k[il][every, :, lengths], cache.v[il][every, :, lengths] = k[:, :, 0], v[:, :, 0]
            # The heads that share keys are queries of one head: nothing is repeated.
            q = q.view(n_batch, self.n_heads_kv, -1, self.head_dim)
            out = F.scaled_dot_product_attention(
                q,
                cache.k[il][:, :, :n_keys],
                cache.v[il][:, :, :n_keys],
                attn_mask=mask.expand(-1, -1, q.shape[2], -1),
                scale=1 / math.sqrt(self.head_dim),
            )
            return out.reshape(n_batch, self.n_heads, 1, self.head_dim)

        return self._forward(tokens[:, None], cos, sin, taps, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states [..., D], float32 [..., V]."""
        return (hidden.to(self.dtype) @ self.head.T).float()

    def new_cache(self, n_slots: int, n_positions: int) -> KvCache:
        """Room for keys and values."""
        shape = (n_slots, self.n_heads_kv, n_positions, self.head_dim)
        k, v = ([torch.zeros(shape, device=self.device, dtype=self.dtype) for _ in self.layers] for _ in "kv")
        return KvCache(k, v)

    def _forward(
        self, tokens: Tensor, cos: Tensor, sin: Tensor, taps: Sequence[int], attend: Attend
    ) -> tuple[Tensor, Tensor]:
        x = self.embedding[tokens].float()
        kept = {}
        for il, layer in enumerate(self.layers):
            q, k, v = self._project(layer, self._norm(x, layer.attn_norm), cos, sin)
            x = x + attend(il, q, k, v).transpose(1, 2).flatten(2) @ layer.o.T
            gate, up = (self._norm(x, layer.ffn_norm) @ layer.gate_up.T).chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ layer.down.T
            if il in taps:
                kept[il] = x
        tapped = torch.cat([kept[tap] for tap in taps], dim=-1) if taps else x[..., :0]
        return tapped, self._norm(x, self.output_norm).float()

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[..., None].double() * self._inv_freq
        return angle.cos().to(self.dtype)[..., None, :], angle.sin().to(self.dtype)[..., None, :]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.eps).to(self.dtype)

    def _project(self, layer: _Layer, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, n, head_dim]."""

        def heads(matrix: Tensor, n_heads: int) -> Tensor:
            return (h @ matrix.T).view(*h.shape[:2], n_heads, self.head_dim)

        q, k, v = heads(layer.q, self.n_heads), heads(layer.k, self.n_heads_kv), heads(layer.v, self.n_heads_kv)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        return self._rotate(q, cos, sin).transpose(1, 2), self._rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._neighbours:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
