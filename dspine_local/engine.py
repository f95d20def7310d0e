"""The engine: requests in, streamed text out. Rounds of draft and verify run in the native core."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from dspine_local import _native
from dspine_local.chat_template import Message
from dspine_local.errors import BackendError
from dspine_local.files import StrPath
from dspine_local.loading import load_models
from dspine_local.options import EngineOptions, GenerationOptions
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
        self.target = models.target
        self.drafter = models.drafter
        self.n_draft = models.n_draft
        self.tokenizer = Tokenizer(models.target)
        self._native = _native.Engine(models.target, models.drafter, n_draft=models.n_draft)
        self._step_lock = threading.Lock()
        self._events: dict[int, deque[_native.StepEvent]] = {}

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
        sampling = request.sampling.to_native()
        with self._step_lock:  # the first event must find its place
            request_id = self._native.submit(
                tokens,
                sampling,
                max_tokens=request.max_tokens,
                stop_tokens=list(request.stop_tokens),
                n_draft=-1 if request.n_draft is None else request.n_draft,
                cache_prompt=request.cache_prompt,
            )
            self._events[request_id] = deque()
        return Generation(self, request_id, tokens, request)

    def chat(
        self, messages: Sequence[Message], options: GenerationOptions | None = None, **overrides: Any
    ) -> Generation:
        """Begin to answer a conversation, with the model's own chat template; otherwise like ``generate``."""
        return self.generate(self.tokenizer.encode_chat(messages), options, **overrides)

    def cache_lengths(self, slot: int = 0) -> tuple[int, int]:
        """Committed positions of a slot in the target's and the drafter's cache (-1 without a drafter)."""
        return self._native.lengths(slot)

    def _next_event(self, request_id: int) -> _native.StepEvent:
        """The request's next event. Whoever waits steps the engine, and passes on what belongs to others."""
        while True:
            with self._step_lock:
                events = self._events[request_id]
                if events:
                    return events.popleft()
                for event in self._native.step():
                    if event.id in self._events:
                        self._events[event.id].append(event)

    def _cancel(self, request_id: int) -> None:
        self._native.cancel(request_id)

    def _forget(self, request_id: int) -> None:
        self._events.pop(request_id, None)


class Generation(Iterator[str]):
    """A running request: an iterator over pieces of text that end at whole characters.

    Leaving a ``with`` block, ``close()``, or an exception while iterating ends the request and frees its slot.
    ``finish_reason`` is ``"stop"``, ``"length"`` or ``"cancelled"`` once finished, None before.
    """

    def __init__(self, engine: Engine, request_id: int, prompt: list[int], options: GenerationOptions) -> None:
        self._engine = engine
        self._id = request_id
        self._stream = TextStream(options.stop)
        self._pieces: list[str] = []
        self.prompt_tokens = prompt
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.stats: GenerationStats | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def __next__(self) -> str:
        while self.finish_reason is None:
            try:
                piece = self._advance()
            except BaseException:
                self.close()
                raise
            if piece:
                self._pieces.append(piece)
                return piece
        raise StopIteration

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
            self._end("cancelled")

    def __del__(self) -> None:
        if hasattr(self, "finish_reason"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self) -> str:
        event = self._engine._next_event(self._id)
        stats = GenerationStats.from_native(event.stats)
        if event.finish_reason == "error":
            raise BackendError(f"the request failed: {event.error}")
        text = ""
        for token in event.tokens:
            self.tokens.append(token)
            text += self._stream.feed(self._engine.tokenizer.piece(token))
            if self._stream.stopped:
                break
        self.stats = replace(stats, generated=len(self.tokens))
        if self._stream.stopped:
            self._end("stop")
        elif event.finish_reason is not None:
            text += self._stream.finish()
            self._end(event.finish_reason)
        return text

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        self._engine._cancel(self._id)
        self._engine._forget(self._id)
