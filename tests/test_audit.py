"""The audit: batches against one by one, what follows from it, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from audit_rig import EXACT, PROMPT, SIZES, Pair, Row, command, records, result_of
from conftest import TargetFactory
from tiny_models import ARCHITECTURES

from dspine_local import Engine
from dspine_local.audit import AuditResult, BatchResult, BlockCount, Case, deep_cases, measure
from dspine_local.audit.cases import short_cases
from dspine_local.audit.words import exactness_in_words, lengths_in_words
from dspine_local.errors import BackendError
from dspine_local.tokenizer import Tokenizer


class FakeTarget:
    """Logits that follow from the tokens so far; ``disturb`` changes a row, given batch size and position."""

    n_batch, n_vocab, is_recurrent = 64, 50, False

    def __init__(
        self, disturb: Callable[[int, int, npt.NDArray[np.float32]], None] = lambda _n, _p, _row: None
    ) -> None:
        self.tokens: list[int] = []
        self.disturb = disturb

    def decode(self, _seq: int, tokens: list[int], *, n_outputs: int = 1) -> Row:
        rows = []
        for token in tokens:
            row = np.random.default_rng([*self.tokens[-3:], token]).standard_normal(self.n_vocab, dtype=np.float32)
            self.disturb(len(tokens), len(self.tokens), row)
            self.tokens.append(token)
            rows.append(row)
        return np.array(rows[len(rows) - n_outputs :])

    def truncate(self, _seq: int, n: int) -> None:
        assert n <= len(self.tokens)
        del self.tokens[n:]

    def length(self, _seq: int) -> int:
        return len(self.tokens)

    def is_end_of_generation(self, _token: int) -> bool:
        return False


def audit(target: Any, *cases: Case, **options: Any) -> AuditResult:
    return measure(target, cases or [Case("", tuple(range(20)), 48)], SIZES, **options)


# What is measured.


def test_identical_logits_are_exact_everywhere() -> None:
    result = audit(FakeTarget())
    assert result.exact_lengths == tuple(range(1, 16))
    assert result.n_flips == 0
    assert result.n_tokens == 48
    for batch in result.batches:
        assert batch.rows == 48 // batch.batch_size * batch.batch_size
        assert (batch.max_abs_diff, batch.median_abs_diff, batch.flips_per_1000) == (0, 0, 0)


def test_a_difference_is_told_by_batch_size() -> None:
    def disturb(n: int, _position: int, row: Row) -> None:
        if n == 5:
            row += np.float32(0.25)  # every logit, so no choice changes

    result = audit(FakeTarget(disturb))
    assert result.exact_lengths == tuple(n for n in range(1, 16) if n != 4)
    five = next(batch for batch in result.batches if batch.batch_size == 5)
    assert five.identical == 0
    assert five.max_abs_diff == pytest.approx(0.25, rel=1e-5)
    assert five.median_abs_diff == pytest.approx(0.25, rel=1e-5)
    assert five.flip_margins == ()


def test_the_last_bit_counts() -> None:
    def disturb(n: int, _position: int, row: Row) -> None:
        if n == 2:
            row[7] = np.nextafter(row[7], np.float32(9))

    assert 1 not in audit(FakeTarget(disturb)).exact_lengths


def test_a_changed_choice_is_told_with_its_margin() -> None:
    def disturb(n: int, position: int, row: Row) -> None:
        if n == 3 and position == 22:
            best, second = np.argsort(row)[[-1, -2]]
            margins.append(float(row[best] - row[second]))
            row[second] = row[best] + 1

    margins: list[float] = []
    result = audit(FakeTarget(disturb))
    assert result.n_flips == 1
    three = result.batches[1]
    assert three.flip_margins == (pytest.approx(margins[0]),)
    assert three.flips_per_1000 == pytest.approx(1000 / 48)


def test_blocks_are_told_apart_and_no_batch_crosses_them() -> None:
    def disturb(n: int, position: int, row: Row) -> None:
        batches.append((n, position))
        if n > 1 and position >= 256:
            row += 1

    batches: list[tuple[int, int]] = []
    result = audit(FakeTarget(disturb), Case("", (1,) * 230, 64))
    for batch in result.batches:
        assert [block.first for block in batch.blocks] == [0, 256]
        assert batch.exact_ranges == [(0, 256)]
        assert batch.blocks[1].identical == 0
    starts = {(n, p) for i, (n, p) in enumerate(batches) if n in SIZES and (i == 0 or batches[i - 1] != (n, p - 1))}
    assert all(p // 256 == (p + n - 1) // 256 for n, p in starts)


def test_long_answers_are_read_in_segments() -> None:
    target = FakeTarget()
    result = audit(target, Case("", (3, 4), 150))
    assert result.n_tokens == 150
    assert result.exact_lengths == tuple(range(1, 16))
    assert result.batches[0].rows == 150
    assert target.tokens == []


def test_logits_that_are_no_numbers_are_an_error() -> None:
    def disturb(n: int, _position: int, row: Row) -> None:
        row[3] = np.nan if n == 4 else row[3]

    with pytest.raises(BackendError, match="not numbers"):
        audit(FakeTarget(disturb))


def test_a_budget_ends_the_audit_and_says_so() -> None:
    result = audit(FakeTarget(), budget_s=0.0)
    assert not result.complete
    assert result.exact_lengths == ()


def test_with_a_budget_inexact_sizes_are_given_up() -> None:
    def disturb(n: int, _position: int, row: Row) -> None:
        if n in SIZES and n != 6:
            row += 1

    cases = [Case("", tuple(range(20)), 16), Case("", tuple(range(5, 25)), 16)]
    result = audit(FakeTarget(disturb), *cases, budget_s=60.0)
    assert result.exact_lengths == (5,)
    rows = {batch.batch_size: batch.rows for batch in result.batches}
    assert rows[6] == 24
    assert rows[2] == 2


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiny_targets_are_exact_where_their_kernels_are(tiny_target: TargetFactory, arch: str) -> None:
    """A hybrid one is put back to where its prefix ended; all cross into a second block."""
    engine = Engine(tiny_target(arch, "q8_0").path, n_ctx=512, n_threads=1, flash_attn="on")
    target = _loaded(engine)
    result = measure(target, deep_cases(Tokenizer(target), 512), (2, 3, 8, 16))
    assert result.exact_lengths == (1, 2, 7, 15)
    assert {block.first for batch in result.batches for block in batch.blocks} == {0, 256}
    assert target.length(0) == 0


def test_what_differs_is_found_on_a_real_target(tiny_target: TargetFactory) -> None:
    """Products with f32 weights are added up in another order from two rows on."""
    engine = Engine(tiny_target("llama", "f32").path, n_ctx=256, n_threads=1)
    target = _loaded(engine)
    result = measure(target, deep_cases(Tokenizer(target), 256), (2, 5))
    assert result.exact_lengths == ()
    assert all(batch.max_abs_diff and batch.max_abs_diff > 1e-4 for batch in result.batches)


def _loaded(engine: Engine) -> Any:
    """A target of the engine's settings that gives as many rows as an audit asks for."""
    from dspine_local.native_models import open_target

    return open_target(engine.target.path, engine.options, n_ctx=engine.options.n_ctx or 0, n_draft=15)


