"""Prompts that begin like earlier ones, on a hybrid target: it goes back to states that were kept; same answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import DrafterFactory, TargetFactory
from engine_rig import PROMPT, Answer, ask, assert_in_step, drafting_engine, finish, guessing, open_target, sampling
from tiny_models import TinyTarget

from dspine_local._native import Drafter, Engine, Target
from dspine_local.convert import convert_checkpoint

pytestmark = pytest.mark.native

TAIL = 8  # a checkpoint is so far before the end of a prompt
STEP = 64  # and so far behind the one before
WINDOW = 24
N_TOKENS = 72  # enough for a ring to lose what was before the answer


@pytest.fixture(scope="module")
def hybrid(tiny_target: TargetFactory) -> tuple[TinyTarget, Target]:
    tiny = tiny_target("qwen35", "q8_0")
    return tiny, open_target(tiny, n_ctx=1024, n_seq=2, n_batch=48)


@pytest.fixture(scope="module")
def drafters(
    hybrid: tuple[TinyTarget, Target], tiny_drafter: DrafterFactory, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Drafter]:
    """Drafters whose layers see everything, and a window of 24."""
    tiny, target = hybrid
    made = {}
    for name, window in (("full", None), ("window", WINDOW)):
        gguf = tmp_path_factory.mktemp(name) / "drafter.gguf"
        convert_checkpoint(tiny_drafter(tiny, sliding_window=window), gguf, outtype="f32")
        made[name] = Drafter(str(gguf), target.tensors(), n_seq=2, n_ctx=512, n_threads=1)
    return made


@dataclass
class Kind:
    """Makes engines of one kind; ``lost`` are the tokens that its drafter must see again after a longer answer."""

    make: Callable[[], Engine]
    lost: int = 0


@pytest.fixture(params=["plain", "scripted", "full", "window"])
def kind(request: pytest.FixtureRequest, hybrid: tuple[TinyTarget, Target], drafters: dict[str, Drafter]) -> Kind:
    tiny, target = hybrid
    if request.param == "plain":
        return Kind(lambda: Engine(target))
    if request.param == "scripted":
        return Kind(lambda: drafting_engine(target, guessing(1, tiny.n_vocab)))
    return Kind(
        lambda: Engine(target, drafters[request.param], n_draft=7), WINDOW - 1 if request.param == "window" else 0
    )


def text(target: Target, n: int, offset: int = 0) -> list[int]:
    """So many tokens; other offsets give others from the first on."""
    return [(token + offset) % 250 for token in (target.tokenize(PROMPT) * 10)[:n]]


def fresh(target: Target, prompt: list[int]) -> list[int]:
    return ask(Engine(target, checkpoint_bytes=0), prompt, max_tokens=N_TOKENS, cache_prompt=False).tokens


def turn(engine: Engine, prompt: list[int], **options: Any) -> Answer:
    answer = ask(engine, prompt, max_tokens=N_TOKENS, **options)
    assert_in_step(engine)
    return answer


def test_another_answer_to_the_same_prompt(hybrid: tuple[TinyTarget, Target], kind: Kind) -> None:
    """Or an edited last message, or thinking left out: what is before the prompt's end is not read again."""
    target = hybrid[1]
    prompt = text(target, 200)
    changed = prompt[:-3] + text(target, 20, 7)
    expected = {len(tokens): fresh(target, tokens) for tokens in (prompt, changed)}
    engine = kind.make()
    assert turn(engine, prompt).tokens == expected[200]
    for tokens in (prompt, changed, changed, prompt):
        again = turn(engine, tokens, slot=0)
        assert again.tokens == expected[len(tokens)]
        assert 200 - TAIL - kind.lost <= again.final.n_reused <= 200 - 3


def test_a_turn_that_is_asked_again(hybrid: tuple[TinyTarget, Target], kind: Kind) -> None:
    """The end of the answer before is kept when a turn goes on from it."""
    target = hybrid[1]
    prompt = text(target, 150)
    engine = kind.make()
    history = prompt + turn(engine, prompt).tokens
    follow_ups = [[*history, *text(target, 100, offset)] for offset in (3, 5)]
    reused = []
    for follow_up in [*follow_ups, *follow_ups]:
        answer = turn(engine, follow_up, slot=0)
        assert answer.tokens == fresh(target, follow_up)
        reused.append(answer.final.n_reused)
    n_held = len(history) - 1
    assert reused[0] == n_held
    if kind.lost == 0:
        assert reused[1:] == [n_held] * 3
    else:  # the first to part from another shows where
        assert reused[1] == 150 - TAIL - kind.lost
        assert reused[2:] == [len(history) - kind.lost] * 2


def test_a_shared_system_prompt(hybrid: tuple[TinyTarget, Target], kind: Kind) -> None:
    """The second chat shows where chats part; from the third on it is not read again."""
    target = hybrid[1]
    system = text(target, 130)
    chats = [system + text(target, 90, offset) for offset in (2, 4, 6, 8)]
    engine = kind.make()
    reused = []
    for chat in chats:
        answer = turn(engine, chat, slot=0)
        assert answer.tokens == fresh(target, chat)
        reused.append(answer.final.n_reused)
    assert reused == [0, 0, 130 - kind.lost, 130 - kind.lost]


