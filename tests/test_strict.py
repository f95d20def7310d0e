"""--strict: only what an audit of this very configuration found exact, whatever is asked for, whoever else is there."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audit_rig import EXACT, GREEDY, PROMPT, Pair, command, keep, records, result_of
from conftest import DrafterFactory, SmolFactory, TargetFactory

from dspine_local import Engine, EngineOptions
from dspine_local.audit import AuditResult, strict
from dspine_local.audit.record import read_audit
from dspine_local.checks import OptionError
from dspine_local.convert import convert_checkpoint


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> list[AuditResult]:
    """The short audits that are made."""
    made: list[AuditResult] = []
    short = strict.short_audit

    def counted(*args: Any) -> AuditResult:
        made.append(short(*args))
        return made[-1]

    monkeypatch.setattr(strict, "short_audit", counted)
    return made


def test_a_record_is_obeyed(audited_pair: Pair, audits: list[AuditResult]) -> None:
    """Only these lengths, each only where it is exact."""
    keep(audited_pair, result_of({1: (0, 256), 3: (0,), 6: (0,)}))
    engine = Engine(*audited_pair, strict=True, n_draft=6, **EXACT)
    assert engine.exact_lengths == (1, 3, 6)
    generation = engine.generate(PROMPT, max_tokens=200, sampling=GREEDY)
    generation.read()
    stats = generation.stats
    assert stats is not None
    assert stats.exact_draft_lengths == (1, 3, 6)
    rounds = dict(enumerate(stats.rounds_per_draft_length))
    assert {k for k, n in rounds.items() if n} <= {0, 1, 3, 6}
    assert rounds[6] > 0
    far = engine.generate(PROMPT * 18, max_tokens=40, sampling=GREEDY)
    far.read()
    assert far.stats is not None
    assert far.stats.prompt_tokens > 256
    assert {k for k, n in enumerate(far.stats.rounds_per_draft_length) if n} <= {0, 1}
    assert far.stats.rounds_per_draft_length[1] > 0
    assert not audits


def test_a_draft_stays_within_its_block(audited_pair: Pair) -> None:
    """The last drafts before position 256 are shortened: no batch that crosses a block was audited."""
    keep(audited_pair, result_of({6: (0, 256), 2: (0, 256)}))
    engine = Engine(*audited_pair, strict=True, n_draft=6, **EXACT)
    tokens = engine.tokenizer.encode(PROMPT * 100)[:251]
    near = engine.generate(tokens[:250], max_tokens=30, sampling=GREEDY)
    near.read()
    assert near.stats is not None
    lengths = {k for k, n in enumerate(near.stats.rounds_per_draft_length) if n}
    assert lengths <= {0, 2, 6}
    assert near.stats.rounds_per_draft_length[2] > 0


def test_the_automatic_length_obeys(audited_pair: Pair) -> None:
    keep(audited_pair, result_of({2: (0, 256), 5: (0, 256)}))
    engine = Engine(*audited_pair, strict=True, **EXACT)
    assert engine.n_draft is None
    assert "up to 5 tokens" in engine.drafting
    generation = engine.generate(PROMPT, max_tokens=300, sampling=GREEDY)
    generation.read()
    assert generation.stats is not None
    lengths = {k for k, n in enumerate(generation.stats.rounds_per_draft_length) if n}
    assert lengths <= {0, 2, 5}
    assert lengths & {2, 5}


def test_a_request_drafts_at_most_what_it_says(audited_pair: Pair) -> None:
    keep(audited_pair, result_of({1: (0, 256), 3: (0, 256)}))
    engine = Engine(*audited_pair, strict=True, n_draft=3, **EXACT)
    for wanted, allowed in ((2, {0, 1}), (0, {0}), (3, {0, 1, 3})):
        generation = engine.generate(PROMPT, max_tokens=40, n_draft=wanted, cache_prompt=False, sampling=GREEDY)
        generation.read()
        assert generation.stats is not None
        assert {k for k, n in enumerate(generation.stats.rounds_per_draft_length) if n} <= allowed
        assert generation.stats.rounds_per_draft_length[max(allowed)] > 0


def test_a_length_that_is_not_exact_is_refused(audited_pair: Pair) -> None:
    keep(audited_pair, result_of({1: (0,), 3: (0,)}))
    with pytest.raises(OptionError, match=r"n_draft = 4, expected 0, or one that is exact here: 1, 3"):
        Engine(*audited_pair, strict=True, n_draft=4, **EXACT)
    keep(audited_pair, result_of({}))
    with pytest.raises(OptionError, match="none is exact here"):
        Engine(*audited_pair, strict=True, n_draft=4, **EXACT)


def test_where_nothing_is_exact_nothing_is_drafted(audited_pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    keep(audited_pair, result_of({}))
    engine = Engine(*audited_pair, strict=True, **EXACT)
    (line,) = [record.getMessage() for record in caplog.records if "strict" in record.getMessage()]
    assert "nothing is drafted" in line
    assert engine.exact_lengths == ()
    assert engine.n_draft == 0
    assert engine.drafting == "no drafts"
    for wanted in (None, 5):
        generation = engine.generate(PROMPT, max_tokens=20, n_draft=wanted, sampling=GREEDY)
        generation.read()
        assert generation.stats is not None
        assert generation.stats.drafted == 0
        assert "strict: no drafts" in str(generation.stats)


def test_without_a_drafter_nothing_is_audited(audited_pair: Pair, audits: list[AuditResult]) -> None:
    engine = Engine(audited_pair[0], strict=True, **EXACT)
    assert engine.generate(PROMPT, max_tokens=4, sampling=GREEDY).read()
    assert engine.exact_lengths == ()
    Engine(*audited_pair, strict=True, n_draft=0, **EXACT)
    assert not audits


def test_a_short_audit_is_made_once(audited_pair: Pair, audits: list[AuditResult], tmp_path: Path) -> None:
    engines = [Engine(*audited_pair, strict=True, n_draft=7, **EXACT) for _ in range(2)]
    assert len(audits) == 1
    assert audits[0].exact_lengths == tuple(range(1, 8))
    (file,) = records(tmp_path)
    assert json.loads(file.read_text())["result"] == audits[0].to_json()
    plain = Engine(audited_pair[0], **EXACT).generate(PROMPT, max_tokens=100, sampling=GREEDY).read()
    for engine in engines:
        generation = engine.generate(PROMPT, max_tokens=100, sampling=GREEDY)
        assert generation.read() == plain
        assert generation.stats is not None
        assert generation.stats.drafted > 0


@pytest.mark.parametrize(
    "options",
    [
        {"n_threads": 2},
        {"n_threads_batch": 2},
        {"n_parallel": 2},
        {"flash_attn": "off"},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        {"n_gpu_layers": 0},
        {"use_mmap": False},
    ],
)
def test_other_settings_have_their_own_record(audited_pair: Pair, options: dict[str, Any]) -> None:
    keep(audited_pair, result_of({2: (0,)}))
    same = EngineOptions(**EXACT, strict=True, n_draft=0)
    assert read_audit(Engine(*audited_pair, same).target, same) is not None
    other = replace(same, **options)
    assert read_audit(Engine(*audited_pair, other).target, other) is None


def test_another_file_has_its_own_record(audited_pair: Pair, tiny_target: TargetFactory) -> None:
    """Same names, shapes and types: only the weights differ."""
    keep(audited_pair, result_of({2: (0,)}))
    options = EngineOptions(**EXACT)
    other = tiny_target("llama", "q8_0", seed=1)
    assert read_audit(Engine(other.path, options=options).target, options) is None
    assert read_audit(Engine(audited_pair[0], options=options).target, options) is not None


def test_the_environment_of_ggml_belongs_to_it(audited_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(audited_pair, result_of({2: (0,)}))
    options = EngineOptions(**EXACT)
    target = Engine(audited_pair[0], options=options).target
    assert read_audit(target, options) is not None
    monkeypatch.setenv("GGML_SOMETHING", "1")
    assert read_audit(target, options) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda _text: "",
        lambda _text: "[]",
        lambda text: text[:-40],
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text.replace('"rows": 128', '"rows": 127', 1),
        lambda text: text.replace('"batch_size": 2', '"batch_size": -2'),
        lambda text: text.replace('"complete": true', '"complete": "yes"'),
        lambda text: text.replace('"threads"', '"other"'),
        lambda _text: "\udcff",
    ],
)
def test_a_damaged_record_is_not_used(
    audited_pair: Pair,
    audits: list[AuditResult],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[str], str],
) -> None:
    keep(audited_pair, result_of({2: (0,)}))
    (file,) = records(tmp_path)
    damaged = damage(file.read_text())
    assert damaged != file.read_text()
    file.write_bytes(damaged.encode("utf-8", "surrogateescape"))
    engine = Engine(*audited_pair, strict=True, n_draft=3, **EXACT)
    assert "not used" in caplog.text
    assert len(audits) == 1
    assert engine.exact_lengths == (1, 2, 3)
    assert AuditResult.from_json(json.loads(file.read_text())["result"]) == audits[0]


def test_a_cache_that_cannot_be_written_is_no_error(
    audited_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    engine = Engine(*audited_pair, strict=True, n_draft=2, **EXACT)
    assert engine.exact_lengths == (1, 2)
    assert "could not be kept" in caplog.text


def test_other_slots_change_no_bit(tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path: Path) -> None:
    """An f32 target gives other bits in every batch size: together with others, and alone, a request gets the same."""
    tiny = tiny_target("llama", "f32")
    drafter = tmp_path / "drafter.gguf"
    convert_checkpoint(tiny_drafter(tiny), drafter, target=tiny.path)
    options: dict[str, Any] = {"max_tokens": 24, "n_probs": 3, "cache_prompt": False, "sampling": GREEDY}
    prompts = [PROMPT, PROMPT * 3, "An", PROMPT * 9]
    alone = Engine(tiny.path, n_ctx=1024)
    expected = []
    for prompt in prompts:
        generation = alone.generate(prompt, **options)
        generation.read()
        expected.append((generation.tokens, [entry.logprob for entry in generation.logprobs]))
    for models in ((tiny.path,), (tiny.path, drafter)):
        engine = Engine(*models, n_ctx=4096, n_parallel=4, strict=True)
        assert engine.exact_lengths == ()
        running = [engine.generate(prompt, **options) for prompt in prompts]
        found = []
        for generation in running:
            generation.read()
            found.append((generation.tokens, [entry.logprob for entry in generation.logprobs]))
        assert found == expected


def test_several_slots_draft_and_change_no_bit(audited_pair: Pair) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "n_probs": 3, "cache_prompt": False, "sampling": GREEDY}
    prompts = [PROMPT, PROMPT * 3, "An"]
    alone = Engine(audited_pair[0], **EXACT)
    engine = Engine(*audited_pair, strict=True, n_parallel=3, **(EXACT | {"n_ctx": 3 * 512}))
    running = [engine.generate(prompt, n_draft=n, **options) for prompt, n in zip(prompts, (5, None, 2), strict=True)]
    for prompt, generation in zip(prompts, running, strict=True):
        generation.read()
        reference = alone.generate(prompt, **options)
        reference.read()
        assert generation.tokens == reference.tokens
        assert [e.logprob for e in generation.logprobs] == [e.logprob for e in reference.logprobs]
    assert running[0].stats is not None
    assert running[0].stats.rounds_per_draft_length[5] > 0


def test_generate_says_what_strict_came_to(
    audited_pair: Pair, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    keep(audited_pair, result_of({2: (0,)}))
    settings = ("-t", 1, "-fa", "on", "-ub", 32, "-c", 512, "-n", 30, "--temp", 0, "--raw", "--strict", "-p", PROMPT)
    code, out, _ = command(capsys, "generate", "-m", audited_pair[0], "-md", audited_pair[1], "--json", *settings)
    assert code == 0
    stats = json.loads(out)["stats"]
    assert stats["exact_draft_lengths"] == [2]
    assert {k for k, n in enumerate(stats["rounds_per_draft_length"]) if n} <= {0, 2}
    assert "2 at positions 0-255" in caplog.text
    code, _, err = command(capsys, "generate", "-m", audited_pair[0], "-md", audited_pair[1], "--n-draft", 3, *settings)
    assert code == 2
    assert "--n-draft 3, expected 0, or one that is exact here: 2" in err


@pytest.mark.slow
def test_smollm2(smollm2: SmolFactory, trained_drafter: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Q8_0 with a quantized cache: whatever is drafted, the answer's bits are those of plain decoding."""
    caplog.set_level(logging.INFO)
    options: dict[str, Any] = {"n_ctx": 512, "cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on"}
    model = smollm2("q8_0")
    request: dict[str, Any] = {"max_tokens": 120, "n_probs": 2, "sampling": GREEDY}
    engine = Engine(model, trained_drafter, strict=True, n_draft=3, **options)
    answers = []
    for each in (Engine(model, **options), engine):
        generation = each.generate("Once upon a time", **request)
        answers.append((generation.read(), [entry.logprob for entry in generation.logprobs]))
    assert answers[0] == answers[1]
    assert engine.exact_lengths == (1, 2, 3)
