"""The engine: requests in, streamed text out. Rounds of draft and verify run in the native core."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn, Self

from dspine_local import _native
from dspine_local.chat_template import Message
from dspine_local.checks import need_collection, need_integer
from dspine_local.costs import DraftCosts
from dspine_local.errors import BackendError, ForkError
from dspine_local.files import StrPath
from dspine_local.loading import load_models
from dspine_local.options import EngineOptions, GenerationOptions
from dspine_local.stats import GenerationStats
from dspine_local.text import TextStream
from dspine_local.tokenizer import Tokenizer

# The process in which an engine has computed, with threads that a forked child would wait for in vain.
_computed_in: int | None = None


class Engine:
    """A target, with or without its drafter, that answers requests.

    The answers are the target's own, token for token: drafting only changes how many decodes they take. Several
    requests may run at once, from one thread or many; each is read by iterating over its ``Generation``.

    An engine belongs to the process that made it. Where several processes are wanted, start them with
    ``multiprocessing.get_context("spawn")`` and make an engine in each; fork is only safe before the first answer.

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
        ForkError: An engine has computed in the process that this one was forked from.
    """

    def __init__(
        self, target: StrPath, drafter: StrPath | None = None, options: EngineOptions | None = None, **overrides: Any
    ) -> None:
        global _computed_in
        self._pid = os.getpid()
        if _computed_in not in (None, self._pid):
            raise _fork_error(f"process {_computed_in}, in which an engine has computed")
        self.options = replace(options or EngineOptions(), **overrides)
        models = load_models(target, drafter, self.options)
        self.target = models.target
        self.drafter = models.drafter
        self.max_draft = models.max_draft
        self.tokenizer = Tokenizer(models.target)
        if models.costs is None:
            self._native = _native.Engine(models.target, models.drafter, n_draft=models.max_draft)
        else:
            _computed_in = self._pid
            self._native = _native.Engine(
                models.target,
                models.drafter,
                n_draft=None,
                verify_costs=models.costs.verify,
                draft_costs=models.costs.draft,
            )
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
            ForkError: The engine was made in another process.
        """
        self._check_process()
        request = replace(options or GenerationOptions(), **overrides)
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        sampling = request.sampling.to_native()
        with self._step_lock:  # the first event must find its place
            request_id = self._native.submit(
                tokens,
                sampling,
                max_tokens=request.max_tokens,
                stop_tokens=list(request.stop_tokens),
                n_draft=request.n_draft,
                cache_prompt=request.cache_prompt,
            )
            self._events[request_id] = deque()
        return Generation(self, request_id, tokens, request)

    def chat(
        self, messages: Sequence[Message], options: GenerationOptions | None = None, **overrides: Any
    ) -> Generation:
        """Begin to answer a conversation, with the model's own chat template; otherwise like ``generate``."""
        return self.generate(self.tokenizer.encode_chat(messages), options, **overrides)

    @property
    def draft_costs(self) -> DraftCosts | None:
        """What the automatic draft length goes by now; None where the length is fixed."""
        costs = self._native.costs
        return None if costs is None else DraftCosts(*costs)

    def cache_lengths(self, slot: int = 0) -> tuple[int, int]:
        """Committed positions of a slot in the target's and the drafter's cache (-1 without a drafter)."""
        self._check_process()
        return self._native.lengths(slot)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Engine cannot be copied or pickled: make one in each process that needs one")

    @property
    def _is_forked(self) -> bool:
        return self._pid != os.getpid()

    def _check_process(self) -> None:
        if self._is_forked:
            raise _fork_error(f"process {self._pid}, which made the engine")

    def _next_event(self, request_id: int) -> _native.StepEvent | None:
        """The request's next event, None when it has been cancelled.

        Whoever waits steps the engine, and passes on what belongs to others.
        """
        global _computed_in
        self._check_process()
        while True:
            with self._step_lock:
                events = self._events.get(request_id)
                if events is None:
                    return None
                if events:
                    return events.popleft()
                _computed_in = self._pid
                for event in self._native.step():
                    # Another thread may cancel it at any time: it is looked up once.
                    if (waiting := self._events.get(event.id)) is not None:
                        waiting.append(event)

    def _end(self, request_id: int) -> None:
        """Cancel a request if it still runs, and forget it."""
        self._events.pop(request_id, None)
        self._native.cancel(request_id)


def _token_ids(prompt: Sequence[int]) -> list[int]:
    for token in need_collection("prompt", prompt, "token ids, or text"):
        need_integer("prompt token", token, 0)
    return [int(token) for token in prompt]


def _fork_error(parent: str) -> ForkError:
    return ForkError(
        f"process {os.getpid()} was forked from {parent}: OpenMP's threads do not survive a fork; start processes with "
        'multiprocessing.get_context("spawn") and make an engine in each'
    )


class Generation(Iterator[str]):
    """A running request: an iterator over pieces of text that end at whole characters.

    Leaving a ``with`` block, ``close()``, or an exception while iterating ends the request and frees its slot.
    ``finish_reason`` is ``"stop"``, ``"length"`` or ``"cancelled"`` once finished, None before.

    Any thread may read or close it. Each piece goes to one reader; closing does not wait for one.
    """

    def __init__(self, engine: Engine, request_id: int, prompt: list[int], options: GenerationOptions) -> None:
        self._engine = engine
        self._id = request_id
        self._stream = TextStream(options.stop)
        self._pieces: list[str] = []
        self._reading = threading.Lock()  # held while waiting for an event, so that readers take turns
        self._state = threading.RLock()  # of what follows; never held while waiting
        self.prompt_tokens = prompt
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.stats: GenerationStats | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def __next__(self) -> str:
        self._engine._check_process()  # a forked child's copy of a lock may be held for ever
        with self._reading:
            while self.finish_reason is None:
                try:
                    piece = self._advance()
                except BaseException:
                    self.close()
                    raise
                if piece:
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
        if self._engine._is_forked:  # it is the parent's
            return
        with self._state:
            if self.finish_reason is None:
                self._end("cancelled")

    def __del__(self) -> None:
        if hasattr(self, "stats"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Generation is a running request and cannot be copied or pickled: keep its text and tokens")

    def _advance(self) -> str:
        event = self._engine._next_event(self._id)
        with self._state:
            if event is None or self.finish_reason is not None:  # closed meanwhile
                self.close()
                return ""
            if event.finish_reason == "error":
                raise BackendError(f"the request failed: {event.error}")
            text = ""
            for token in event.tokens:
                self.tokens.append(token)
                text += self._stream.feed(self._engine.tokenizer.piece(token))
                if self._stream.stopped:
                    break
            self.stats = replace(GenerationStats.from_native(event.stats), generated=len(self.tokens))
            if not self._stream.stopped and event.finish_reason is not None:
                text += self._stream.finish()
            if text:
                self._pieces.append(text)
            if self._stream.stopped:
                self._end("stop")
            elif event.finish_reason is not None:
                self._end(event.finish_reason)
            return text

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        self._engine._end(self._id)
