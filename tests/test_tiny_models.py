"""The tiny targets load in llama.cpp, tokenize text losslessly and write varied greedy text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DrafterFactory, TargetFactory
from reference import ReferenceDrafter
from tiny_models import ARCHITECTURES, write_tiny_target

from dspine_local import Engine, SamplingOptions, _native

GREEDY = SamplingOptions(temperature=0)
TEXT = "Hello, the world! 你好 😀🎉 ünd 3.14\n"


def open_engine(path: Path) -> Engine:
    return Engine(path, n_ctx=256, n_threads=1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qtype", ["f32", "q8_0"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_text_wanders(tiny_target: TargetFactory, arch: str, qtype: str, tied: bool) -> None:
    tiny = tiny_target(arch, qtype, tied=tied)
    target = _native.Target(str(tiny.path), n_ctx=256, n_threads=1)
    tokens = target.tokenize(TEXT)
    assert b"".join(map(target.piece, tokens)).decode() == TEXT
    logits = target.decode(0, tokens)[0]
    written, margins = [], []
    for _ in range(64):
        second, first = np.sort(logits)[-2:]
        margins.append(first - second)
        written.append(int(logits.argmax()))
        logits = target.decode(0, [written[-1]])[0]
    assert len(set(written)) > 15
    assert np.mean(np.array(margins) > 1e-2) > 0.9
    assert max(written) < tiny.token_id("<|endoftext|>")


def test_special_tokens(tiny_target: TargetFactory) -> None:
    tiny = tiny_target("qwen3")
    engine = open_engine(tiny.path)
    assert engine.target.eos_token == tiny.eos_id
    tokens = engine.target.tokenize("<|im_start|>user\nhi<|im_end|><|mask|>", parse_special=True)
    assert tokens[0] == tiny.token_id("<|im_start|>")
    assert tokens[-2:] == [tiny.eos_id, tiny.mask_id]
    assert engine.chat([{"role": "user", "content": "hi"}], max_tokens=8, sampling=GREEDY).read()


def test_the_end_token_can_be_made_likely(tmp_path: Path) -> None:
    tiny = write_tiny_target(tmp_path / "ends.gguf", "llama", special_gain=2.0)
    answer = open_engine(tiny.path).generate("Hello", max_tokens=200, sampling=GREEDY)
    answer.read()
    assert answer.finish_reason == "stop"


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    files = [write_tiny_target(tmp_path / name, "qwen35", qtype="q8_0").path for name in ("a.gguf", "b.gguf")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "gemma"}, "arch must be one of"),
        ({"arch": "llama", "qtype": "q4_0"}, "qtype"),
        ({"arch": "llama", "n_embd": 48}, "multiples of 32"),
        ({"arch": "llama", "n_vocab": 256}, "at least 261"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_tiny_target(tmp_path / "x.gguf", **arguments)


def test_drafter_fits_the_target(tiny_target: TargetFactory, tiny_drafter: DrafterFactory) -> None:
    target = tiny_target("qwen35", "q8_0")
    folder = tiny_drafter(target, n_layers=1)
    assert folder == tiny_drafter(target, n_layers=1)
    assert folder != tiny_drafter(target, n_layers=2)
    drafter = ReferenceDrafter.load(folder)
    embed, head = target.matrices()
    hidden = np.random.default_rng(0).standard_normal((4, 2 * target.n_embd))
    out = drafter.draft(embed, head, hidden, target.eos_id, 4)
    assert out["selected"].shape == (15,)
    assert max(drafter.config.target_layer_ids) + 1 < target.n_layer
