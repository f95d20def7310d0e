"""Drafters and targets that do not belong together are refused before anything runs, naming both sides."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from conftest import DrafterFactory, TargetFactory
from engine_rig import PROMPT, ask, open_target, scripted
from tiny_models import UNTAPPED, TinyTarget

from dspine_local._native import CallbackDrafter, Drafter, Engine, ModelFormatError, PairingError, Target
from dspine_local.convert import convert_checkpoint

pytestmark = pytest.mark.native


def nothing(_seq: int, _tokens: list[int], _n: int) -> list[int]:
    return []


@pytest.fixture(scope="module")
def llama(tiny_target: TargetFactory) -> TinyTarget:
    return tiny_target("llama", "q8_0")


@pytest.fixture(scope="module")
def drafter(llama: TinyTarget, tiny_drafter: DrafterFactory, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter that remembers the llama target that it was made for."""
    gguf = tmp_path_factory.mktemp("pairing") / "drafter.gguf"
    convert_checkpoint(tiny_drafter(llama), gguf, outtype="f32", target=llama.path)
    return str(gguf)


def test_its_own_target(llama: TinyTarget, drafter: str) -> None:
    target = open_target(llama)
    engine = Engine(target, Drafter(drafter, target.tensors(), n_ctx=512), n_draft=7)
    assert len(ask(engine, target.tokenize(PROMPT), max_tokens=5).tokens) == 5


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("llama", {"n_embd": 96}, "target with width 64, this target has 96"),
        ("llama", {"n_vocab": 400}, "target with vocabulary size 384, this target has 400"),
        ("llama", {"n_layer": 6}, "target with layer count 4, this target has 6"),
        ("qwen3", {}, "target of architecture 'llama', this target is 'qwen3'"),
        ("qwen35", {"n_layer": 4}, "target of architecture 'llama', this target is 'qwen35'"),
    ],
)
def test_another_target(
    tiny_target: TargetFactory, drafter: str, arch: str, options: dict[str, Any], message: str
) -> None:
    target = open_target(tiny_target(arch, "q8_0", **options))
    with pytest.raises(PairingError, match=message) as refused:
        Drafter(drafter, target.tensors(), n_ctx=512)
    assert drafter in str(refused.value)
    assert len(ask(Engine(target), [1, 2, 3], max_tokens=3).tokens) == 3


@pytest.mark.parametrize("layer", [-1, 4, 1000])
def test_a_layer_that_cannot_be_tapped(llama: TinyTarget, layer: int) -> None:
    target = open_target(llama)
    message = f"taps the input of layer {layer}, but the target's layers are 0 to 3"
    with pytest.raises(PairingError, match=message):
        target.enable_taps([0, layer])
    with pytest.raises(PairingError, match=message):
        Engine(target, CallbackDrafter(nothing, taps=[layer]), n_draft=3)
    assert len(ask(Engine(target, scripted(nothing)), [1, 2, 3], max_tokens=3).tokens) == 3


def test_taps_are_the_inputs_of_layers(llama: TinyTarget) -> None:
    """docs/method.md: layer 0's input is the token embedding."""
    target = open_target(llama)
    target.enable_taps([0, 2])
    tokens = target.tokenize(PROMPT)
    target.decode(0, tokens)
    embed, _ = llama.matrices()
    assert target.taps(0, len(tokens)) == pytest.approx(embed[tokens], abs=1e-6)
    assert target.taps(1, len(tokens)).shape == (len(tokens), llama.n_embd)


def test_the_last_layers_output_is_refused_by_the_converter(
    llama: TinyTarget, tiny_drafter: DrafterFactory, tmp_path: Path
) -> None:
    """HF id n_layer - 1 would be the input of a layer that does not exist, where llama.cpp aborts."""
    checkpoint = tiny_drafter(llama, target_layer_ids=[0, 3])
    with pytest.raises((ModelFormatError, PairingError, ValueError), match="3"):
        convert_checkpoint(checkpoint, tmp_path / "x.gguf", target=llama.path)


