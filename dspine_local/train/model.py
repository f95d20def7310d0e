"""The drafter as a PyTorch module: many blocks of several sequences in one pass. Source: docs/method.md.

Dimensions in comments: B sequences, N context positions, A anchors of each sequence, S block slots, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from dspine_local.train.shape import DrafterShape

EPS = 1e-12


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as ``x``."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def linear(n_in: int, n_out: int) -> nn.Linear:
    """A matrix without a bias."""
    return nn.Linear(n_in, n_out, bias=False)


class Rope(nn.Module):
    """Rotates the pairs (i, i + head_dim / 2) of every head."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self.register_buffer("inv_freq", (theta**-exponent).float(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` [B, n, heads, head_dim], positions [B, n]."""
        angle = (positions[..., None].double() * self.inv_freq.double())[:, :, None]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Qwen3 attention of block slots over the context and their own block."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        d, h = shape.hidden_size, shape.head_dim
        self.shape = shape
        self.q_proj = linear(d, shape.n_heads * h)
        self.k_proj = linear(d, shape.n_heads_kv * h)
        self.v_proj = linear(d, shape.n_heads_kv * h)
        self.o_proj = linear(shape.n_heads * h, d)
        self.q_norm = RMSNorm(h, shape.rms_eps)
        self.k_norm = RMSNorm(h, shape.rms_eps)

    def keys_values(self, x: Tensor, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys and values [B, n, KV heads, head_dim] of ``x`` [B, n, D]."""
        parts = (*x.shape[:2], self.shape.n_heads_kv, self.shape.head_dim)
        k = rope(self.k_norm(self.k_proj(x).view(parts)), positions)
        return k, self.v_proj(x).view(parts)

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], mask: Tensor, rope: Rope) -> Tensor:
        """``x`` [B, n, D]; mask [B, 1, n, N + n] is true where a slot sees."""
        n_batch, n = x.shape[:2]
        groups = self.shape.n_heads // self.shape.n_heads_kv
        q = self.q_proj(x).view(n_batch, n, self.shape.n_heads, self.shape.head_dim)
        q = rope(self.q_norm(q), positions).transpose(1, 2)
        own = self.keys_values(x, positions, rope)
        k, v = (
            torch.cat([c, o], dim=1).transpose(1, 2).repeat_interleave(groups, dim=1)
            for c, o in zip(context, own, strict=True)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1 / math.sqrt(self.shape.head_dim))
        out_proj: Tensor = self.o_proj(out.transpose(1, 2).reshape(n_batch, n, -1))
        return out_proj


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.ffn_size)
        self.up_proj = linear(shape.hidden_size, shape.ffn_size)
        self.down_proj = linear(shape.ffn_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as ``x``."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm Qwen3 layer; names are the checkpoint's."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], mask: Tensor, rope: Rope) -> Tensor:
        """Same shape as ``x``."""
        h = x + self.self_attn(self.input_layernorm(x), positions, context, mask, rope)
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class Injection(nn.Module):
    """Adjacent causal injection: every slot is told what its predecessor is about to be."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        d, r, m = shape.hidden_size, shape.rank, shape.message_size
        self.readouts = nn.ModuleList(linear(d, r) for _ in range(shape.n_layers))
        self.writes = nn.ModuleList(linear(m, d) for _ in range(shape.n_layers))
        self.message = linear(r, m)
        self.receiver_gate = linear(r, m)
        self.predecessor_gate = linear(r, m)
        self.bias = nn.Parameter(torch.zeros(m))

    def read(self, il: int, y: Tensor) -> Tensor:
        """f = sqrt(r) * normalize(R y), float32."""
        f: Tensor = self.readouts[il](y).float()
        length = torch.linalg.vector_norm(f, dim=-1, keepdim=True)
        scaled: Tensor = math.sqrt(f.shape[-1]) * f / length.clamp_min(EPS)
        return scaled

    def write(self, il: int, y: Tensor, receiver: Tensor, predecessor: Tensor) -> Tensor:
        """``y`` with the predecessor's gated message, scaled by the size of ``y``."""
        receiver, predecessor = receiver.to(y.dtype), predecessor.to(y.dtype)
        gate = torch.sigmoid(self.receiver_gate(receiver) + self.predecessor_gate(predecessor) + self.bias)
        scale = torch.linalg.vector_norm(y.float(), dim=-1, keepdim=True) / math.sqrt(y.shape[-1])
        out: Tensor = y + scale.to(y.dtype) * self.writes[il](gate * self.message(predecessor))
        return out


@dataclass
class BlockOutput:
    """What a pass gives; [B, A, S, D] unless said otherwise. ``hidden`` is behind the final norm.

    ``readouts``: f of slots 1 .. S-1 before each write, per layer [B, A, S-1, r]; empty without injection.
    """

    hidden: Tensor
    pre: list[Tensor]
    post: list[Tensor]
    readouts: list[Tensor]


class Drafter(nn.Module):
    """Module names and shapes are those of the exported checkpoint, token codes included."""

    transfer_codes: Tensor

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        d = shape.hidden_size
        self.fc = linear(len(shape.taps) * d, d)
        self.hidden_norm = RMSNorm(d, shape.rms_eps)
        self.norm = RMSNorm(d, shape.rms_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layers))
        self.rope = Rope(shape.head_dim, shape.rope_theta)
        if shape.injection:
            self.injection = Injection(shape)
            self.register_buffer("transfer_codes", torch.zeros(shape.vocab_size, shape.rank))

    def each_layer(self) -> list[Layer]:
        """The layers, with their type."""
        return [cast(Layer, layer) for layer in self.layers]

    def code(self, tokens: Tensor) -> Tensor:
        """sqrt(r) times the tokens' codes."""
        return math.sqrt(self.shape.rank) * self.transfer_codes[tokens]

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer for committed features [B, N, T * D]."""
        c = self.hidden_norm(self.fc(features))
        return [layer.self_attn.keys_values(c, positions, self.rope) for layer in self.each_layer()]

    def forward(
        self,
        context: list[tuple[Tensor, Tensor]],
        anchors: Tensor,
        anchor_embedding: Tensor,
        mask_embedding: Tensor,
        anchor_codes: Tensor | None = None,
        n_slots: int | None = None,
        known_codes: Tensor | None = None,
        replaced: Tensor | None = None,
        n_replaced_layers: int = 0,
    ) -> BlockOutput:
        """Blocks behind contexts whose position i is i.

        Args:
            context: Of ``context``.
            anchors: Anchor positions [B, A].
            anchor_embedding: The target's embedding of the anchors [B, A, D].
            mask_embedding: The target's embedding of the mask token [D].
            anchor_codes: sqrt(r) * code of the anchors [B, A, r]; with injection.
            n_slots: Slots per block; fewer than the block size only for causal drafters.
            known_codes: sqrt(r) * code of the true tokens of slots 1 .. S-1 [B, A, S-1, r].
            replaced: Blocks [B, A] whose predecessors are those codes in the first ``n_replaced_layers`` layers.
        """
        n_batch, n_anchors = anchors.shape
        n_slots = n_slots or self.shape.block_size
        positions = (anchors[..., None] + torch.arange(n_slots, device=anchors.device)).flatten(1)
        x = mask_embedding.expand(n_batch, n_anchors, n_slots - 1, -1)
        x = torch.cat([anchor_embedding[:, :, None], x], dim=2).flatten(1, 2)
        n_context = context[0][0].shape[1]
        masks = {
            window: visible(anchors, n_slots, n_context, causal=self.shape.causal, window=window)
            for window in {self.shape.window(il) for il in range(self.shape.n_layers)}
        }
        out = BlockOutput(hidden=x, pre=[], post=[], readouts=[])
        for il, layer in enumerate(self.each_layer()):
            y = layer(x, positions, context[il], masks[self.shape.window(il)], self.rope)
            y = y.view(n_batch, n_anchors, n_slots, -1)
            out.pre.append(y)
            if self.shape.injection:
                assert anchor_codes is not None
                f = self.injection.read(il, y[:, :, 1:])
                known = f[:, :, :-1]
                if replaced is not None and known_codes is not None and il < n_replaced_layers:
                    known = torch.where(replaced[..., None, None], known_codes[:, :, :-1], known)
                predecessor = torch.cat([anchor_codes[:, :, None].to(f.dtype), known], dim=2)
                y = torch.cat([y[:, :, :1], self.injection.write(il, y[:, :, 1:], f, predecessor)], dim=2)
                out.readouts.append(f)
            out.post.append(y)
            x = y.flatten(1, 2)
        out.hidden = self.norm(out.post[-1])
        return out

    def refine(self, y: Tensor, readout: Tensor, codes: Tensor) -> Tensor:
        """u(t): the last layer's pre-write outputs with an exact predecessor, behind the final norm.

        Args:
            y: Pre-write outputs [..., D].
            readout: Their f [..., r].
            codes: sqrt(r) * code of the predecessors [..., r].
        """
        u: Tensor = self.norm(self.injection.write(self.shape.n_layers - 1, y, readout, codes))
        return u


def visible(anchors: Tensor, n_slots: int, n_context: int, *, causal: bool, window: int | None) -> Tensor:
    """Which keys a slot sees, [B, 1, A * S, N + A * S]: the context before its anchor, and its own block."""
    n_batch, n_anchors = anchors.shape
    device = anchors.device
    slot = torch.arange(n_slots, device=device)
    positions = anchors[..., None] + slot  # [B, A, S]
    index = torch.arange(n_context, device=device)
    seen = (index < anchors[..., None, None]).expand(-1, -1, n_slots, -1)
    own = slot[:, None] >= slot if causal else torch.ones(n_slots, n_slots, dtype=torch.bool, device=device)
    if window is not None:
        seen = seen & (positions[..., None] - index < window)
        own = own & (slot[:, None] - slot < window)
    same = torch.eye(n_anchors, dtype=torch.bool, device=device)[:, None, :, None] & own[None, :, None, :]
    same = same.reshape(n_anchors * n_slots, n_anchors * n_slots).expand(n_batch, -1, -1)
    return torch.cat([seen.flatten(1, 2), same], dim=-1)[:, None]
