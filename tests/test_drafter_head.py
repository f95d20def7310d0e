"""The target's own quantized output matrix: however many columns it takes at once, each gets the same logits."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DrafterFactory, TargetFactory
from drafter_rig import Array

from dspine_local._native import Drafter, Target
from dspine_local.convert import convert_checkpoint

pytestmark = pytest.mark.native

N_CONTEXT = 20


@pytest.mark.parametrize("qtype", ["q8_0", "f32"])
@pytest.mark.parametrize("order", ["path", "full"])
def test_logits_of_every_block_length(
    qtype: str, order: str, tiny_target: TargetFactory, tiny_drafter: DrafterFactory
) -> None:
    tiny = tiny_target("llama", qtype)
    target = Target(str(tiny.path), n_ctx=64, n_threads=1)
    checkpoint = tiny_drafter(tiny)
    gguf = checkpoint.parent / f"{checkpoint.name}-head.gguf"
    if not gguf.exists():
        convert_checkpoint(checkpoint, gguf)
    drafter = Drafter(str(gguf), target.tensors(), n_ctx=64, n_threads=1, cache_type="f32", order=order)
    width = drafter.n_taps * drafter.n_embd
    drafter.commit(0, np.random.default_rng(5).standard_normal((N_CONTEXT, width), dtype=np.float32))

    whole = drafter.trace(0, 3, drafter.max_draft)
    logits: Array = whole["logits"]
    assert len(np.unique(logits.argmax(axis=1))) > 3, "the slots of this drafter do not differ"
    for n in range(1, drafter.max_draft + 1):
        cut = drafter.trace(0, 3, n)
        assert cut["logits"].shape == (n, tiny.n_vocab)
        np.testing.assert_allclose(cut["logits"], logits[:n], rtol=1e-5, atol=1e-5 * float(np.abs(logits).max()))
        np.testing.assert_array_equal(cut["candidates"], whole["candidates"][:n])
        assert drafter.draft([(0, 3)], n)[0].tokens == list(whole["selected"][:n])
