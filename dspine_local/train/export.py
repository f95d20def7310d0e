"""Writes a trained drafter as the checkpoint that others read: config.json and model.safetensors in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspine_local.train.shape import DrafterShape
from dspine_local.train.shards import write_json, write_whole


def export_checkpoint(
    folder: Path, shape: DrafterShape, weights: Mapping[str, Tensor], scales: Sequence[float]
) -> None:
    """Write layout 1 of docs/training.md; each file is replaced whole.

    Args:
        weights: The drafter's state by name.
        scales: Every tap's size, by which training divided it: folded into ``fc`` here.
    """
    tensors = {name: value.detach().float().cpu() for name, value in weights.items()}
    factor = torch.tensor(scales).reciprocal().repeat_interleave(shape.hidden_size)
    tensors["fc.weight"] = tensors["fc.weight"] * factor
    stored = {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    if shape.injection:
        stored["transfer_ready"] = torch.tensor(True)
    write_whole(
        folder / "model.safetensors", lambda partial: save_file(stored, str(partial), metadata={"format": "pt"})
    )
    write_json(folder / "config.json", shape.to_config())


def load_checkpoint(folder: Path) -> tuple[DrafterShape, dict[str, Tensor]]:
    """Shape and float32 weights of an exported checkpoint; its ``fc`` takes features as they are."""
    from safetensors.torch import load_file

    shape = DrafterShape.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    weights = load_file(str(folder / "model.safetensors"))
    weights.pop("transfer_ready", None)
    return shape, {name: value.float() for name, value in weights.items()}
