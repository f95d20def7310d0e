"""Native drafters made from checkpoints, and their comparison with the numpy reference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from random_drafters import RandomCase, random_case
from reference import ReferenceDrafter

from dspine_local._native import Drafter, TargetTensors
from dspine_local.convert import convert_checkpoint

Array = npt.NDArray[Any]

FLOATS = ("pre_injection", "post_injection", "layer_features", "final_hidden", "logits", "scores")
TOLERANCE = 1e-5  # of a float32 drafter with a float32 cache; about 1e-6 is seen


def make_drafter(checkpoint: Path, inputs: Mapping[str, Any], *, outtype: str = "f32", **options: Any) -> Drafter:
    """Convert a checkpoint beside itself and load it on the case's embedding and output matrix; float32 cache."""
    gguf = checkpoint.parent / f"{checkpoint.name}-{outtype}.gguf"
    if not gguf.exists():
        convert_checkpoint(checkpoint, gguf, outtype=outtype)
    tensors = TargetTensors.from_arrays(inputs["target_embed"], inputs["target_head"])
    exact: dict[str, Any] = {"cache_type": "f32", "n_ctx": 512, "n_threads": 1}
    return Drafter(str(gguf), tensors, **(exact | options))


def make_case(folder: Path, **options: Any) -> tuple[RandomCase, Drafter]:
    """A random case and its native drafter, with the whole context committed to sequence 0."""
    case = random_case(folder, **options)
    drafter = make_drafter(case.drafter, case.inputs)
    if len(case.inputs["target_hidden"]):
        drafter.commit(0, case.inputs["target_hidden"])
    return case, drafter


def expect(case: RandomCase, hidden: Array, anchor: int, n_draft: int | None = None) -> dict[str, Array]:
    """What the reference drafts behind other features of the same case."""
    reference = ReferenceDrafter.load(case.drafter)
    embed, head = case.inputs["target_embed"], case.inputs["target_head"]
    return reference.draft(embed, head, hidden, anchor, len(hidden), n_draft)


def relative_error(found: Any, expected: Any) -> float:
    difference = np.asarray(found, dtype=np.float64) - np.asarray(expected, dtype=np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(np.asarray(expected, dtype=np.float64)))


def assert_trace(trace: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = TOLERANCE) -> None:
    """Every array that both hold agrees: floats to the tolerance, tokens exactly."""
    np.testing.assert_array_equal(trace["candidates"], expected["candidates"])
    np.testing.assert_array_equal(trace["selected"], expected["selected"])
    for name in FLOATS:
        if name in expected and len(trace.get(name, ())):
            found = np.stack(trace[name]) if isinstance(trace[name], list) else trace[name]
            assert found.shape == expected[name].shape, name
            assert relative_error(found, expected[name]) <= tolerance, name


def features(case: RandomCase, n: int, seed: int) -> Array:
    """Other random features [n, n_taps * D] that fit the case."""
    width = case.inputs["target_hidden"].shape[1]
    return np.random.default_rng(seed).standard_normal((n, width), dtype=np.float32)
