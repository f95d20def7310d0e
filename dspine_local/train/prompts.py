"""Where prompts come from: a file, or the target itself, which completes the beginning of a user's message."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Protocol

from dspine_local.chat_template import render_chat
from dspine_local.checks import check_encodable, decode_utf8
from dspine_local.errors import ModelFormatError
from dspine_local.files import need_regular
from dspine_local.tokenizer import Tokenizer
from dspine_local.train.complete import Completer, Job
from dspine_local.train.openings import KINDS

MARK = "\u2063user text\u2063"
MIN_CHARACTERS = 12
# JSONL prompt files name the text in one of these ways.
TEXT_KEYS = ("prompt", "question", "text", "instruction")

Prompts = list[tuple[str, list[int]]]


class PromptSource(Protocol):
    """Where a shard's prompts come from."""

    def make(self, index: int) -> Prompts | None:
        """(category, tokens) of shard ``index``, which may be none; None when there are no more."""


class SelfPrompts:
    """Prompts that the target makes up at temperature 1 behind its chat template's user prefix.

    Args:
        n_prompts: Per shard, at most; ``max_prompt`` is the longest, in tokens.
    """

    def __init__(
        self, completer: Completer, tokenizer: Tokenizer, *, n_prompts: int, max_prompt: int, seed: int
    ) -> None:
        self._completer, self._tokenizer = completer, tokenizer
        self._n_prompts, self._max_prompt, self._seed = n_prompts, max_prompt, seed
        if tokenizer.chat_template is None:
            raise ValueError("the target has no chat template to make prompts with: give a file with --prompts")
        text = render_chat(
            tokenizer.chat_template,
            [{"role": "user", "content": MARK}],
            bos_token=tokenizer.bos_text,
            eos_token=tokenizer.eos_text,
            add_generation_prompt=False,
        )
        self._prefix = text.split(MARK)[0]

    def make(self, index: int) -> Prompts | None:
        """The prompts of shard ``index``: whole, different, printable."""
        rng = random.Random(f"{self._seed}/{index}/prompts")  # noqa: S311
        kinds = list(KINDS)
        openings = [(kinds[i % len(kinds)], rng.choice(KINDS[kinds[i % len(kinds)]])) for i in range(self._n_tries())]
        prefixes = [self._tokenizer.encode(self._prefix + opening) for _, opening in openings]
        jobs = [
            Job(prefix, self._max_prompt // 2, temperature=1.0, seed=rng.getrandbits(31), top_k=100, top_p=0.98)
            for prefix in prefixes
        ]
        made: list[tuple[str, str] | None] = [None] * len(jobs)
        for completion in self._completer.run(jobs):
            if completion.ended:
                kind, opening = openings[completion.index]
                text = opening + self._tokenizer.decode(completion.tokens[len(prefixes[completion.index]) :])
                made[completion.index] = (kind, text.strip())
        prompts: Prompts = []
        seen = set()
        for kind, text in (prompt for prompt in made if prompt is not None):
            key = " ".join(text.lower().split())
            tokens = self._tokenizer.encode_chat([{"role": "user", "content": text}])
            if key not in seen and is_sound(text) and len(tokens) <= self._max_prompt:
                seen.add(key)
                prompts.append((kind, tokens))
        return prompts[: self._n_prompts] or None  # trying again would not help

    def _n_tries(self) -> int:
        """More than wanted: about a fifth has no end, or is no good."""
        return self._n_prompts * 5 // 4


class GivenPrompts:
    """Prompts of a file: text with one per line, or JSONL with ``prompt`` (and perhaps ``category``)."""

    def __init__(self, path: Path, tokenizer: Tokenizer, *, n_prompts: int, max_prompt: int) -> None:
        self._tokenizer, self._n_prompts, self._max_prompt = tokenizer, n_prompts, max_prompt
        self._prompts = read_prompts(path)

    def make(self, index: int) -> Prompts | None:
        """The prompts of shard ``index`` that are not too long; None when the file is used up."""
        part = self._prompts[index * self._n_prompts : (index + 1) * self._n_prompts]
        if not part:
            return None
        encoded = [(kind, self._tokenizer.encode_chat([{"role": "user", "content": text}])) for kind, text in part]
        return [p for p in encoded if len(p[1]) <= self._max_prompt]


def is_sound(text: str) -> bool:
    """Whether a made-up prompt is text that a person might have written."""
    printable = all(c.isprintable() or c in "\n\t" for c in text)
    return len(text) >= MIN_CHARACTERS and printable and "\ufffd" not in text and "<|" not in text


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(category, text) of every prompt in a text or JSONL file.

    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: Not a regular file, a line without a prompt, or no line at all.
        ValueError: Text that is not UTF-8.
    """
    need_regular(path, "the prompts")
    prompts = []
    # Not splitlines, which also ends lines inside JSON strings (U+2028 and others).
    for number, line in enumerate(decode_utf8(f"'{path}'", path.read_bytes()).split("\n"), start=1):
        if line.strip():
            where = f"'{path}' line {number}"
            kind, text = _json_prompt(line, where, path.stem) if path.suffix == ".jsonl" else (path.stem, line.strip())
            check_encodable(where, text)
            prompts.append((kind, text))
    if not prompts:
        raise ModelFormatError(f"'{path}' has no prompts")
    return prompts


def _json_prompt(line: str, where: str, default_kind: str) -> tuple[str, str]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{where} is not JSON: {error}") from error
    found = [entry[key] for key in TEXT_KEYS if isinstance(entry.get(key), str)] if isinstance(entry, dict) else []
    if not found or not found[0].strip():
        raise ModelFormatError(
            f"{where} has no prompt, expected an object with text in one of the keys {', '.join(TEXT_KEYS)}"
        )
    return str(entry.get("category", default_kind)), found[0]
