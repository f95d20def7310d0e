"""Prompt sets: the project's own, and seven public benchmarks in the formats that they are published in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine_local.checks import check_encodable, decode_utf8
from dspine_local.errors import ModelFormatError
from dspine_local.files import StrPath, checked_path


@dataclass(frozen=True)
class Prompt:
    """One conversation's user turns: the second is asked when the first has been answered, and so on."""

    category: str
    turns: tuple[str, ...]


# What published instructions ask for; a benchmark's bare question would get another kind of answer.
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
COMPLETE = "Complete the following Python function. Return the whole function.\n\n```python\n{}\n```"
PROGRAM = "Write a Python program that solves the following problem.\n\n{}"


def _gsm8k(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (row["question"] + BOXED,)


def _math500(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (row["problem"] + BOXED,)


def _humaneval(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (COMPLETE.format(row["prompt"].rstrip()),)


def _mbpp(row: Mapping[str, Any]) -> tuple[str, ...]:
    tests = "\n".join(row["test_list"])
    text = row.get("text") or row["prompt"]
    return (f"{text}\nYour code should pass these tests:\n\n{tests}",)


def _livecodebench(row: Mapping[str, Any]) -> tuple[str, ...]:
    starter = row.get("starter_code") or ""
    given = f"\n\nUse this starter code:\n\n```python\n{starter}\n```" if starter else ""
    return (PROGRAM.format(row["question_content"]) + given,)


def _turns(row: Mapping[str, Any]) -> list[Any]:
    if not isinstance(row["turns"], list):  # text would be taken apart into its characters
        raise TypeError(f"turns is a {type(row['turns']).__name__}")
    return row["turns"]


def _mt_bench(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_turns(row))


def _arena_hard(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "turns" in row:  # version 0.1: [{"content": ...}]
        return tuple(turn["content"] for turn in _turns(row))
    return (row["prompt"],)


def _own(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (row["prompt"],)


@dataclass(frozen=True)
class _Format:
    """A published format: told apart by its keys, and how its prompts are made."""

    name: str
    keys: tuple[str, ...]
    turns: Callable[[Mapping[str, Any]], tuple[str, ...]]


# In this order: the first whose keys a row has.
FORMATS = (
    _Format("mt-bench", ("question_id", "category", "turns"), _mt_bench),
    _Format("arena-hard", ("question_id", "cluster", "turns"), _arena_hard),
    _Format("arena-hard", ("uid", "category", "prompt"), _arena_hard),
    _Format("livecodebench", ("question_content", "question_id"), _livecodebench),
    _Format("humaneval", ("task_id", "prompt", "entry_point"), _humaneval),
    _Format("mbpp", ("task_id", "code", "test_list"), _mbpp),
    _Format("math-500", ("problem", "answer"), _math500),
    _Format("gsm8k", ("question", "answer"), _gsm8k),
    _Format("own", ("prompt",), _own),
)


def own_prompts() -> Path:
    """The folder of the project's own prompts: part of the installed package, or of the source tree it runs from.

    Raises:
        FileNotFoundError: Neither has it.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "prompts", package.parent / "benchmarks" / "prompts"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the project's prompts are not installed, expected them in '{package / 'prompts'}'")


def load_prompts(path: StrPath, *, limit: int | None = None) -> list[Prompt]:
    """Read prompts: one JSONL file, or every ``*.jsonl`` of a folder.

    Files are told apart by their keys: GSM8K, MATH-500, HumanEval, MBPP, LiveCodeBench, MT-Bench, Arena-Hard, or
    ``{"prompt": ..., "category": ...}``. A benchmark is one category; ours name theirs, or are the file's.

    Args:
        limit: Prompts of each category at most: the first ones.
    Raises:
        FileNotFoundError: No such file, or a folder without ``*.jsonl``.
        ModelFormatError: A line that is not JSON, of no known format, or without text.
        ValueError: Text that is not UTF-8, or a path with a NUL character.
    """
    path = checked_path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"no prompts in '{path}', expected a .jsonl file or a folder with some")
    prompts: list[Prompt] = []
    counts: dict[str, int] = {}
    for file in files:
        # Not splitlines, which also ends lines inside JSON strings (U+2028 and others).
        for number, line in enumerate(decode_utf8(f"'{file}'", file.read_bytes()).split("\n"), start=1):
            if not line.strip():
                continue
            prompt = _read_line(file, number, line)
            counts[prompt.category] = counts.get(prompt.category, 0) + 1
            if limit is None or counts[prompt.category] <= limit:
                prompts.append(prompt)
    if not prompts:
        raise ModelFormatError(f"'{path}' has no prompts")
    return prompts


def _read_line(file: Path, number: int, line: str) -> Prompt:
    where = f"'{file}' line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{where} is not JSON: {error}") from error
    if isinstance(row, dict):
        for form in FORMATS:
            if all(key in row for key in form.keys):
                try:
                    turns = form.turns(row)
                except (KeyError, TypeError, AttributeError, IndexError) as error:
                    raise ModelFormatError(
                        f"{where} looks like {form.name}, but could not be read: {error!r}"
                    ) from error
                if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
                    raise ModelFormatError(f"{where} has an empty prompt, or one that is no text")
                for turn in turns:
                    check_encodable(where, turn)
                return Prompt(str(row.get("category", file.stem)) if form.name == "own" else form.name, turns)
    known = ", ".join(dict.fromkeys(form.name for form in FORMATS))
    raise ModelFormatError(f"{where} is of no known format ({known})")
