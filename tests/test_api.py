"""The Python engine: streaming, statistics, several requests at once, and errors before anything is loaded."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import DrafterFactory, TargetFactory

from dspine_local import (
    GREEDY,
    ContextLengthError,
    Engine,
    EngineOptions,
    ForkError,
    GenerationOptions,
    ModelFormatError,
    PairingError,
    SamplingOptions,
)
from dspine_local.convert import convert_checkpoint
from dspine_local.evaluation import load_prompts
from dspine_local.parity import run_case
from dspine_local.summary import summarize

PROMPT = "The quick brown fox jumps over the lazy dog."


@pytest.fixture(scope="module")
def pair(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    target = tiny_target("llama", "q8_0")
    drafter = tmp_path_factory.mktemp("api") / "drafter.gguf"
    convert_checkpoint(tiny_drafter(target), drafter, outtype="f32", target=target.path)
    return Path(target.path), drafter


@pytest.fixture
def engine(pair: tuple[Path, Path]) -> Engine:
    return Engine(*pair, n_ctx=1024, n_parallel=2, n_ubatch=32, flash_attn="on")


def test_stream_equals_text_and_tokens(engine: Engine) -> None:
    generation = engine.generate(PROMPT, max_tokens=50, sampling=GREEDY)
    pieces = list(generation)
    assert "".join(pieces) == generation.text == engine.tokenizer.decode(generation.tokens)
    assert generation.finish_reason == "length"
    assert len(generation.tokens) == 50


def test_statistics_add_up(engine: Engine) -> None:
    generation = engine.generate(PROMPT, max_tokens=40, sampling=GREEDY)
    generation.read()
    stats = generation.stats
    assert stats is not None
    assert stats.generated == 40 == 1 + stats.rounds + stats.accepted
    assert stats.acceptance_length == (stats.rounds + stats.accepted) / stats.rounds
    assert stats.prompt_tokens == len(generation.prompt_tokens)
    assert sum(stats.drafted_per_position) == stats.drafted
    assert sum(stats.accepted_per_position) == stats.accepted
    assert stats.other_s >= 0
    assert stats.to_json()["rounds"] == stats.rounds


def test_drafting_changes_no_token(engine: Engine) -> None:
    plain = engine.generate(PROMPT, max_tokens=60, n_draft=0, sampling=GREEDY)
    drafted = engine.generate(PROMPT, max_tokens=60, sampling=GREEDY)
    assert plain.read() == drafted.read()
    assert plain.tokens == drafted.tokens
    assert plain.stats is not None
    assert plain.stats.drafted == 0
    assert drafted.stats is not None
    assert drafted.stats.drafted > 0


def test_interleaved_requests_give_what_they_give_alone(engine: Engine) -> None:
    alone = [engine.generate(f"{PROMPT} {i}", max_tokens=30, sampling=GREEDY).read() for i in range(3)]
    together = [engine.generate(f"{PROMPT} {i}", max_tokens=30, sampling=GREEDY) for i in range(3)]  # two slots
    texts = ["", "", ""]
    running = list(range(3))
    while running:
        for i in list(running):
            piece = next(together[i], None)
            texts[i] += piece or ""
            if piece is None:
                running.remove(i)
    assert texts == alone


def test_requests_from_threads(engine: Engine) -> None:
    alone = [engine.generate(f"{PROMPT} {i}", max_tokens=20, sampling=GREEDY).read() for i in range(6)]
    results: dict[int, str] = {}

    def work(i: int) -> None:
        results[i] = engine.generate(f"{PROMPT} {i}", max_tokens=20, sampling=GREEDY).read()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [results[i] for i in range(6)] == alone


def test_stop_text_is_cut_wherever_it_falls(engine: Engine) -> None:
    whole = engine.generate(PROMPT, max_tokens=40, sampling=GREEDY).read()
    for at in range(5, len(whole) - 3, 4):
        stop = whole[at : at + 3]
        generation = engine.generate(PROMPT, max_tokens=40, stop=[stop], sampling=GREEDY)
        assert "".join(generation) == whole[: whole.index(stop)]
        assert generation.finish_reason == "stop"
        assert generation.stats is not None
        assert generation.stats.generated == len(generation.tokens)


def test_closing_frees_the_slot_for_the_next(engine: Engine) -> None:
    for _ in range(5):
        with engine.generate(PROMPT, sampling=GREEDY) as generation:
            next(generation)
        assert generation.finish_reason == "cancelled"
    assert engine.generate(PROMPT, max_tokens=3, sampling=GREEDY).read()


def test_dropped_requests_do_not_block(engine: Engine) -> None:
    for _ in range(5):
        next(engine.generate(PROMPT, sampling=GREEDY))
    assert engine.generate(PROMPT, max_tokens=3, sampling=GREEDY).read()


def test_closing_from_another_thread_ends_the_reading(engine: Engine) -> None:
    with ThreadPoolExecutor() as pool:
        for _ in range(10):
            generation = engine.generate(PROMPT, sampling=SamplingOptions(ignore_eos=True))
            reader = pool.submit(list, generation)
            while not generation.text:
                time.sleep(0.001)
            generation.close()
            assert generation.finish_reason == "cancelled"
            n_tokens = len(generation.tokens)
            assert "".join(reader.result(30)) == generation.text
            assert next(generation, None) is None
            assert len(generation.tokens) == n_tokens


def test_several_threads_share_the_pieces_of_one_answer(engine: Engine) -> None:
    expected = engine.generate(PROMPT, max_tokens=60, sampling=GREEDY).read()
    with ThreadPoolExecutor() as pool:
        for _ in range(5):
            generation = engine.generate(PROMPT, max_tokens=60, sampling=GREEDY)
            readers = [pool.submit(list, generation) for _ in range(4)]
            pieces = [piece for reader in readers for piece in reader.result(60)]
            assert generation.text == expected
            assert sorted("".join(pieces)) == sorted(expected)
            assert len(generation.tokens) == 60


def test_running_things_cannot_be_copied(engine: Engine) -> None:
    with engine.generate(PROMPT, sampling=GREEDY) as generation:
        for thing in (generation, engine):
            for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="cannot be copied or pickled"):
                    duplicate(thing)  # type: ignore[operator]
        assert next(generation)


def in_a_fork(work: Callable[[], object]) -> str:
    """What the work raises in a forked child; the child is killed if it hangs."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        try:
            work()
            sender.send("nothing")
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}")

    process = multiprocessing.get_context("fork").Process(target=child)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "this process is multi-threaded": that is the point
        process.start()
    try:
        return receiver.recv() if receiver.poll(30) else "it hangs"
    finally:
        process.kill()
        process.join()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
