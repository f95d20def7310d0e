"""Compares the native drafter with recorded outputs of another implementation: a case folder.

A case is ``drafter/`` (a checkpoint as a user would download it) and ``case.npz``, whose arrays docs/parity.md lists.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from dspine_local import _native
from dspine_local.convert import convert_checkpoint
from dspine_local.errors import ModelFormatError
from dspine_local.files import checked_path, need_regular

FLOAT_ARRAYS = ("pre_injection", "post_injection", "layer_features", "final_hidden", "logits", "scores")
INPUT_ARRAYS = ("target_embed", "target_head", "target_hidden", "anchor_id", "anchor_pos")
CPU = "CPU"
MAX_ERROR = 1e-4
MAX_DEVICE_ERROR = 1e-3  # beside the CPU: devices multiply with other roundings


@dataclass(frozen=True)
class ArrayParity:
    """Relative error ||a - b|| / ||b|| of one array against the recorded one."""

    name: str
    shape: tuple[int, ...]
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.error <= self.limit


@dataclass(frozen=True)
class CaseParity:
    """One case: every recorded array, and the token choices that must be identical.

    ``candidates`` and ``selected`` tell whether they are, None when the case does not record them. ``path_selected``
    is the draft of the other evaluation order, which walks the chosen path only.
    """

    case: str
    arrays: tuple[ArrayParity, ...]
    candidates: bool | None
    selected: bool | None
    path_selected: bool | None

    @property
    def passed(self) -> bool:
        """Whether every recorded array agrees."""
        return all(a.passed for a in self.arrays) and False not in (self.candidates, self.selected, self.path_selected)


def run_case(folder: str | PathLike[str], *, outtype: str = "f32", device: str = CPU) -> CaseParity:
    """Convert the case's drafter, load it, draft its block, and compare.

    Args:
        folder: With ``drafter/`` and ``case.npz``.
        outtype: Type of the converted weights; f32 unless the cost of a quantization is to be seen.
        device: Name of the drafter's device.
    Raises:
        FileNotFoundError: No such folder or file.
        ModelFormatError: The checkpoint or the case is not what it should be.
        BackendError: The device lacks an operation or room.
        ValueError: No such device.
    """
    folder = checked_path(folder)
    case = _read_case(folder / "case.npz")
    with tempfile.TemporaryDirectory(prefix="dspine-parity-") as scratch:
        gguf = Path(scratch) / "drafter.gguf"
        convert_checkpoint(folder / "drafter", gguf, outtype=outtype)
        found, path_tokens = _draft(gguf, case, device)
    limit = MAX_ERROR if device == CPU else MAX_DEVICE_ERROR
    arrays = []
    for name in FLOAT_ARRAYS:
        if name in case and name in found:
            a, b = np.asarray(found[name], dtype=np.float64), np.asarray(case[name], dtype=np.float64)
            if a.shape != b.shape:
                raise ModelFormatError(
                    f"'{folder}' has {name} of shape {list(b.shape)}, the drafter gives {list(a.shape)}"
                )
            arrays.append(ArrayParity(name, b.shape, float(np.linalg.norm(a - b) / np.linalg.norm(b)), limit))
    if not arrays:
        raise ModelFormatError(f"'{folder}' has no array to compare, expected some of {', '.join(FLOAT_ARRAYS)}")

    def identical(name: str, tokens: Any) -> bool | None:
        return bool(np.array_equal(np.asarray(tokens), case[name])) if name in case else None

    return CaseParity(
        case=folder.name,
        arrays=tuple(arrays),
        candidates=identical("candidates", found["candidates"]),
        selected=identical("selected", found["selected"]),
        path_selected=identical("selected", path_tokens),
    )


def _read_case(path: Path) -> dict[str, Any]:
    need_regular(path, "the case's arrays")
    try:
        with np.load(path, allow_pickle=False) as file:
            case = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, KeyError) as error:
        raise ModelFormatError(f"'{path}' is not a readable .npz file: {error}") from error
    missing = [name for name in INPUT_ARRAYS if name not in case]
    if missing:
        raise ModelFormatError(f"'{path}' has no array {', '.join(missing)}, expected {', '.join(INPUT_ARRAYS)}")
    return case


def _draft(gguf: Path, case: dict[str, Any], device: str) -> tuple[dict[str, Any], list[int]]:
    """All arrays of the block by the full order, and the draft of the path order where the device has it."""
    embed = np.ascontiguousarray(case["target_embed"], dtype=np.float32)
    head = np.ascontiguousarray(case["target_head"], dtype=np.float32)
    hidden = np.ascontiguousarray(case["target_hidden"], dtype=np.float32)
    target = _native.TargetTensors.from_arrays(embed, head)
    position = int(case["anchor_pos"])
    if position != len(hidden):
        raise ModelFormatError(
            f"the case has its anchor at position {position}, expected {len(hidden)}: behind its {len(hidden)} features"
        )
    order = "path" if device == CPU else "full"
    drafter = _native.Drafter(str(gguf), target, n_ctx=position + 1, cache_type="f32", order=order, device=device)
    drafter.commit(0, hidden)
    anchor = int(case["anchor_id"])
    n_draft = len(case["selected"]) if "selected" in case else drafter.max_draft
    path_tokens = drafter.draft([(0, anchor)], n_draft)[0].tokens
    return drafter.trace(0, anchor, n_draft), path_tokens