def test_taps_change_no_bit(tiny_target: TargetFactory) -> None:
    """The reference is decoded without a drafter's taps, verification with them."""
    engine = Engine(tiny_target("llama", "f32").path, n_ctx=256)
    target = _loaded(engine)
    tokens = target.tokenize(PROMPT * 4)
    plain = target.decode(0, tokens, n_outputs=8)
    target.truncate(0, 0)
    target.enable_taps([0, 2, 3])
    assert np.array_equal(plain.view(np.int32), target.decode(0, tokens, n_outputs=8).view(np.int32))


@pytest.mark.parametrize("n_ctx", [16, 64, 256, 300, 512, 4096])
def test_cases_fit_the_context_and_reach_its_last_block(audited_pair: Pair, n_ctx: int) -> None:
    tokenizer = Tokenizer(Engine(audited_pair[0], n_ctx=256).target)
    for cases in (deep_cases(tokenizer, n_ctx), list(short_cases(tokenizer, n_ctx))):
        for case in cases:
            assert case.prefix
            assert len(case.text) == case.n_tokens > 0
            assert len(case.prefix) + case.n_tokens <= n_ctx
        if n_ctx >= 64:
            assert max(len(case.prefix) for case in cases) // 256 == (n_ctx - 1) // 256


# What follows from it.


