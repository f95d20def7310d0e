"""The engine: requests in, streamed text out. Rounds of draft and verify run in the native core."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dspine_local import _native
from dspine_local._native import SlotInfo, TokenLogprobs
from dspine_local.chat_template import Message
from dspine_local.errors import BackendError
from dspine_local.loading import StrPath, load_models, slot_identity
from dspine_local.options import EngineOptions, GenerationOptions
from dspine_local.slot_files import SlotIdentity, read_slot, write_slot
from dspine_local.stats import GenerationStats
from dspine_local.text import TextStream
from dspine_local.tokenizer import Tokenizer


class Engine:
    """A target, with or without its drafter, that answers requests.

    The answers are the target's own, token for token: drafting only changes how many decodes they take. Several
    requests may run at once, from one thread or many; each is read by iterating over its ``Generation``.

    Args:
        target: GGUF of the target; of a split model, its first part.
        drafter: GGUF of its drafter, made by ``dspine-local convert``. None is plain decoding.
        options: How to load them; ``overrides`` replace single values, as in ``Engine(path, n_ctx=8192)``.
    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: A file is not what it should be.
        PairingError: The drafter does not belong to the target.
        BackendError: A device has no room, or cannot do what is needed.
        ValueError: An option is out of range.
    """

    def __init__(
        self, target: StrPath, drafter: StrPath | None = None, options: EngineOptions | None = None, **overrides: Any
    ) -> None:
        self.options = replace(options or EngineOptions(), **overrides)
        models = load_models(target, drafter, self.options)
        self._paths = (target, drafter)
        self.target = models.target
        self.drafter = models.drafter
        self.n_draft = models.n_draft
        self.tokenizer = Tokenizer(models.target)
        self._native = _native.Engine(models.target, models.drafter, n_draft=models.n_draft)
        self._step_lock = threading.Lock()
        self._events_lock = threading.Lock()  # of what follows, never held while anything runs
        self._events: dict[int, deque[_native.StepEvent]] = {}
        self._left: set[int] = set()  # requests that nobody reads any more, until their last event

    @property
    def n_ctx(self) -> int:
        """Positions that one request can use, prompt and answer together."""
        return self.target.n_ctx_seq

    def generate(
        self, prompt: str | Sequence[int], options: GenerationOptions | None = None, **overrides: Any
    ) -> Generation:
        """Begin to answer a prompt: text, taken as it is, or tokens.

        Returns:
            The running request. Iterate over it for the text.
        Raises:
            ValueError: An option or token is out of range, or the prompt is empty.
            ContextLengthError: The prompt does not fit the context.
        """
        request = replace(options or GenerationOptions(), **overrides)
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        request_id = self._native.submit(
            tokens,
            request.sampling.to_native(),
            max_tokens=request.max_tokens,
            stop_tokens=list(request.stop_tokens),
            n_draft=-1 if request.n_draft is None else request.n_draft,
            cache_prompt=request.cache_prompt,
            n_probs=-1 if request.n_probs is None else request.n_probs,
            slot=-1 if request.slot is None else request.slot,
        )
        self._events.setdefault(request_id, deque())  # its first event may have come already
        return Generation(self, request_id, tokens, request)

    def chat(
        self, messages: Sequence[Message], options: GenerationOptions | None = None, **overrides: Any
    ) -> Generation:
        """Begin to answer a conversation, with the model's own chat template; otherwise like ``generate``."""
        return self.generate(self.tokenizer.encode_chat(messages), options, **overrides)

    def cache_lengths(self, slot: int = 0) -> tuple[int, int]:
        """Committed positions of a slot in the target's and the drafter's cache (-1 without a drafter)."""
        return self._native.lengths(slot)

    @property
    def n_slots(self) -> int:
        """Requests that can run at the same time."""
        return self._native.n_slots

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or one that was ended still holds its slot."""
        return self._native.has_work()

    def step(self) -> None:
        """One round for all requests, for a caller that runs the loop itself: see ``Generation.take``."""
        with self._step_lock:
            self._step()

    def slots(self) -> list[SlotInfo]:
        """What each slot is doing, between two rounds."""
        return self._native.slots()

    def save_slot(self, slot: int, path: StrPath) -> tuple[int, int]:
        """Write what an idle slot holds, both caches, to a file; its tokens and bytes.

        Raises:
            ValueError: No such slot, or it is busy or empty.
            OSError: The file cannot be written.
        """
        state = self._native.save_slot(slot)
        return len(state.tokens), write_slot(Path(path), state, self._slot_identity)

    def restore_slot(self, slot: int, path: StrPath) -> tuple[int, int]:
        """Fill an idle slot from a file; its tokens and bytes. The next request that begins alike continues there.

        Raises:
            FileNotFoundError: No such file.
            ModelFormatError: Not a saved slot, or damaged.
            PairingError: Saved with another model, drafter, cache type or version.
            ContextLengthError: It holds more than a slot here.
            ValueError: No such slot, or it is busy.
        """
        state, size = read_slot(Path(path), self._slot_identity)
        self._native.restore_slot(slot, state)
        return len(state.tokens), size

    def erase_slot(self, slot: int) -> int:
        """Empty an idle slot; the tokens that it held. Raises ValueError when there is none, or it is busy."""
        n_held = max(0, self._native.lengths(slot)[0])
        self._native.erase_slot(slot)
        return n_held

    @cached_property
    def _slot_identity(self) -> SlotIdentity:
        return slot_identity(self._paths[0], self._paths[1], self.options)

    def _next_event(self, request_id: int) -> _native.StepEvent:
        """The request's next event. Whoever waits steps the engine, and passes on what belongs to others."""
        while True:
            with self._step_lock:
                events = self._events[request_id]
                if events:
                    return events.popleft()
                self._step()

    def _step(self) -> None:
        events = self._native.step()
        with self._events_lock:
            for event in events:
                if event.id not in self._left:
                    self._events.setdefault(event.id, deque()).append(event)
                elif event.finish_reason is not None:
                    self._left.discard(event.id)

    def _leave(self, request_id: int) -> None:
        """End a request that is still running; nobody reads it any more."""
        with self._events_lock:
            if not any(event.finish_reason for event in self._events.pop(request_id, ())):
                self._left.add(request_id)  # its last event is still to come
        self._native.cancel(request_id)

    def _forget(self, request_id: int) -> None:
        self._events.pop(request_id, None)


