"""Where prompts come from: a file, or the target itself, which completes the beginning of a user's message."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from dspine_local.chat_template import render_chat
from dspine_local.engine import Engine
from dspine_local.options import SamplingOptions
from dspine_local.train.openings import KINDS

if TYPE_CHECKING:
    from dspine_local.train.data import DataOptions

MARK = "\u2063user text\u2063"
MIN_CHARACTERS = 12
# JSONL prompt files name the text in one of these ways.
TEXT_KEYS = ("prompt", "question", "text", "instruction")

Prompts = list[tuple[str, list[int]]]


class SelfPrompts:
    """Prompts that the target makes up at temperature 1 behind its chat template's user prefix."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        template = engine.tokenizer.chat_template
        if template is None:
            raise ValueError("the target has no chat template to make prompts with: give a file with --prompts")
        tokenizer = engine.tokenizer
        text = render_chat(
            template,
            [{"role": "user", "content": MARK}],
            bos_token=tokenizer.bos_text,
            eos_token=tokenizer.eos_text,
            add_generation_prompt=False,
        )
        self._prefix = text.split(MARK)[0]

    def make(self, index: int, options: DataOptions) -> Prompts:
        """The prompts of shard ``index``: whole, different, printable."""
        rng = random.Random(f"{options.seed}/{index}/prompts")  # noqa: S311
        running = []
        for i in range(options.shard_size * 5 // 4):
            kind = list(KINDS)[i % len(KINDS)]
            opening = rng.choice(KINDS[kind])
            sampling = SamplingOptions(
                temperature=1.0, top_k=100, top_p=0.98, min_p=0.0, seed=rng.getrandbits(31)
            )
            generation = self._engine.generate(
                self._prefix + opening, max_tokens=options.max_prompt // 2, sampling=sampling
            )
            running.append((kind, opening, generation))
        prompts: Prompts = []
        seen = set()
        for kind, opening, generation in running:
            generation.read()
            text = (opening + generation.text).strip()
            key = " ".join(text.lower().split())
            if generation.finish_reason != "stop" or key in seen or not is_sound(text):
                continue
            seen.add(key)
            prompts.append((kind, self._engine.tokenizer.encode_chat([{"role": "user", "content": text}])))
        return [p for p in prompts if len(p[1]) <= options.max_prompt][: options.shard_size]


class GivenPrompts:
    """Prompts of a file: text with one per line, or JSONL with ``prompt`` (and perhaps ``category``)."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._prompts = read_prompts(path)

    def make(self, index: int, options: DataOptions) -> Prompts:
        """The prompts of shard ``index``; none when the file is used up."""
        part = self._prompts[index * options.shard_size : (index + 1) * options.shard_size]
        encoded = [
            (kind, self._engine.tokenizer.encode_chat([{"role": "user", "content": text}])) for kind, text in part
        ]
        return [p for p in encoded if len(p[1]) <= options.max_prompt]


def is_sound(text: str) -> bool:
    """Whether a made-up prompt is text that a person might have written."""
    printable = all(c.isprintable() or c in "\n\t" for c in text)
    return len(text) >= MIN_CHARACTERS and printable and "\ufffd" not in text and "<|" not in text


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(category, text) of every prompt in a text or JSONL file.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A line without a prompt, or no line at all.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: '{path}'")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            prompts.append((path.stem, line.strip()))
            continue
        entry = json.loads(line)
        text = next((entry[key] for key in TEXT_KEYS if isinstance(entry.get(key), str)), None)
        if not text:
            raise ValueError(f"'{path}' line {number} has no prompt, expected one of the keys {', '.join(TEXT_KEYS)}")
        prompts.append((str(entry.get("category", path.stem)), text))
    if not prompts:
        raise ValueError(f"'{path}' has no prompts")
    return prompts