def test_unmeasured_blocks_lie_between_exact_ones_or_are_unknown() -> None:
    def batch(*blocks: BlockCount) -> BatchResult:
        return BatchResult(4, sum(b.rows for b in blocks), sum(b.identical for b in blocks), 0.0, 0.0, (), blocks)

    yes, no = (lambda first: BlockCount(first, 8, 8)), (lambda first: BlockCount(first, 8, 7))
    assert batch(yes(0), yes(768)).exact_ranges == [(0, 256), (256, 512), (512, 768), (768, 1024)]
    assert batch(yes(0), no(768)).exact_ranges == [(0, 256)]
    assert batch(no(0), yes(768)).exact_ranges == [(768, 1024)]
    assert batch(yes(256)).exact_ranges == [(256, 512)]
    assert batch(BlockCount(0, 3, 3)).exact_ranges == []  # not one whole batch
    assert batch().exact_ranges == []
    assert not batch().is_exact


def test_words() -> None:
    assert lengths_in_words([]) == "none"
    assert lengths_in_words([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    whole, half = [(0, 256), (256, 512)], [(0, 256)]
    assert exactness_in_words([whole, half, half, []], 512) == "1 everywhere; 2-3 at positions 0-255"
    assert (
        exactness_in_words([half, [(0, 256), (512, 768)]], 700) == "1 at positions 0-255; 2 at positions 0-255, 512-699"
    )
    assert exactness_in_words([whole], 300) == "1 everywhere"
    assert exactness_in_words([[], []], 512) == "none"


def test_json_and_back() -> None:
    result = result_of({1: (0, 256), 4: (0,)})
    result = replace(result, batches=(replace(result.batches[0], flip_margins=(0.25, 0.5)), *result.batches[1:]))
    assert AuditResult.from_json(json.loads(json.dumps(result.to_json()))) == result


# The command.


@pytest.fixture
def short_prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Why?", "category": "a"}\n{"prompt": "How?", "category": "b"}\n')
    return file


def test_the_command_measures_and_keeps(
    audited_pair: Pair, short_prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("-t", 1, "-fa", "on", "-ub", 32, "-c", 512)
    code, out, err = command(
        capsys, "audit", "-m", audited_pair[0], "--prompts", short_prompts, "-n", 20, "--json", *settings
    )
    assert code == 0, err
    told = json.loads(out)
    assert told["exact_lengths"] == list(range(1, 16))
    assert told["n_flips"] == 0
    assert told["n_ctx"] == 512
    (file,) = records(tmp_path)
    assert told["record"] == str(file)
    assert json.loads(file.read_text())["result"]["batches"] == told["batches"]
    engine = Engine(*audited_pair, strict=True, n_draft=15, **EXACT)  # finds it
    assert engine.exact_lengths == tuple(range(1, 16))
    code, out, _ = command(
        capsys, "audit", "-m", audited_pair[0], "-md", audited_pair[1], "--prompts", short_prompts, *settings
    )
    assert code == 0
    assert "Draft lengths for --strict: 1-15 everywhere." in out


def test_flips_are_exit_code_3(
    audited_pair: Pair,
    short_prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flipping = replace(result_of({1: (0,)}).batches[2], flip_margins=(0.125,))
    monkeypatch.setattr("dspine_local.audit.measure", lambda *_args, **_options: AuditResult(9, True, (flipping,)))
    code, out, _ = command(capsys, "audit", "-m", audited_pair[0], "--prompts", short_prompts)
    assert code == 3
    assert "Most likely tokens that changed: 1." in out
    assert "0.12" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("-n", 0), "--predict 0"),
        (("--limit", 0), "--limit 0"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        (("-md", "nowhere.gguf"), "nowhere.gguf"),
        (("-ctk", "f64"), "f64"),
    ],
)
def test_wrong_input_is_one_line(
    audited_pair: Pair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[object, ...],
    told: str,
) -> None:
    try:
        code, _, err = command(capsys, "audit", "-m", audited_pair[0], *arguments)
    except SystemExit as stop:
        code, err = int(stop.code or 0), capsys.readouterr().err
    assert code == 2
    assert told in err
    assert err.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_audits_of_one_model_add_up() -> None:
    """A short one takes nothing away from a long one, but for what it found to differ."""
    long, short = result_of({1: (0, 256), 2: (0, 256)}), result_of({1: (0,)})
    joined = long.joined(short)
    assert joined.ranges(2) == [[(0, 256)], []]
    assert joined.batches[0].rows == 256
    assert AuditResult.from_json(joined.to_json()) == joined
    nothing = AuditResult(0, True, ())
    assert long.joined(nothing).batches == nothing.joined(long).batches == long.batches
