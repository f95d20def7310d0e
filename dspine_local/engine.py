"""The engine: requests in, streamed text out. Rounds of draft and verify run in the native core."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from dspine_local import _native
from dspine_local._native import SlotInfo
from dspine_local.chat_template import Message
from dspine_local.checks import need_collection, need_integer
from dspine_local.costs import DraftCosts
from dspine_local.errors import ForkError
from dspine_local.files import StrPath
from dspine_local.generation import Generation
from dspine_local.loading import LoadedModels, load_models, slot_identity
from dspine_local.options import EngineOptions, GenerationOptions
from dspine_local.slot_files import SlotIdentity, read_slot, write_slot
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
        self._paths = (target, drafter)
        models = load_models(target, drafter, self.options)
        self.target = models.target
        self.drafter = models.drafter
        self.max_draft = models.max_draft
        self.tokenizer = Tokenizer(models.target)
        self._exact = models.exact
        self.n_draft = self._fixed_length(models)
        if models.costs is not None or models.exact:
            _computed_in = self._pid
        self._native = _native.Engine(
            models.target,
            self._draft_source(models),
            n_draft=self.n_draft,
            verify_costs=[] if models.costs is None else models.costs.verify,
            draft_costs=[] if models.costs is None else models.costs.draft,
            checkpoint_bytes=self.options.checkpoint_mib << 20,
            exact=models.exact,
        )
        self._step_lock = threading.Lock()
        self._events_lock = threading.Lock()  # of what follows, never held while anything runs
        self._events: dict[int, deque[_native.StepEvent]] = {}
        self._left: set[int] = set()  # requests that nobody reads any more, until their last event

    @staticmethod
    def _fixed_length(models: LoadedModels) -> int | None:
        """None where it is chosen every round."""
        if models.costs is not None:
            return None
        return models.max_draft if models.exact is None or any(models.exact) else 0

    def _draft_source(self, models: LoadedModels) -> _native.DraftSource | None:
        """Where drafts come from."""
        return models.drafter

    def _replay(self, _prompt: list[int]) -> list[int]:
        """An answer that is known, whose tokens are emitted whatever is sampled: for simulations."""
        return []

    @property
    def exact_lengths(self) -> tuple[int, ...] | None:
        """With ``strict``, the draft lengths that are used, each where it is exact; None without."""
        return None if self._exact is None else tuple(k for k, where in enumerate(self._exact, start=1) if where)

    @property
    def drafting(self) -> str:
        """In a few words, how much is drafted."""
        longest = self.max_draft if self.exact_lengths is None else max(self.exact_lengths, default=0)
        if longest == 0:
            return "no drafts"
        words = f"up to {longest} tokens drafted per round"
        return words + (", chosen by measurement" if self.n_draft is None else "")

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
        request_id = self._native.submit(
            tokens,
            request.sampling.to_native(),
            max_tokens=request.max_tokens,
            stop_tokens=list(request.stop_tokens),
            n_draft=request.n_draft,
            cache_prompt=request.cache_prompt,
            n_probs=-1 if request.n_probs is None else request.n_probs,
            post_sampling=request.post_sampling_probs,
            slot=-1 if request.slot is None else request.slot,
            replay=self._replay(tokens),
        )
        with self._events_lock:
            self._events.setdefault(request_id, deque())  # its first event may have come already
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

    @property
    def checkpoint_bytes(self) -> int:
        """Host memory that the states which slots can go back to take now; 0 unless the target is recurrent."""
        return self._native.checkpoint_bytes

    def cache_lengths(self, slot: int = 0) -> tuple[int, int]:
        """Committed positions of a slot in the target's and the drafter's cache (-1 without a drafter)."""
        self._check_process()
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
        self._check_process()
        with self._step_lock:
            self._step()

    def slots(self) -> list[SlotInfo]:
        """What each slot is doing, between two rounds."""
        self._check_process()
        return self._native.slots()

    def save_slot(self, slot: int, path: StrPath) -> tuple[int, int]:
        """Write what an idle slot holds, both caches, to a file; its tokens and bytes.

        Raises:
            ValueError: No such slot, or it is busy or empty.
            OSError: The file cannot be written.
        """
        self._check_process()
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
        self._check_process()
        state, size = read_slot(Path(path), self._slot_identity)
        self._native.restore_slot(slot, state)
        return len(state.tokens), size

    def erase_slot(self, slot: int) -> int:
        """Empty an idle slot; the tokens that it held. Raises ValueError when there is none, or it is busy."""
        n_held = max(0, self.cache_lengths(slot)[0])
        self._native.erase_slot(slot)
        return n_held

    @cached_property
    def _slot_identity(self) -> SlotIdentity:
        return slot_identity(*self._paths, self.options)

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

        Whoever waits steps the engine, and passes on what belongs to others; between two steps it is another's turn.
        """
        while True:
            with self._step_lock:
                events = self._events.get(request_id)
                if events is None:
                    return None
                if not events:
                    self._step()
                if events:
                    return events.popleft()

    def _take_event(self, request_id: int) -> _native.StepEvent | None:
        """The request's next event, if it has come."""
        events = self._events.get(request_id)
        return events.popleft() if events else None

    def _step(self) -> None:
        global _computed_in
        _computed_in = self._pid
        events = self._native.step()
        with self._events_lock:
            for event in events:
                if event.id not in self._left:
                    self._events.setdefault(event.id, deque()).append(event)
                elif event.finish_reason is not None:
                    self._left.discard(event.id)

    def _end(self, request_id: int, *, finished: bool) -> None:
        """Forget a request, and cancel it unless its last event has been read."""
        with self._events_lock:
            unread = self._events.pop(request_id, ())
            if finished or any(event.finish_reason for event in unread):
                return
            self._left.add(request_id)  # its last event is still to come
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