def test_a_forked_child_is_told_not_to_use_the_engine(engine: Engine, pair: tuple[Path, Path]) -> None:
    running = engine.generate(PROMPT, sampling=GREEDY)
    next(running)
    for work in (
        lambda: engine.generate(PROMPT, max_tokens=5).read(),
        lambda: next(running),
        lambda: engine.cache_lengths(),
        lambda: Engine(*pair, n_ctx=512).generate(PROMPT, max_tokens=5).read(),
    ):
        assert in_a_fork(work).startswith("ForkError: process ")
    assert in_a_fork(running.close) == "nothing"
    assert next(running)
    assert issubclass(ForkError, RuntimeError)


def test_the_next_turn_reuses_the_conversation(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    first = engine.chat(messages, max_tokens=20, sampling=GREEDY)
    first.read()
    again = engine.generate(first.prompt_tokens + first.tokens, max_tokens=5, sampling=GREEDY)
    again.read()
    assert again.stats is not None
    assert again.stats.reused_tokens == len(first.prompt_tokens) + len(first.tokens) - 1


def test_one_seed_one_answer(engine: Engine) -> None:
    sampling = SamplingOptions(seed=11)
    texts = {
        engine.generate(PROMPT, max_tokens=30, n_draft=n, sampling=sampling).read() for n in (0, 1, 7) for _ in range(2)
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"repeat_penalty": 0.0}, "repeat_penalty"),
        ({"logit_bias": [(10**6, 1.0)]}, "logit_bias"),
        ({"grammar": "not a grammar"}, "grammar"),
        ({"top_k": "many"}, "top_k"),
    ],
)
def test_wrong_sampling_is_named(engine: Engine, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPT, sampling=SamplingOptions(**options))  # type: ignore[arg-type]
    assert engine.generate(PROMPT, max_tokens=2, sampling=GREEDY).read() is not None