def test_slots_do_not_mix(hybrid: tuple[TinyTarget, Target], kind: Kind) -> None:
    """Two chats at the same time: each goes back to its own."""
    target = hybrid[1]
    prompts = [text(target, 150), text(target, 180, 9)]
    expected = [fresh(target, prompt) for prompt in prompts]
    engine = kind.make()
    again = [150 - TAIL - kind.lost, 180 - TAIL - kind.lost]
    for reused in ([0, 0], again, again):
        answers = finish(engine, [engine.submit(prompt, sampling(), max_tokens=N_TOKENS) for prompt in prompts])
        assert [answer.tokens for answer in answers] == expected
        assert [answer.final.n_reused for answer in answers] == reused


def test_what_ends_a_checkpoint(hybrid: tuple[TinyTarget, Target]) -> None:
    """Other tokens before it, an erased slot, a restored one: it is dropped, and nothing goes back to it."""
    target = hybrid[1]
    prompt, other = text(target, 150), text(target, 40, 9)
    engine = Engine(target)
    turn(engine, other, slot=0)
    state = engine.save_slot(0)
    for spoil in (
        lambda: turn(engine, other, slot=0),
        lambda: engine.erase_slot(0),
        lambda: engine.restore_slot(0, state),
    ):
        engine.erase_slot(0)
        turn(engine, prompt, slot=0)
        assert engine.checkpoint_bytes > 0
        spoil()
        assert engine.checkpoint_bytes == 0
        assert turn(engine, prompt, slot=0).final.n_reused == 0


def test_memory_is_bounded(hybrid: tuple[TinyTarget, Target]) -> None:
    """What was used longest ago goes first; with no room at all there is none."""
    target = hybrid[1]
    engine = Engine(target)
    turn(engine, text(target, 100))
    one = engine.checkpoint_bytes
    assert one > 0
    bound = 2 * one + one // 2
    engine = Engine(target, checkpoint_bytes=bound)
    system = text(target, 80)
    for offset in range(1, 7):
        turn(engine, system + text(target, 80, offset) + text(target, 80, offset + 20), slot=0)
        turn(engine, text(target, 300, 30 + offset), slot=1)
        assert 0 < engine.checkpoint_bytes <= bound
    for bytes_allowed in (0, one // 2):
        none = Engine(target, checkpoint_bytes=bytes_allowed)
        prompt = text(target, 150)
        assert turn(none, prompt).tokens == turn(none, prompt).tokens == fresh(target, prompt)
        assert none.checkpoint_bytes == 0


def test_dense_targets_need_none(tiny_target: TargetFactory) -> None:
    target = open_target(tiny_target("llama", "q8_0"), n_ctx=512)
    engine = Engine(target)
    prompt = text(target, 200)
    turn(engine, prompt)
    assert turn(engine, prompt).final.n_reused == 199
    assert engine.checkpoint_bytes == 0


def test_short_prompts_are_read_again(hybrid: tuple[TinyTarget, Target]) -> None:
    target = hybrid[1]
    engine = Engine(target)
    for n, reused in ((STEP + TAIL - 1, 0), (STEP + TAIL, STEP)):
        prompt = text(target, n, n)
        turn(engine, prompt)
        assert turn(engine, prompt).final.n_reused == reused


def test_cancelled_at_a_checkpoint(hybrid: tuple[TinyTarget, Target], kind: Kind) -> None:
    """Wherever the reading of the prompt stopped, the next request is right."""
    target = hybrid[1]
    prompt = text(target, 200)
    expected = fresh(target, prompt)
    engine = kind.make()
    for n_steps in (1, 3, 4, 5):
        engine.erase_slot(0)
        victim = engine.submit(prompt, sampling(), slot=0)
        for _ in range(n_steps):
            engine.step()
        engine.cancel(victim)
        engine.step()
        assert_in_step(engine)
        assert turn(engine, prompt, slot=0).tokens == expected


def test_rounds_copy_no_state(hybrid: tuple[TinyTarget, Target], kind: Kind) -> None:
    """llama.cpp's snapshots undo a rejected draft: states are copied to the host only while a prompt is read."""
    _, target = hybrid
    engine = kind.make()
    request = engine.submit(text(target, 200), sampling(), max_tokens=N_TOKENS)
    held: list[tuple[bool, int]] = []  # per step: whether a token has come, and the bytes of all checkpoints
    answering = False
    while engine.has_work():
        answering |= any(event.tokens for event in engine.step() if event.id == request)
        held.append((answering, engine.checkpoint_bytes))
    while_answering = [n_bytes for answers, n_bytes in held if answers]
    assert len(while_answering) > 5
    assert len(set(while_answering)) == 1
    assert while_answering[0] > 0
