"""The one thread that steps the engine, and the way of its events into asyncio.

Handlers create ``Generation`` objects in any thread and have them watched; everything that must not meet a round
(slots) runs here between rounds. Cancelling is a flag that the thread sees before its next round.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self, TypeVar

from dspine_local.engine import Engine
from dspine_local.generation import Chunk, Generation
from dspine_local.server.errors import ApiError
from dspine_local.server.metrics import Metrics

logger = logging.getLogger("dspine_local.server")

STOP_S = 3.0  # a round that takes longer is left to itself
T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """What a round did to one of the watched answers; ``finish_reason`` with the last."""

    index: int
    chunk: Chunk
    finish_reason: str | None


class Answers:
    """Generations that one HTTP request waits for. Leaving the ``with`` block cancels what still runs."""

    def __init__(self, scheduler: Scheduler, generations: Sequence[Generation]) -> None:
        self.generations = generations
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self.live = dict(enumerate(generations))  # of the scheduler's thread
        self.cancelled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End what still runs."""
        self.cancelled = True
        self._scheduler.wake()

    async def events(self, ping_s: float | None = None) -> AsyncIterator[Event | None]:
        """Everything until all have finished; None after each ``ping_s`` seconds of silence.

        Raises:
            Exception: What the engine raised.
        """
        n_open = len(self.generations)
        while n_open:
            try:
                event = await asyncio.wait_for(self._queue.get(), ping_s)
            except TimeoutError:
                yield None
                continue
            if isinstance(event, Exception):
                raise event
            n_open -= event.finish_reason is not None
            yield event

    def put(self, event: Event | Exception) -> None:
        """Deliver from the scheduler's thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)
        except RuntimeError:  # the loop has gone: nobody waits any more
            self.cancelled = True


class Scheduler:
    """Steps an engine while there is work, in a thread of its own."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._watched: list[Answers] = []
        self._new: queue.SimpleQueue[Answers] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dspine-scheduler", daemon=True)
        self._thread.start()

    def watch(self, generations: Sequence[Generation]) -> Answers:
        """Deliver the events of these; call from the event loop."""
        answers = Answers(self, generations)
        self._new.put(answers)
        self.wake()
        return answers

    async def between_rounds(self, action: Callable[[], T]) -> T:
        """Run something in the thread, when no round runs."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        self.wake()
        return await asyncio.wrap_future(future)

    def wake(self) -> None:
        """Look for something to do."""
        self._wake.set()

    @property
    def n_unfinished(self) -> int:
        """Answers that are queued or running."""
        return sum(len(answers.live) for answers in list(self._watched))

    def stop(self) -> bool:
        """End all answers and the thread; whether it has ended: a round cannot be interrupted."""
        patience_s = 0 if self._stopping else STOP_S
        self._stopping = True
        self.wake()
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            self._take_orders()
            if not self._engine.has_work:
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                n_busy = min(self._engine.n_slots, max(1, self.n_unfinished))
                self._engine.step()
                self._metrics.count_round(n_busy)
            except Exception as error:
                logger.exception("a round failed")
                for answers in self._watched:
                    answers.put(error)
                    answers.cancelled = True
            for answers in self._watched:
                self._deliver(answers)
        for answers in self._watched:
            answers.put(ApiError(503, "the server is stopping"))
            answers.cancelled = True
        self._take_orders()

    def _take_orders(self) -> None:
        while not self._new.empty():
            self._watched.append(self._new.get())
        while not self._calls.empty():
            self._calls.get()()
        for answers in self._watched:
            if answers.cancelled:
                for generation in answers.live.values():
                    generation.close()
                    self._metrics.count_request(generation)
                answers.live.clear()
        self._watched = [answers for answers in self._watched if answers.live]

    def _deliver(self, answers: Answers) -> None:
        for index, generation in list(answers.live.items()):
            try:
                while (chunk := generation.take()) is not None:
                    answers.put(Event(index, chunk, generation.finish_reason))
            except Exception as error:
                answers.put(error)
                answers.cancelled = True
            if generation.finish_reason is not None:
                del answers.live[index]
                self._metrics.count_request(generation)
