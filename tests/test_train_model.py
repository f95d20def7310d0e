"""The trainable drafter against the golden cases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from reference import read_tensors

torch = pytest.importorskip("torch")

from dspine_local.train.model import Drafter  # noqa: E402
from dspine_local.train.shape import DrafterShape  # noqa: E402


def load(folder: Path) -> Drafter:
    """The drafter of a golden case."""
    tensors = read_tensors(folder)
    tensors.pop("transfer_ready", None)
    if "codes" in tensors:
        tensors["transfer_codes"] = tensors.pop("codes")
    config = json.loads((folder / "config.json").read_text())
    shape = DrafterShape.from_config(config, tensors["injection.message.weight"].shape)
    drafter = Drafter(shape)
    drafter.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})
    return drafter


def test_golden_arrays(golden_case: Path) -> None:
    drafter = load(golden_case / "drafter")
    with np.load(golden_case / "case.npz") as file:
        case = {name: file[name] for name in file.files}
    head = torch.tensor(case["target_head"])
    embed = torch.tensor(case["target_embed"])
    anchor = int(case["anchor_id"])
    with torch.no_grad():
        n = len(case["target_hidden"])
        context = drafter.context(torch.tensor(case["target_hidden"])[None], torch.arange(n)[None])
        out = drafter(
            context,
            torch.tensor([[n]]),
            embed[anchor][None, None],
            embed[drafter.shape.mask_token_id],
            drafter.code(torch.tensor([[anchor]])),
        )
        logits = out.hidden[0, 0, 1:] @ head.T
        candidates = torch.tensor(case["candidates"]).long()
        tokens = torch.cat([torch.full_like(candidates[:1], anchor), candidates[:-1]])
        u = drafter.refine(
            out.pre[-1][0, 0, 1:, None].expand(-1, tokens.shape[1], -1),
            out.readouts[-1][0, 0][:, None].expand(-1, tokens.shape[1], -1),
            drafter.code(tokens),
        )
        found = {
            "pre_injection": torch.stack(out.pre)[:, 0, 0],
            "post_injection": torch.stack(out.post)[:, 0, 0],
            "layer_features": torch.stack([drafter.injection.read(il, y[0, 0]) for il, y in enumerate(out.post)]),
            "final_hidden": out.hidden[0, 0],
            "logits": logits,
            "scores": torch.einsum("jtd,jcd->jtc", u, head[candidates]),
        }
    for name, value in found.items():
        expected = case[name].astype(np.float64)
        error = np.linalg.norm(value.double().numpy() - expected) / np.linalg.norm(expected)
        assert error <= 1e-5, f"{name}: {error}"
    assert np.array_equal(logits.topk(drafter.shape.top_k).indices.numpy(), case["candidates"])