def test_wrong_requests_are_named(engine: Engine) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        engine.generate([])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.generate([1, 10**6])
    with pytest.raises(ValueError, match="max_tokens"):
        engine.generate(PROMPT, max_tokens=-2)
    with pytest.raises(ValueError, match="n_draft = 99, expected 0 to 15"):
        engine.generate(PROMPT, n_draft=99)
    with pytest.raises(ContextLengthError, match="600 tokens, the context holds 512"):
        engine.generate([5] * 600)
    with pytest.raises(TypeError, match="temprature"):
        engine.generate(PROMPT, temprature=1.0)
    with pytest.raises(ValueError, match=r"prompt token = 1\.5, expected an integer"):
        engine.generate([1, 1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="prompt = b'abc', expected a list of token ids, or text"):
        engine.generate(b"abc")


WRONG_OPTIONS: list[tuple[type, str, object]] = [
    *((EngineOptions, name, value) for name in ("n_ctx", "n_batch", "n_threads") for value in (2**31, -1, 1.5)),
    *((EngineOptions, name, None) for name in ("n_batch", "n_threads")),
    *((EngineOptions, name, True) for name in ("n_ctx", "n_parallel", "n_ubatch", "n_gpu_layers", "n_threads_batch")),
    *((EngineOptions, name, 513) for name in ("n_threads", "n_threads_batch", "n_parallel")),
    *((EngineOptions, name, "f64") for name in ("cache_type_k", "cache_type_v", "cache_type_drafter", "flash_attn")),
    *((EngineOptions, "n_draft", value) for value in (-1, 1.5, True, "3", 2**31)),
    (EngineOptions, "n_parallel", 0),
    (EngineOptions, "n_gpu_layers", -2),
    (EngineOptions, "transition_order", None),
    (EngineOptions, "use_mmap", 1),
    *((SamplingOptions, "seed", value) for value in (-2, 2**32, 1.0, None, True)),
    *((SamplingOptions, "top_k", value) for value in (2**31, -(2**31) - 1, 4.0, None, False)),
    *((SamplingOptions, name, 1.01) for name in ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold")),
    *((SamplingOptions, name, -0.1) for name in ("top_p", "min_p", "temperature", "dry_multiplier", "dynatemp_range")),
    *(
        (SamplingOptions, "temperature", value)
        for value in (float("nan"), float("inf"), 1e39, 10**400, "1", None, True)
    ),
    *((SamplingOptions, "repeat_penalty", value) for value in (0, -1.0, float("nan"))),
    *((SamplingOptions, name, -2) for name in ("repeat_last_n", "dry_penalty_last_n", "dry_allowed_length")),
    *(
        (SamplingOptions, "logit_bias", value)
        for value in (None, {1: 2.0}, "x", [1], [(1,)], [("1", 2.0)], [(-1, 1.0)])
    ),
    *((SamplingOptions, "grammar", value) for value in (None, b"root", "\0", "\ud800")),
    (SamplingOptions, "ignore_eos", 1),
    *((GenerationOptions, "max_tokens", value) for value in (None, 1.5, -2, 2**31, True, "3")),
    *((GenerationOptions, "n_draft", value) for value in (-1, 1.5, True, 2**31)),
    *(
        (GenerationOptions, "stop", value)
        for value in (None, "END", b"END", [""], [None], [b"x"], ["\ud800"], ["\0"], 5)
    ),
    *((GenerationOptions, "stop_tokens", value) for value in (None, "1", [1.5], [-1], [2**31], [True])),
    (GenerationOptions, "cache_prompt", None),
    *((GenerationOptions, "sampling", value) for value in (None, {}, SamplingOptions)),
]


@pytest.mark.parametrize(("kind", "name", "value"), WRONG_OPTIONS)
def test_wrong_options_are_named(kind: Callable[..., object], name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        kind(**{name: value})
    assert "expected" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_options_of_other_types_that_mean_the_same(engine: Engine) -> None:
    plain = engine.generate(PROMPT, max_tokens=20, sampling=GREEDY)
    plain.read()
    assert EngineOptions(n_ctx=np.int64(512), n_threads=512, n_gpu_layers=-1).n_ctx == 512
    sampling = SamplingOptions(
        seed=-1, temperature=0, top_k=np.int32(5), top_p=np.float32(1), logit_bias=[(np.int64(3), -np.inf)]
    )
    other = engine.generate(np.array(plain.prompt_tokens), max_tokens=np.int64(20), stop_tokens={3}, sampling=sampling)
    other.read()
    assert other.tokens == plain.tokens


def test_text_that_is_no_text_is_named(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"the prompt has the lone surrogate U\+D800 at byte 2, expected UTF-8"):
        engine.generate("é\ud800")
    for content in ("\udfff", [{"type": "text", "text": "\udfff"}]):
        with pytest.raises(ValueError, match=r"message 2, 'content'.* has the lone surrogate U\+DFFF at byte 0"):
            engine.chat([{"role": "user", "content": "x"}, {"role": "user", "content": content}])


def test_wrong_files_are_named(pair: tuple[Path, Path], tmp_path: Path, tiny_target: TargetFactory) -> None:
    target, drafter = pair
    with pytest.raises(FileNotFoundError, match=r"missing\.gguf"):
        Engine(tmp_path / "missing.gguf")
    with pytest.raises(FileNotFoundError, match=r"missing\.gguf"):
        Engine(target, tmp_path / "missing.gguf")
    with pytest.raises(ModelFormatError, match="expected a drafter"):
        Engine(target, target)
    with pytest.raises(ModelFormatError, match="expected a target"):
        Engine(drafter)
    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(target.read_bytes()[:-100])
    with pytest.raises(ModelFormatError, match="truncated"):
        Engine(truncated)
    with pytest.raises(ValueError, match="n_draft = 16, expected 0 to 15"):
        Engine(target, drafter, n_draft=16)
    with pytest.raises(PairingError, match="layer"):
        Engine(tiny_target("qwen35", "q8_0").path, drafter)


def test_paths_that_no_system_takes_are_named(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    for path, message in ((f"{target}\0x", "NUL character"), (f"{target}\udcff", "not valid UTF-8")):
        for call in (lambda p: Engine(p), lambda p: Engine(target, p), summarize, run_case, load_prompts):
            with pytest.raises(ValueError, match=message):
                call(path)  # type: ignore[no-untyped-call]
    assert drafter.exists()


def test_a_target_with_another_vocabulary_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The same sizes, other tokens: every draft would be nonsense, so it must not load."""
    target, drafter = pair
    other = tmp_path / "other.gguf"
    data = bytearray(target.read_bytes())
    at = data.index(b"tokenizer.ggml.tokens")
    at = data.index(b"\x01\x00\x00\x00\x00\x00\x00\x00a", at) + 8  # the token "a"
    data[at : at + 1] = b"\x7f"
    other.write_bytes(data)
    with pytest.raises(PairingError, match="another vocabulary"):
        Engine(other, drafter)
