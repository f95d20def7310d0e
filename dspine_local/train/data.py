"""First stage: prompts, and the target's own answers to them, as token ids in JSONL shards.

A shard is made of its number and the seed alone, so an interrupted one is simply made again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dspine_local.checks import INT32_MAX, UINT32_MAX, need_integer, need_number
from dspine_local.errors import ModelFormatError
from dspine_local.options import MAX_THREADS
from dspine_local.train.complete import Completer, Completion, Job
from dspine_local.train.prompts import PromptSource
from dspine_local.train.shards import claim, void, write_whole

ANSWER_TEMPERATURE = 0.7

Report = Callable[[int, int, str], None]
Rows = npt.NDArray[np.float16]


@dataclass(frozen=True)
class Conversation:
    """One conversation: prompt and answer tokens; the answer begins at ``answer_start``."""

    kind: str
    temperature: float
    answer_start: int
    tokens: list[int]

    @property
    def n_answer(self) -> int:
        """Tokens of the answer, its end token included."""
        return len(self.tokens) - self.answer_start


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is generated.

    Args:
        n_tokens: Answer tokens wanted in all.
        prompts: Text (one prompt per line) or JSONL file; None lets the target make up its own.
        max_prompt: Longest prompt, in tokens.
        max_answer: Longest answer, in tokens.
        greedy_share: Part of the answers that is generated at temperature 0, the others at 0.7.
        shard_size: Conversations per shard.
        n_parallel: Conversations that are generated together.
    """

    n_tokens: int = 1_500_000
    prompts: Path | None = None
    max_prompt: int = 160
    max_answer: int = 256
    greedy_share: float = 0.5
    shard_size: int = 512
    n_parallel: int = 32
    n_threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        need_integer("n_tokens", self.n_tokens, 1, 10**12)
        for name in ("max_prompt", "max_answer", "shard_size"):
            need_integer(name, getattr(self, name), 1, 1 << 24)
        need_integer("n_parallel", self.n_parallel, 1, 1 << 16)
        need_integer("n_threads", self.n_threads, 0, MAX_THREADS)
        need_integer("seed", self.seed, 0, UINT32_MAX)
        need_number("greedy_share", self.greedy_share, 0.0, 1.0)


def read_shard(path: Path, n_vocab: int | None = None) -> list[Conversation]:
    """The conversations of a shard.

    Args:
        n_vocab: Tokens that there are, to check those of the shard.
    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: A line that is no conversation, or a token outside the vocabulary.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            sequences = [Conversation(**json.loads(line)) for line in lines]
        for number, sequence in enumerate(sequences, start=1):
            tokens = sequence.tokens
            if set(map(type, tokens)) != {int} or not 0 < sequence.answer_start <= len(tokens):
                raise ValueError(f"line {number} is no conversation")
            if min(tokens) < 0 or max(tokens) >= (n_vocab or INT32_MAX):
                raise ValueError(f"line {number} has a token outside the vocabulary of {n_vocab or INT32_MAX}")
            need_number("temperature", sequence.temperature, 0.0)
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelFormatError(
            f"'{path}' is damaged ({error}): delete it, and features of that name, to have it made again"
        ) from error
    return sequences


def shard_path(folder: Path, index: int) -> Path:
    """Where shard ``index`` is."""
    return folder / f"shard-{index:05d}.jsonl"


def shard_named(folder: Path, name: str) -> Path:
    """Where the shard of a name is."""
    return folder / f"{name}.jsonl"


def complete_shards(folder: Path) -> list[Path]:
    """Every whole shard, in order."""
    return sorted(folder.glob("shard-*.jsonl"))


def count_answer_tokens(folder: Path) -> int:
    """Answer tokens in all whole shards."""
    return sum(sequence.n_answer for path in complete_shards(folder) for sequence in read_shard(path))


def generate_data(
    completer: Completer,
    source: PromptSource,
    folder: Path,
    options: DataOptions,
    report: Report,
    features: Path | None = None,
) -> int:
    """Make shards until they hold enough answer tokens; several processes may do so together.

    Args:
        features: Folder for the features of a completer that gives them.
    Returns:
        Answer tokens in all shards.
    """
    n_have = count_answer_tokens(folder)
    index = 0
    while n_have < options.n_tokens:
        path = shard_path(folder, index)
        index += 1
        if path.exists():
            continue
        with claim(path) as mine:
            if not mine or path.exists():
                continue
            prompts = source.make(index - 1)
            if prompts is None:
                break
            if not prompts:  # all of them too long: no shard of that number
                continue

            def told(n_new: int, n_done: int, n: int = n_have, i: int = index, n_all: int = len(prompts)) -> None:
                report(n + n_new, options.n_tokens, f"shard {i - 1}, {n_done} of {n_all}")

            sequences, rows = answer(completer, prompts, index - 1, options, told)
            if features is not None and rows is not None:
                write_whole(features / f"{path.stem}.npy", lambda partial, r=rows: save_rows(partial, r))  # type: ignore[misc]
            lines = "".join(json.dumps(asdict(s), separators=(",", ":")) + "\n" for s in sequences)
            write_whole(path, lambda partial, text=lines: void(partial.write_text(text, encoding="utf-8")))  # type: ignore[misc]
        n_have = count_answer_tokens(folder)
    return n_have


def answer(
    completer: Completer,
    prompts: Sequence[tuple[str, list[int]]],
    index: int,
    options: DataOptions,
    told: Callable[[int, int], None],
) -> tuple[list[Conversation], list[Rows] | None]:
    """The target's answers to (kind, prompt tokens) in order, and their features if the completer gives them."""
    rng = random.Random(f"{options.seed}/{index}/answers")  # noqa: S311
    jobs = [
        Job(
            tokens,
            options.max_answer,
            temperature=0.0 if rng.random() < options.greedy_share else ANSWER_TEMPERATURE,
            seed=rng.getrandbits(31),
        )
        for _, tokens in prompts
    ]
    done: dict[int, Completion] = {}
    n_new = 0
    for completion in completer.run(jobs):
        done[completion.index] = completion
        n_new += len(completion.tokens) - len(jobs[completion.index].tokens)
        told(n_new, len(done))
    sequences = [
        Conversation(kind, job.temperature, len(job.tokens), done[i].tokens)
        for i, ((kind, _), job) in enumerate(zip(prompts, jobs, strict=True))
    ]
    rows = [done[i].features for i in range(len(jobs))]
    given = [r for r in rows if r is not None]
    return sequences, given if len(given) == len(rows) else None


def save_rows(path: Path, rows: Sequence[Rows]) -> None:
    """Write one array, as ``.npy`` whatever the file's suffix."""
    with path.open("wb") as file:
        np.save(file, np.concatenate(rows))
