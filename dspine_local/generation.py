"""A running request: its text, tokens and statistics as rounds add to them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self

from dspine_local._native import StepEvent, TokenLogprobs
from dspine_local.errors import BackendError
from dspine_local.options import GenerationOptions
from dspine_local.stats import GenerationStats
from dspine_local.text import TextStream

if TYPE_CHECKING:
    from dspine_local.engine import Engine


class Chunk(NamedTuple):
    """What one round added to an answer.

    ``text`` ends at a whole character and before what may become a stop text, so it need not be the text of
    ``tokens``. The first ``n_accepted`` tokens were drafted, the others sampled.
    """

    text: str
    tokens: tuple[int, ...] = ()
    n_accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Generation(Iterator[str]):
    """A running request: an iterator over pieces of text that end at whole characters.

    Leaving a ``with`` block, ``close()``, or an exception while iterating ends the request and frees its slot.
    ``finish_reason`` is ``"stop"``, ``"length"`` or ``"cancelled"`` once finished, None before; ``stop_text`` is the
    stop text that ended it. ``logprobs`` has an entry per token when ``n_probs`` was given.

    Any thread may read or close it. Each piece goes to one reader; closing does not wait for one.
    """

    def __init__(self, engine: Engine, request_id: int, prompt: list[int], options: GenerationOptions) -> None:
        self._engine = engine
        self._id = request_id
        self._options = options
        self._stream = TextStream(options.stop)
        self._pieces: list[str] = []
        self._reading = threading.Lock()  # held while waiting for an event, so that readers take turns
        self._state = threading.RLock()  # of what follows; never held while waiting
        self.prompt_tokens = prompt
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self._last: StepEvent | None = None

    @property
    def stats(self) -> GenerationStats | None:
        """Statistics so far; None before the first token."""
        with self._state:
            if self._last is None:
                return None
            return replace(
                GenerationStats.from_native(self._last.stats),
                generated=len(self.tokens),
                exact_draft_lengths=self._engine.exact_lengths,
            )

    @property
    def slot(self) -> int | None:
        """Where it runs or ran; None while it is queued."""
        return None if self._last is None else self._last.slot

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended the answer."""
        return self._stream.stop_text

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def __next__(self) -> str:
        self._engine._check_process()  # a forked child's copy of a lock may be held for ever
        with self._reading:
            while self.finish_reason is None:
                try:
                    chunk = self._advance(self._engine._next_event(self._id))
                except BaseException:
                    self.close()
                    raise
                if chunk.text:
                    return chunk.text
        raise StopIteration

    def take(self) -> Chunk | None:
        """What the next of the rounds so far added; None when there is no more. Never steps the engine.

        Raises:
            BackendError: The request failed while it ran.
        """
        event = self._engine._take_event(self._id) if self.finish_reason is None else None
        if event is None:
            return None
        try:
            return self._advance(event)
        except BaseException:
            self.close()
            raise

    def read(self) -> str:
        """Run to the end; the whole text.

        Raises:
            BackendError: The request failed while it ran.
        """
        for _ in self:
            pass
        return self.text

    def close(self) -> None:
        """End the request, if it still runs."""
        if self._engine._is_forked:  # it is the parent's
            return
        with self._state:
            if self.finish_reason is None:
                self._end("cancelled")

    def __del__(self) -> None:
        if hasattr(self, "_last"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Generation is a running request and cannot be copied or pickled: keep its text and tokens")

    def _advance(self, event: StepEvent | None) -> Chunk:
        with self._state:
            if event is None or self.finish_reason is not None:  # closed meanwhile
                self.close()
                return Chunk("")
            reason = event.finish_reason
            if reason == "error":
                self._end("error", finished=True)
                raise BackendError(f"the request failed: {event.error}")
            emitted = event.tokens
            text, n_used = self._stream.feed_all([self._engine.tokenizer.piece(token) for token in emitted])
            tokens = tuple(emitted[:n_used])
            self.tokens += tokens
            logprobs = () if self._options.n_probs is None else tuple(event.logprobs[:n_used])
            self.logprobs += logprobs
            self._last = event
            if not self._stream.stopped and reason is not None:
                text += self._stream.finish()
            if text:
                self._pieces.append(text)
            if self._stream.stopped:
                self._end("stop", finished=reason is not None)
            elif reason is not None:
                self._end(reason, finished=True)
            return Chunk(text, tokens, min(n_used, max(0, len(emitted) - 1)), logprobs)

    def _end(self, reason: str, *, finished: bool = False) -> None:
        self.finish_reason = reason
        self._engine._end(self._id, finished=finished)
