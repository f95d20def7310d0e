"""What an audit decodes: answers to prompts, and text far into the context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dspine_local.audit.result import BLOCK
from dspine_local.tokenizer import Tokenizer

DEEP_TOKENS = 64  # of each place in the context
SHORT_TOKENS = 16
FIRST_PREFIX = 32
# Prose, code and figures: what it says does not matter.
PASSAGE = """The harbour had been quiet since the storm. Two boats lay on the slip, one with her planking off, and the \
old carpenter walked around her every morning as if she might have mended herself overnight. "She was built in 1931," \
he told the children, "for 412 crowns and a barrel of herring, and she will be afloat again before the swallows \
leave." Nobody believed him except Ada, who kept the accounts and knew what oak cost.

def total(prices: dict[str, float], discount: float = 0.05) -> float:
    # A tenth of what is left goes to the yard.
    kept = [price * (1 - discount) for name, price in prices.items() if not name.startswith("_")]
    return round(sum(kept) * 0.9, 2)

1. Replace the garboard strake (3.20 m x 0.22 m, larch). 2. Caulk all seams below the waterline. 3. Paint: two coats, \
at least 16 hours apart, never below 8 degrees. In the table of tides for the week the highest water was 2.84 m on \
Thursday at 04:17; the lowest, 0.31 m, came on Sunday. Why does the moon pull harder on some days than on others? \
Because it is nearer then, and because the sun sometimes helps. Die Kinder fragten weiter, bis es dunkel wurde.

"""


@dataclass(frozen=True)
class Case:
    """A prefix, and what is decoded behind it: the text that goes on, or, where there is none, the greedy answer."""

    label: str
    prefix: tuple[int, ...]
    n_tokens: int
    text: tuple[int, ...] = ()


def chat_cases(tokenizer: Tokenizer, questions: Sequence[str], n_tokens: int, n_ctx: int) -> list[Case]:
    """Every question whose answer of n tokens fits into n_ctx positions, as the first of a chat.

    Without a chat template a question is taken as it is.
    """
    cases = []
    for i, question in enumerate(questions, start=1):
        if tokenizer.chat_template is None:
            tokens = tokenizer.encode(question)
        else:
            tokens = tokenizer.encode_chat([{"role": "user", "content": question}])
        if 0 < len(tokens) <= n_ctx - n_tokens:
            cases.append(Case(f"prompt {i} of {len(questions)}", tuple(tokens), n_tokens))
    return cases


def deep_cases(tokenizer: Tokenizer, n_ctx: int) -> list[Case]:
    """Text near the context's beginning, behind 256, 512, 1,024 ... positions, and near its end."""
    text = _Text(tokenizer)
    return [text.case(first, min(DEEP_TOKENS, n_ctx - first)) for first in _places(n_ctx)]


def short_cases(tokenizer: Tokenizer, n_ctx: int) -> Iterator[Case]:
    """Few tokens at the same places, nearest first; then others there, and so on."""
    text = _Text(tokenizer)
    for shift in (0, SHORT_TOKENS):
        for first in _places(n_ctx):
            if first + shift + SHORT_TOKENS <= n_ctx:
                yield text.case(first + shift, SHORT_TOKENS)


def _places(n_ctx: int) -> list[int]:
    """First positions of blocks, ever further apart; the last one that the context has is always there."""
    last = (n_ctx - 1) // BLOCK * BLOCK
    places = [min(FIRST_PREFIX, n_ctx // 2)]
    first = BLOCK
    while first < last:
        places.append(first)
        first *= 2
    return [*places, last] if last > 0 else places


class _Text:
    """The passage again and again, as long as is wanted."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokens = tuple(tokenizer.encode(PASSAGE))

    def case(self, n_prefix: int, n_tokens: int) -> Case:
        n = n_prefix + n_tokens
        tokens = (self._tokens * (n // len(self._tokens) + 1))[:n]
        return Case(f"position {n_prefix:,}", tokens[:n_prefix], n_tokens, tokens[n_prefix:])
