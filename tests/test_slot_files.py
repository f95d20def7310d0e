"""Slots saved to files and restored: the next draft is the same, and nothing foreign or damaged is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import DrafterFactory, TargetFactory
from tiny_models import TinyTarget

from dspine_local import GREEDY, ContextLengthError, Engine, Generation, ModelFormatError, PairingError, _native
from dspine_local.convert import convert_checkpoint

pytestmark = pytest.mark.native

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
Pair = tuple[TinyTarget, Path]


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def pair(
    request: pytest.FixtureRequest,
    tiny_target: TargetFactory,
    tiny_drafter: DrafterFactory,
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    """A dense and a hybrid target with a drafter that has full and sliding layers."""
    target = tiny_target(request.param, "q8_0")
    drafter = tmp_path_factory.mktemp("slots") / "drafter.gguf"
    checkpoint = tiny_drafter(
        target, layer_types=["sliding_attention", "full_attention"], sliding_window=32, n_layers=2
    )
    convert_checkpoint(checkpoint, drafter, outtype="f32", target=target.path)
    return target, drafter


def open_engine(pair: Pair, **options: Any) -> Engine:
    settings: dict[str, Any] = {"n_ctx": 1024, "n_parallel": 2, "n_ubatch": 32, "flash_attn": "on", "n_threads": 1}
    settings["n_draft"] = 7
    return Engine(pair[0].path, pair[1], **(settings | options))


def run(engine: Engine, prompt: list[int], n: int = 24, **options: Any) -> Generation:
    generation = engine.generate(prompt, max_tokens=n, sampling=GREEDY, **options)
    generation.read()
    return generation


def outcome(generation: Generation) -> tuple[Any, ...]:
    stats = generation.stats
    assert stats is not None
    return generation.tokens, stats.reused_tokens, stats.drafted_per_position, stats.accepted_per_position


def test_the_next_turn_is_the_same_after_a_restart(pair: Pair, tmp_path: Path) -> None:
    first = open_engine(pair)
    turn = run(first, first.tokenizer.encode(PROMPT))
    prompt = turn.prompt_tokens + turn.tokens + first.tokenizer.encode(" And then?")
    n_saved, n_bytes = first.save_slot(0, tmp_path / "a.bin")
    assert n_saved == first.cache_lengths(0)[0] == len(turn.prompt_tokens) + len(turn.tokens) - 1
    assert n_bytes == (tmp_path / "a.bin").stat().st_size
    expected = outcome(run(first, prompt))
    assert expected[1] == n_saved
    second = open_engine(pair)
    assert second.restore_slot(1, tmp_path / "a.bin") == (n_saved, n_bytes)
    assert second.cache_lengths(1) == (n_saved, n_saved)
    assert outcome(run(second, prompt)) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_without_restoring_nothing_is_reused(pair: Pair, tmp_path: Path) -> None:
    engine = open_engine(pair)
    turn = run(engine, engine.tokenizer.encode(PROMPT))
    n_held = engine.cache_lengths(0)[0]
    engine.save_slot(0, tmp_path / "a.bin")
    assert engine.erase_slot(0) == n_held
    assert engine.cache_lengths(0) == (0, 0)
    assert outcome(run(engine, turn.prompt_tokens))[1] == 0


def test_damage_is_refused_wherever_it_is(pair: Pair, tmp_path: Path) -> None:
    engine = open_engine(pair)
    run(engine, engine.tokenizer.encode(PROMPT))
    file = tmp_path / "a.bin"
    engine.save_slot(0, file)
    good = file.read_bytes()
    for at in [0, 15, 17, 40, len(good) // 3, len(good) // 2, len(good) - 40, len(good) - 1]:
        file.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        with pytest.raises((ModelFormatError, PairingError)):
            engine.restore_slot(1, file)
    for n in [0, 10, 18, 200, len(good) // 2, len(good) - 1]:
        file.write_bytes(good[:n])
        with pytest.raises(ModelFormatError):
            engine.restore_slot(1, file)
    file.write_bytes(good + b"x")
    with pytest.raises(ModelFormatError):
        engine.restore_slot(1, file)
    assert engine.cache_lengths(1) == (0, 0)
    file.write_bytes(good)
    engine.restore_slot(1, file)


def test_a_state_that_does_not_fit_leaves_the_slot_empty(pair: Pair) -> None:
    """What the file's checksum cannot see: the native side reads hostile states itself."""
    target = _native.Target(str(pair[0].path), n_ctx=512, n_rollback=7, n_threads=1)
    drafter = _native.Drafter(str(pair[1]), target.tensors(), n_ctx=512, n_threads=1)
    engine = _native.Engine(target, drafter)
    engine.submit(target.tokenize(PROMPT), GREEDY.to_native(), max_tokens=8)
    while engine.has_work():
        engine.step()
    good = engine.save_slot(0)
    (expected,) = drafter.draft([(0, 5)], 7)
    state = _native.SlotState
    for bad in (
        state([], good.target, good.drafter),
        state([-1, *good.tokens[1:]], good.target, good.drafter),
        state(good.tokens[:-1], good.target, good.drafter),
        state(good.tokens, b"", good.drafter),
        state(good.tokens, good.target[:-5], good.drafter),
        state(good.tokens, good.target[:60], good.drafter),
        state(good.tokens, good.target + b"abcd", good.drafter),
        state(good.tokens, good.target, good.drafter[:3]),
        state(good.tokens, good.target, good.drafter[:-4]),
        state(good.tokens, good.target, b"\xff" * len(good.drafter)),
    ):
        with pytest.raises(ModelFormatError):
            engine.restore_slot(0, bad)
        assert engine.lengths(0) in [(0, 0), (len(good.tokens), len(good.tokens))]
    engine.restore_slot(0, good)
    assert engine.save_slot(0).drafter == good.drafter
    (draft,) = drafter.draft([(0, 5)], 7)
    assert (draft.tokens, draft.probabilities) == (expected.tokens, expected.probabilities)


