"""Drafters in several types: how they are compared, what is recommended, and a sweep's folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DrafterFactory, TargetFactory

from dspine_local.cli import main
from dspine_local.convert import convert_checkpoint
from dspine_local.errors import ModelFormatError, PairingError
from dspine_local.evaluation.prompts import Prompt
from dspine_local.sweep import PromptResult, TypeResult, compare, recommend, run, sweep_types
from dspine_local.sweep.report import advice, sweep_table

PROMPTS = [Prompt(category, (f"{category} {i}",)) for category in ("math", "chat") for i in range(2)]


def result(name: str, n_bytes: int, *, lengths: tuple[float, ...] = (2.0, 2.2, 1.8, 1.9), draft: float = 1.0) -> Any:
    """A type whose answers have these acceptance lengths; one draft takes ``draft`` of ten for a decode."""
    prompts = tuple(
        PromptResult(category, 100, round(100 * length), draft * 100, 10.0 * 100)
        for category, length in zip(("math", "math", "chat", "chat"), lengths, strict=True)
    )
    return TypeResult(name, f"d-{name}.gguf", n_bytes, {name: 30, "f32": 5}, prompts)


# Comparing.


def test_expected_speed_is_length_over_time() -> None:
    large, small = compare([result("f16", 200, draft=2.0), result("q8_0", 100, draft=1.0)])
    assert large.result.length == pytest.approx((2.1 + 1.85) / 2)
    assert large.speed == pytest.approx((10 + 1) / (10 + 2))
    assert (small.speed, small.low, small.high) == (1, 1, 1)
    assert large.low == pytest.approx(large.high)  # the same answers: only the drafts' time differs


def test_the_smallest_as_fast_as_any_is_recommended() -> None:
    compared = compare([result("f16", 200), result("q8_0", 100), result("q4_0", 50, lengths=(1.5, 1.6, 1.4, 1.3))])
    assert recommend(compared).result.type == "q8_0"
    assert [c.as_fast for c in compared] == [True, True, False]
    assert [c.is_pareto for c in compared] == [False, True, True]


def test_a_difference_within_the_spread_is_none() -> None:
    noisy = (2.3, 1.9, 1.9, 1.8)  # better on one prompt, worse on another
    assert recommend(compare([result("f16", 200), result("q4_0", 50, lengths=noisy)])).result.type == "q4_0"


def test_a_small_file_that_is_measurably_slower_is_not_taken_however_many_prompts() -> None:
    slower = tuple(0.95 * length for length in (2.0, 2.2, 1.8, 1.9))
    fast, slow = compare([result("f16", 200), result("q4_0", 50, lengths=slower)])
    assert slow.high < 1
    assert recommend([fast, slow]) is fast


def test_wide_spread_does_not_excuse_a_slow_type() -> None:
    """With few prompts anything might be as fast: more than the tolerance below is not taken all the same."""
    wild = (1.0, 3.0, 1.0, 2.3)
    compared = compare([result("f16", 200), result("q4_0", 50, lengths=wild)])
    assert compared[1].high > 1
    assert recommend(compared).result.type == "f16"


def test_one_prompt_of_a_category_is_refused() -> None:
    lonely = replace(result("f16", 200), prompts=result("f16", 200).prompts[:3])
    with pytest.raises(ValueError, match="one prompt of chat, expected at least two"):
        compare([lonely])


def test_types_of_other_prompts_are_not_compared() -> None:
    other = replace(result("q8_0", 100), prompts=result("q8_0", 100).prompts[::-1])
    with pytest.raises(ValueError, match="same prompts"):
        compare([result("f16", 200), other])
    with pytest.raises(ValueError, match="must be one"):
        compare([])


def test_table_and_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    fallen_back = replace(result("q4_k", 60), types={"q4_k": 20, "q5_0": 10, "f32": 5})
    compared = compare([result("f16", 200), fallen_back, result("q4_0", 50, lengths=(1.5, 1.6, 1.4, 1.3))])
    Console(width=80).print(sweep_table(compared))
    out = capsys.readouterr().out
    assert "q4_k (10 others)" in out
    assert "…" not in out  # nothing is cut at 80 columns
    assert advice(recommend(compared), compared) == (
        "Take q4_k: the smallest that is not measurably slower than f16, the fastest (+0.0 %; up to 2 % is allowed); "
        "smaller ones are slower: q4_0."
    )


# A sweep.


@pytest.fixture(scope="module")
def pair(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A target and its drafter in f16."""
    tiny = tiny_target("llama", "q8_0")
    drafter = tmp_path_factory.mktemp("pair") / "tiny.gguf"
    convert_checkpoint(tiny_drafter(tiny), drafter, outtype="f16", target=tiny.path)
    return tiny.path, drafter


def sweep(pair: tuple[Path, Path], folder: Path, **options: Any) -> Any:
    arguments: dict[str, Any] = {"types": ["f16", "q8_0"], "max_tokens": 6}
    return sweep_types(*pair, folder, PROMPTS, **(arguments | options))


def counts(results: Any) -> list[Any]:
    return [(r.type, r.n_bytes, [(p.category, p.rounds, p.emitted) for p in r.prompts]) for r in results.results]


