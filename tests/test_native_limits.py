"""Numbers that no machine has, given to the native classes: refused by name, before anything is allocated for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TargetFactory

from dspine_local import _native
from dspine_local.convert import convert_checkpoint

pytestmark = pytest.mark.native

CASE = Path(__file__).parent / "data" / "golden" / "gqa_small"
HUGE = 2**31 - 1


@pytest.fixture(scope="module")
def target(tiny_target: TargetFactory) -> _native.Target:
    return _native.Target(str(tiny_target("llama", "q8_0").path), n_ctx=64, n_threads=1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[(option, HUGE) for option in ("n_ctx", "n_seq", "n_batch", "n_ubatch", "n_rollback")],
        *[(option, value) for option in ("n_threads", "n_threads_batch") for value in (-1, 513, HUGE)],
    ],
)
def test_a_target(option: str, value: int, tiny_target: TargetFactory) -> None:
    with pytest.raises(ValueError, match=rf"{option} = {value}, expected \d+ to \d+"):
        _native.Target(str(tiny_target("llama", "q8_0").path), **{option: value})


@pytest.mark.parametrize("option", ["n_seq", "n_ctx", "n_threads"])
def test_a_drafter(option: str, tmp_path: Path) -> None:
    case = np.load(CASE / "case.npz")
    shared = _native.TargetTensors.from_arrays(case["target_embed"], case["target_head"])
    convert_checkpoint(CASE / "drafter", tmp_path / "drafter.gguf")
    with pytest.raises(ValueError, match=rf"{option} = {HUGE}, expected \d+ to \d+"):
        _native.Drafter(str(tmp_path / "drafter.gguf"), shared, **{option: HUGE})


@pytest.mark.parametrize("n_threads", [-1, 10**6])
def test_a_quantizer(n_threads: int) -> None:
    with pytest.raises(ValueError, match=rf"n_threads = {n_threads}, expected 0 to 512"):
        _native.quantize(np.zeros((4, 32), np.float32), "q8_0", n_threads=n_threads)


CALLS: dict[str, Callable[[Any, int], Any]] = {
    "length": lambda target, seq: target.length(seq),
    "reusable": lambda target, seq: target.reusable(seq, 1),
    "truncate": lambda target, seq: target.truncate(seq, 0),
    "decode": lambda target, seq: target.decode(seq, [1, 2, 3]),
}


@pytest.mark.parametrize("seq", [-1, 1, 99, HUGE])
@pytest.mark.parametrize("call", CALLS)
def test_a_sequence_that_is_not_there(call: str, seq: int, target: _native.Target) -> None:
    with pytest.raises(ValueError, match=f"no sequence {seq}, the target has 1"):
        CALLS[call](target, seq)


@pytest.mark.parametrize("n_outputs", [-1, 4, HUGE])
def test_more_outputs_than_rows(n_outputs: int, target: _native.Target) -> None:
    with pytest.raises(ValueError, match=rf"n_outputs = {n_outputs}, expected 0 to 3"):
        target.decode(0, [1, 2, 3], n_outputs=n_outputs)
    assert target.length(0) == 0
