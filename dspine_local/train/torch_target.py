"""A dense target in PyTorch, read from its GGUF: features several times faster than one llama.cpp decode per sequence.

Architectures ``llama`` and ``qwen3``; others go through llama.cpp (features.py). Weights are dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from dspine_local.train.weights import TargetWeights

ARCHITECTURES = ("llama", "qwen3")


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


def _head_dim(weights: TargetWeights) -> int:
    return int(weights.key("attention.key_length", weights.key("embedding_length") // weights.key("attention.head_count")))


class TorchTarget:
    """The forward pass of a target.

    Raises:
        ValueError: An architecture, or a feature of it, that is not implemented here.
    """

    def __init__(self, weights: TargetWeights, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        if not is_supported(weights):
            raise ValueError(f"'{weights.path}' (architecture '{weights.arch}') has no PyTorch forward here")
        self.n_layers = int(weights.key("block_count"))
        self.n_heads = int(weights.key("attention.head_count"))
        self.n_heads_kv = int(weights.key("attention.head_count_kv", self.n_heads))
        self.head_dim = _head_dim(weights)
        self.eps = float(weights.key("attention.layer_norm_rms_epsilon"))
        # llama's GGUF rotates neighbours (2i, 2i + 1), qwen3's the halves of a head.
        self._neighbours = weights.arch == "llama"
        self.device, self.dtype = torch.device(device), dtype

        def load(name: str) -> Tensor:
            return torch.from_numpy(np.array(weights.tensor(name))).to(device, dtype)

        theta = float(weights.key("rope.freq_base", 10000.0))
        inv_freq = theta ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        if weights.has("rope_freqs.weight"):
            inv_freq = inv_freq / torch.from_numpy(weights.tensor("rope_freqs.weight")).double()
        self._inv_freq = inv_freq.to(device)
        self.embedding = load("token_embd.weight")
        self.output_norm = load("output_norm.weight")
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
    def read(self, tokens: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tapped layer outputs [B, n, T * D] and hidden states behind the output norm [B, n, D].

        Args:
            tokens: Token ids [B, n]; shorter sequences are padded on the right with anything.
            taps: Layer outputs, numbered from 0.
        """
        n = tokens.shape[1]
        angle = torch.arange(n, device=self.device, dtype=torch.float64)[:, None] * self._inv_freq
        cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        x = self.embedding[tokens]
        kept = {}
        for il, layer in enumerate(self.layers):
            x = x + self._attend(layer, self._norm(x, layer.attn_norm), cos, sin)
            gate, up = (self._norm(x, layer.ffn_norm) @ layer.gate_up.T).chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ layer.down.T
            if il in taps:
                kept[il] = x
        return torch.cat([kept[tap] for tap in taps], dim=-1), self._norm(x, self.output_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), self.eps).to(x.dtype)

    def _attend(self, layer: _Layer, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n_batch, n = h.shape[:2]

        def heads(matrix: Tensor, n_heads: int) -> Tensor:
            return (h @ matrix.T).view(n_batch, n, n_heads, self.head_dim)

        q, k, v = heads(layer.q, self.n_heads), heads(layer.k, self.n_heads_kv), heads(layer.v, self.n_heads_kv)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        groups = self.n_heads // self.n_heads_kv
        q, k, v = (
            part.transpose(1, 2).repeat_interleave(times, dim=1)
            for part, times in ((self._rotate(q, cos, sin), 1), (self._rotate(k, cos, sin), groups), (v, groups))
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(self.head_dim))
        return out.transpose(1, 2).reshape(n_batch, n, -1) @ layer.o.T

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[:, None], sin[:, None]
        if self._neighbours:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