def test_a_target_of_another_drafter_is_refused_before_anything_is_written(
    pair: tuple[Path, Path], tiny_target: TargetFactory, tmp_path: Path
) -> None:
    other = tiny_target("llama", "q8_0", n_embd=128).path
    with pytest.raises(PairingError):
        sweep((other, pair[1]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_type_answers_every_prompt(pair: tuple[Path, Path], tmp_path: Path) -> None:
    found = sweep(pair, tmp_path / "out")
    assert [r.type for r in found.results] == ["f16", "q8_0"]
    for r in found.results:
        assert (tmp_path / "out" / r.file).stat().st_size == r.n_bytes
        assert [p.category for p in r.prompts] == [p.category for p in PROMPTS]
        assert all(p.rounds <= p.emitted <= 5 and p.draft_s > 0 for p in r.prompts if p.rounds)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("sweep.json", "tiny-f16.gguf", "tiny-q8_0.gguf")
    ]


def test_a_killed_sweep_is_in_no_ones_way(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """What a process leaves that had no time to clean up."""
    first = sweep(pair, tmp_path / "out", types=["f16"])
    (tmp_path / "out" / "tiny-q8_0.unmeasured").write_bytes(b"half")
    both = sweep(pair, tmp_path / "out")
    assert counts(both)[0] == counts(first)[0]
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".gguf", ".gguf", ".json"]


def test_an_interrupted_sweep_goes_on(pair: tuple[Path, Path], tmp_path: Path) -> None:
    whole = sweep(pair, tmp_path / "whole")
    seen: list[str] = []

    def interrupt(_done: int, _total: int, label: str) -> None:
        seen.append(label)
        if label.endswith("q8_0"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(pair, tmp_path / "cut", report=interrupt)
    assert not (tmp_path / "cut" / "tiny-q8_0.gguf").exists()  # a file without figures
    first = json.loads((tmp_path / "cut" / "sweep.json").read_text())["results"]
    seen.clear()
    resumed = sweep(pair, tmp_path / "cut", report=lambda _d, _n, label: seen.append(label))
    assert counts(resumed) == counts(whole)
    assert json.loads((tmp_path / "cut" / "sweep.json").read_text())["results"][0] == first[0]  # not measured again
    assert set(seen) == {"tiny-q8_0"}


def test_a_file_that_was_deleted_is_made_again(pair: tuple[Path, Path], tmp_path: Path) -> None:
    before = sweep(pair, tmp_path)
    (tmp_path / "tiny-f16.gguf").unlink()
    assert counts(sweep(pair, tmp_path)) == counts(before)
    assert (tmp_path / "tiny-f16.gguf").is_file()


def test_a_folder_of_another_sweep_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    sweep(pair, tmp_path, types=["f16"])
    with pytest.raises(ValueError, match="max_tokens 6, now 7"):
        sweep(pair, tmp_path, types=["f16"], max_tokens=7)
    assert counts(sweep(pair, tmp_path, types=["f16"], max_tokens=7, overwrite=True))


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 1, "about": {}, "results": [{"type": 3}]}'])
def test_a_damaged_record_is_named(pair: tuple[Path, Path], tmp_path: Path, content: str) -> None:
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(ModelFormatError, match=r"sweep\.json"):
        sweep(pair, tmp_path)


def test_files_of_others_are_not_replaced(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "tiny-q8_0.gguf").write_text("mine")
    with pytest.raises(FileExistsError, match="--force"):
        sweep(pair, tmp_path)
    assert (tmp_path / "tiny-q8_0.gguf").read_text() == "mine"
    assert not (tmp_path / "tiny-f16.gguf").exists()  # refused before the first type


def test_what_cannot_be_done_is_refused_first(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "Engine", None)  # nothing is loaded
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"types = \['q8_0', 'q9'\], expected some of"):
        sweep(pair, out, types=["q8_0", "q9"])
    with pytest.raises(ValueError, match="expected at least two per category"):
        sweep_types(*pair, out, [])
    with pytest.raises(ValueError, match="expected at least two per category"):
        sweep_types(*pair, out, PROMPTS[:3])
    quantized = tmp_path / "quantized"
    monkeypatch.undo()
    sweep(pair, quantized, types=["q8_0"])
    with pytest.raises(ValueError, match="quantized"):
        sweep_types(pair[0], quantized / "tiny-q8_0.gguf", out, PROMPTS)
    assert not out.exists()


# The command.


def command(pair: tuple[Path, Path], folder: Path, *more: str) -> list[str]:
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text("".join(json.dumps({"category": p.category, "prompt": p.turns[0]}) + "\n" for p in PROMPTS))
    return [
        *("quantize-sweep", "-m", str(pair[0]), "-md", str(pair[1]), "--out", str(folder / "out")),
        *("--prompts", str(prompts), "--types", "f16,Q8_0", "-n", "6", *more),
    ]


def test_command(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(command(pair, tmp_path, "--json", "--plot", str(tmp_path / "sweep.png"))) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"] in ("f16", "q8_0")
    assert found["about"]["max_tokens"] == 6
    for one in found["types"]:
        assert set(one) == {
            *("type", "file", "n_bytes", "types", "length", "draft_s", "draft_share", "speed", "low", "high"),
            *("length_difference", "length_low", "length_high", "is_pareto", "as_fast"),
        }
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    assert main(command(pair, tmp_path)) == 0
    out = capsys.readouterr().out
    assert "One drafter in several types" in out
    assert f"Take {found['recommended']}" in out


def test_wrong_usage(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize-sweep", "-m", str(pair[0]), "--out", str(tmp_path)]) == 2
    assert "needs a drafter" in capsys.readouterr().err
    for more, message in (
        (("--limit", "1"), "limit 1"),
        (("-n", "1"), "expected"),
        (("--types", "q8_0,"), "types = "),
        (("--plot", str(tmp_path / "no" / "x.png")), "no"),
    ):
        assert main(command(pair, tmp_path, *more)) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