def test_an_architecture_that_cannot_be_tapped(tiny_target: TargetFactory, tiny_drafter: DrafterFactory) -> None:
    """It still serves without a drafter."""
    tiny = tiny_target(UNTAPPED, "q8_0")
    target = open_target(tiny)
    assert target.arch == UNTAPPED
    message = f"architecture '{UNTAPPED}' cannot be tapped by this version of llama.cpp; those that can: llama, qwen3"
    with pytest.raises(PairingError, match=message):
        target.enable_taps([1])
    gguf = tiny_drafter(tiny).parent / "untapped.gguf"
    convert_checkpoint(tiny_drafter(tiny), gguf, outtype="f32")
    with pytest.raises(PairingError, match=message):
        Engine(target, Drafter(str(gguf), target.tensors(), n_ctx=512), n_draft=7)
    assert len(ask(Engine(target), target.tokenize(PROMPT), max_tokens=5).tokens) == 5


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_drafts_longer_than_the_rollback(tiny_target: TargetFactory, arch: str) -> None:
    target = open_target(tiny_target(arch, "q8_0"), n_rollback=3)
    with pytest.raises(ValueError, match=r"n_draft = 4, expected 0 to 3 \(the drafter gives up to 15, .* made for 3"):
        Engine(target, scripted(nothing), n_draft=4)
    with pytest.raises(ValueError, match=r"n_draft = 6, expected 0 to 2 \(the drafter gives up to 2"):
        Engine(target, scripted(nothing, max_draft=2), n_draft=6)
    with pytest.raises(ValueError, match="n_draft = -1"):
        Engine(target, scripted(nothing), n_draft=-1)
    engine = Engine(target, scripted(lambda _s, _t, n: [1] * n), n_draft=3)
    assert len(ask(engine, target.tokenize(PROMPT), max_tokens=9).tokens) == 9


def test_a_drafter_of_fewer_sequences(llama: TinyTarget, drafter: str) -> None:
    target = open_target(llama, n_seq=2)
    with pytest.raises(ValueError, match="keeps 1 sequences of 256 positions, the target 2 of"):
        Engine(target, Drafter(drafter, target.tensors(), n_ctx=256), n_draft=7)


def test_a_drafter_of_fewer_positions(llama: TinyTarget, drafter: str) -> None:
    target = open_target(llama, n_ctx=256)
    with pytest.raises(ValueError, match=r"64.*256"):
        Engine(target, Drafter(drafter, target.tensors(), n_ctx=64), n_draft=7)


def test_a_drafter_is_not_a_target_nor_the_reverse(llama: TinyTarget, drafter: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="is a drafter, expected a target model"):
        Target(drafter)
    target = open_target(llama)
    with pytest.raises(ModelFormatError, match="architecture 'llama', expected a drafter of architecture 'dspine'"):
        Drafter(str(llama.path), target.tensors())
    for make in (Target, lambda path: Drafter(path, target.tensors())):
        with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
            make(str(tmp_path / "absent.gguf"))


def test_a_drafter_outlives_its_targets_last_reference(llama: TinyTarget, drafter: str) -> None:
    """The matrices that it borrows stay."""
    target = open_target(llama)
    target.enable_taps([1])
    alive = Drafter(drafter, target.tensors(), n_ctx=64)
    other = Drafter(drafter, target.tensors(), n_ctx=64)
    target.decode(0, [1, 2, 3])
    rows = target.taps(0, 3).repeat(alive.n_taps, axis=1)
    other.commit(0, rows)
    expected = other.draft([(0, 5)], 7)[0].tokens
    del target, other
    gc.collect()
    assert open_target(llama).length(0) == 0  # takes the freed memory, if it was freed
    alive.commit(0, rows)
    assert alive.draft([(0, 5)], 7)[0].tokens == expected


def test_features_that_no_decode_has_kept(llama: TinyTarget) -> None:
    target = open_target(llama)
    target.enable_taps([1, 2])
    with pytest.raises(ValueError, match="the last decode kept 0 taps"):
        target.taps(0, 0)
    with pytest.raises(ValueError, match="the last decode kept 0 taps"):
        target.taps(0, 3)
    target.decode(0, [5, 6, 7])
    assert target.taps(1, 3).shape == (3, llama.n_embd)
    with pytest.raises(ValueError, match="4 rows wanted, the last decode had 3"):
        target.taps(0, 4)
    with pytest.raises(ValueError, match="no features of tap 2: the last decode kept 2 taps"):
        target.taps(2, 3)
    target.enable_taps([1, 3])
    with pytest.raises(ValueError, match="the last decode kept 0 taps"):
        target.taps(0, 3)
