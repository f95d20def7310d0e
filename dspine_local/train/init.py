"""Where a drafter starts: layers, norms and codes taken from the target."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from dspine_local.train.codes import token_codes
from dspine_local.train.model import Drafter, RMSNorm
from dspine_local.train.weights import TargetWeights

INIT_STD = 0.02


def start_layers(n_layers: int, n_target_layers: int) -> list[int]:
    """Target layers that the drafter's layers start from: the first, the last, and evenly between."""
    last = n_target_layers - 1
    return [round(i * last / max(1, n_layers - 1)) for i in range(n_layers)]


@torch.no_grad()
def initialize(drafter: Drafter, target: TargetWeights, seed: int, *, from_target: bool = True) -> None:
    """Set every weight.

    Args:
        from_target: Start the layers from the target's where they have the same shapes, else at random.
    """
    shape = drafter.shape
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(0.0, INIT_STD, generator=generator)
        elif not name.endswith("bias"):
            parameter.fill_(1.0)
    for layer in drafter.each_layer():
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
            matrix.weight.mul_((2 * shape.n_layers) ** -0.5)
    # Every tap starts with the same say.
    width = shape.hidden_size
    drafter.fc.weight.add_(torch.eye(width).repeat(1, len(shape.taps)) * len(shape.taps) ** -0.5)
    drafter.norm.weight.copy_(_tensor(target, "output_norm.weight"))
    if from_target:
        for il, source in enumerate(start_layers(shape.n_layers, shape.n_target_layers)):
            _copy_layer(drafter, il, target, source)
    if shape.injection:
        codes, directions = token_codes(target.head, shape.rank)
        drafter.transfer_codes.copy_(torch.from_numpy(codes))
        for name, parameter in drafter.injection.named_parameters():
            if name.startswith("readouts."):
                parameter.copy_(torch.from_numpy(directions.T.copy()))
            elif name.startswith("writes."):
                parameter.zero_()
        drafter.injection.predecessor_gate.weight.zero_()


def _tensor(target: TargetWeights, name: str) -> Tensor:
    return torch.from_numpy(np.array(target.tensor(name)))


def _copy_layer(drafter: Drafter, il: int, target: TargetWeights, source: int) -> None:
    layer, blk = drafter.each_layer()[il], f"blk.{source}."
    shape = drafter.shape
    pairs: dict[str, RMSNorm | nn.Linear] = {
        "attn_norm": layer.input_layernorm,
        "attn_q": layer.self_attn.q_proj,
        "attn_k": layer.self_attn.k_proj,
        "attn_v": layer.self_attn.v_proj,
        "attn_output": layer.self_attn.o_proj,
        "attn_q_norm": layer.self_attn.q_norm,
        "attn_k_norm": layer.self_attn.k_norm,
        "ffn_norm": layer.post_attention_layernorm,
        "ffn_gate": layer.mlp.gate_proj,
        "ffn_up": layer.mlp.up_proj,
        "ffn_down": layer.mlp.down_proj,
    }
    for name, module in pairs.items():
        full = f"{blk}{name}.weight"
        if not target.has(full):
            continue
        value = _tensor(target, full)
        if value.shape != module.weight.shape:
            continue
        if name in ("attn_q", "attn_k") and target.arch == "llama":
            value = halves_from_neighbours(value, shape.head_dim)
        module.weight.copy_(value)


def halves_from_neighbours(matrix: Tensor, head_dim: int) -> Tensor:
    """Rows of a rotary projection from pairs (2i, 2i + 1) to pairs (i, i + head_dim / 2)."""
    heads = matrix.view(-1, head_dim // 2, 2, matrix.shape[1])
    return heads.transpose(1, 2).reshape(matrix.shape)