def test_other_models_settings_and_sizes_are_refused(pair: Pair, tiny_target: TargetFactory, tmp_path: Path) -> None:
    engine = open_engine(pair)
    run(engine, engine.tokenizer.encode(PROMPT))
    file = tmp_path / "a.bin"
    engine.save_slot(0, file)
    with pytest.raises(PairingError, match="drafter"):
        Engine(pair[0].path, n_ctx=1024, flash_attn="on", n_threads=1).restore_slot(0, file)
    with pytest.raises(PairingError, match="cache"):
        open_engine(pair, cache_type_k="q8_0").restore_slot(0, file)
    with pytest.raises(PairingError, match="target"):
        Engine(tiny_target("llama", "f32").path, n_ctx=1024, flash_attn="on", n_threads=1).restore_slot(0, file)
    with pytest.raises(ContextLengthError):
        open_engine(pair, n_ctx=256).restore_slot(0, file)
    with pytest.raises(FileNotFoundError):
        engine.restore_slot(0, tmp_path / "missing.bin")


def test_busy_empty_and_unknown_slots(pair: Pair, tmp_path: Path) -> None:
    engine = open_engine(pair)
    with pytest.raises(ValueError, match="empty"):
        engine.save_slot(0, tmp_path / "a.bin")
    with pytest.raises(ValueError, match="no slot 2"):
        engine.erase_slot(2)
    with engine.generate(PROMPT, max_tokens=200, sampling=GREEDY) as generation:
        next(generation)
        info = engine.slots()[0]
        assert info.request is not None
        assert info.generating
        assert info.n_generated >= 1
        for action in (lambda: engine.save_slot(0, tmp_path / "a.bin"), lambda: engine.erase_slot(0)):
            with pytest.raises(ValueError, match="answering"):
                action()
    engine.step()
    assert [info.request for info in engine.slots()] == [None, None]
    assert list(tmp_path.iterdir()) == []


def test_a_ring_of_another_size_takes_the_window(pair: Pair, tmp_path: Path) -> None:
    """Contexts of other sizes give the sliding layers other rings: positions are saved, not cells."""
    large = open_engine(pair, n_ctx=2048)
    turn = run(large, large.tokenizer.encode(PROMPT))
    large.save_slot(0, tmp_path / "a.bin")
    prompt = turn.prompt_tokens + turn.tokens
    expected = outcome(run(large, prompt))
    small = open_engine(pair, n_ctx=640)
    small.restore_slot(0, tmp_path / "a.bin")
    assert outcome(run(small, prompt)) == expected