@dataclass(frozen=True)
class Chunk:
    """What one round added to an answer.

    ``text`` ends at a whole character and before what may become a stop text, so it need not be the text of
    ``tokens``. The first ``n_accepted`` tokens were drafted, the others sampled.
    """

    text: str
    tokens: tuple[int, ...]
    n_accepted: int
    logprobs: tuple[TokenLogprobs, ...]


class Generation(Iterator[str]):
    """A running request: an iterator over pieces of text that end at whole characters.

    Leaving a ``with`` block, ``close()``, or an exception while iterating ends the request and frees its slot.
    ``finish_reason`` is ``"stop"``, ``"length"`` or ``"cancelled"`` once finished, None before; ``stop_text`` is the
    stop text that ended it. ``slot`` is where it runs, None while it is queued. ``logprobs`` has an entry per token
    when ``n_probs`` was given.
    """

    def __init__(self, engine: Engine, request_id: int, prompt: list[int], options: GenerationOptions) -> None:
        self._engine = engine
        self._id = request_id
        self._stream = TextStream(options.stop)
        self._pieces: list[str] = []
        self.prompt_tokens = prompt
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stats: GenerationStats | None = None
        self.slot: int | None = None

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended the answer."""
        return self._stream.stop_text

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def __next__(self) -> str:
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
        events = self._engine._events.get(self._id) if self.finish_reason is None else None
        if not events:
            return None
        try:
            return self._advance(events.popleft())
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
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            self._engine._leave(self._id)

    def __del__(self) -> None:
        if hasattr(self, "finish_reason"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self, event: _native.StepEvent) -> Chunk:
        stats = GenerationStats.from_native(event.stats)
        if event.finish_reason == "error":
            self.finish_reason = "error"
            self._engine._forget(self._id)
            raise BackendError(f"the request failed: {event.error}")
        text, n_before = "", len(self.tokens)
        for token in event.tokens:
            self.tokens.append(token)
            text += self._stream.feed(self._engine.tokenizer.piece(token))
            if self._stream.stopped:
                break
        tokens = tuple(self.tokens[n_before:])
        logprobs = tuple(event.logprobs[: len(tokens)])
        self.logprobs.extend(logprobs)
        self.stats = replace(stats, generated=len(self.tokens))
        self.slot = event.slot
        if event.finish_reason is not None:
            text += self._stream.finish()
            self.finish_reason = "stop" if self._stream.stopped else event.finish_reason
            self._engine._forget(self._id)
        elif self._stream.stopped:
            self.finish_reason = "stop"
            self._engine._leave(self._id)
        if text:
            self._pieces.append(text)
        return Chunk(text, tokens, min(len(tokens), max(0, len(event.tokens) - 1)), logprobs)
