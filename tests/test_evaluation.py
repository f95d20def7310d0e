"""Prompt formats, and the acceptance that is counted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TinyTarget

from dspine_local import Engine
from dspine_local.cli import main
from dspine_local.convert import convert_checkpoint
from dspine_local.errors import ModelFormatError
from dspine_local.evaluation import evaluate, load_prompts
from dspine_local.evaluation.measure import summarize
from dspine_local.stats import GenerationStats

OWN_PROMPTS = Path(__file__).parents[1] / "benchmarks" / "prompts"

PUBLISHED: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "It is 3.\n#### 3"},
    "math-500": {"problem": "Find x.", "solution": "...", "answer": "3", "subject": "Algebra", "level": 1},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": ""},
    "mbpp": {"task_id": 1, "text": "Write f.", "code": "def f(): ...", "test_list": ["assert f()"]},
    "livecodebench": {"question_id": "1", "question_content": "Sort.", "starter_code": "class Solution:"},
    "mt-bench": {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
    "arena-hard": {"question_id": "a", "cluster": "c", "turns": [{"content": "Build."}]},
}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_own_prompts() -> None:
    prompts = load_prompts(OWN_PROMPTS)
    counts = {c: sum(p.category == c for p in prompts) for c in ("math", "code", "chat", "writing")}
    assert counts == {"math": 20, "code": 20, "chat": 20, "writing": 20}
    assert len({p.turns for p in prompts}) == 80
    assert len(load_prompts(OWN_PROMPTS, limit=3)) == 12


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_formats(tmp_path: Path, name: str) -> None:
    (prompt,) = load_prompts(write(tmp_path / "set.jsonl", PUBLISHED[name]))
    assert prompt.category == name
    assert len(prompt.turns) == (2 if name == "mt-bench" else 1)


def test_newer_arena_hard(tmp_path: Path) -> None:
    row = {"uid": "x", "category": "hard_prompt", "subcategory": "coding", "prompt": "Build."}
    assert load_prompts(write(tmp_path / "set.jsonl", row))[0].category == "arena-hard"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 1 is not JSON"),
        ('{"text": 1}', "line 1 is of no known format"),
        ("[1]", "no known format"),
        ('{"prompt": ""}', "empty prompt"),
        ('{"question_id": 1, "category": "x", "turns": null}', "could not be read"),
        ("", "no prompts"),
        ('{"question_id": 1, "category": "x", "turns": "text"}', "could not be read"),
        ('{"question_id": 1, "cluster": "x", "turns": "text"}', "could not be read"),
        ('{"prompt": "  "}', "empty prompt"),
        pytest.param("[" * 100_000, "line 1 is not JSON", id="deep"),
    ],
)
def test_wrong_files(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ModelFormatError, match=message):
        load_prompts(path)


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    for content, message in (
        (b'{"prompt": "x"}\n{"prompt": "\\ud800"}', r"line 2 has the lone surrogate U\+D800 at byte 0"),
        (b'{"prompt": "\xff"}', "has the byte 0xff at byte 12, expected UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_prompts(path)


def test_a_line_end_inside_json_is_no_line_end(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "one\u2028two\x85three"}\r\n', encoding="utf-8")
    assert load_prompts(path)[0].turns == ("one\u2028two\x85three",)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0"], "--predict 0, expected an integer from 1"),
        (["-np", "0"], "--parallel 0, expected an integer from 1 to 256"),
        (["-np", "257"], "--parallel 257, expected"),
        (["--limit", "0"], "--limit 0, expected an integer from 1"),
        (["-np", "100", "-c", "99999999"], "--ctx-size 99999999, expected an integer from 0 to 21474836"),
        (["--n-draft", "-1"], "--n-draft -1, expected"),
        (["--prompts", "nowhere.jsonl"], "no prompts in 'nowhere.jsonl'"),
    ],
)
def test_wrong_values_are_named(
    models: tuple[Path, Path], capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    target, drafter = map(str, models)
    assert main(["eval", "-m", target, "-md", drafter, "--prompts", str(OWN_PROMPTS), *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no prompts in"):
        load_prompts(tmp_path)


def test_summary_adds_up() -> None:
    empty = dict.fromkeys(GenerationStats.__dataclass_fields__, 0)
    a = GenerationStats(**{**empty, "generated": 7, "rounds": 3, "accepted": 3, "drafted_per_position": (3, 3),
                           "accepted_per_position": (2, 1)})  # fmt: skip
    b = GenerationStats(**{**empty, "generated": 2, "rounds": 1, "accepted": 0, "drafted_per_position": (1,),
                           "accepted_per_position": (0,)})  # fmt: skip
    result = summarize("x", [a, b])
    assert result.acceptance_length == 7 / 4
    assert result.accepted_by_position == (0.5, 1 / 3)
    assert summarize("none", []).acceptance_length is None


@pytest.fixture
def models(
    tiny_target: Callable[..., TinyTarget], tiny_drafter: Callable[..., Path], tmp_path: Path
) -> tuple[Path, Path]:
    """A tiny target and a random drafter of it."""
    target = tiny_target("llama")
    drafter = tmp_path / "drafter.gguf"
    convert_checkpoint(tiny_drafter(target), drafter, target=target.path)
    return target.path, drafter


def test_evaluate_counts_every_prompt(models: tuple[Path, Path]) -> None:
    prompts = load_prompts(OWN_PROMPTS, limit=2)
    reports = [
        evaluate(Engine(*models, n_ctx=n * 2048, n_parallel=n, n_draft=3), prompts, max_tokens=12) for n in (1, 3)
    ]
    for report in reports:
        assert [c.n_prompts for c in report.categories] == [2, 2, 2, 2]
        assert all(c.n_tokens <= 24 for c in report.categories)
        assert report.mean is not None
        assert report.mean >= 1
    tiny = evaluate(Engine(*models, n_ctx=64, n_draft=3), prompts, max_tokens=4)
    assert tiny.skipped > 0
    assert tiny.skipped + sum(c.n_prompts for c in tiny.categories) == 8


def test_command(models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = map(str, models)
    arguments = ["eval", "-m", target, "-md", drafter, "--prompts", str(OWN_PROMPTS), "--limit", "1", "-n", "8"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["category"] for c in found["categories"]] == ["chat", "code", "math", "writing"]
    assert main(arguments) == 0
    assert "mean" in capsys.readouterr().out
    assert main(arguments[:3] + arguments[5:]) == 2
    assert "needs a drafter" in capsys.readouterr().err


def test_plot(models: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from dspine_local.evaluation.plot import plot_report

    report = evaluate(Engine(*models, n_draft=3), load_prompts(OWN_PROMPTS, limit=1), max_tokens=8)
    plot_report(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_refused_before_the_work(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("dspine_local.cli.eval.evaluate", lambda *_args, **_options: pytest.fail("worked"))
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "link.png").symlink_to("nothing")
    for name, message in (
        ("fifo.png", "is a FIFO"),
        ("link.png", "is a symbolic link to nothing"),
        ("nowhere/plot.png", "no such folder"),
        (".", "is a folder"),
    ):
        arguments = ["-m", str(models[0]), "-md", str(models[1]), "--prompts", str(OWN_PROMPTS)]
        assert main(["eval", *arguments, "--plot", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "link.png").is_symlink()
