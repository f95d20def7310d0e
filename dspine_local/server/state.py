"""The server's models: loading, ready, or failed; one instance per server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dspine_local.engine import Engine
from dspine_local.server.config import ServerOptions
from dspine_local.server.errors import ApiError
from dspine_local.server.metrics import Metrics
from dspine_local.server.payloads import now
from dspine_local.server.scheduler import Scheduler

logger = logging.getLogger("dspine_local.server")


class ServerState:
    """What routes share. ``engine`` and ``scheduler`` may be used once ``is_ready``."""

    def __init__(self, load: Callable[[], Engine], options: ServerOptions) -> None:
        self.options = options
        self.metrics = Metrics()
        self.created = now()
        self.error: Exception | None = None
        self.when_failed: Callable[[], None] = lambda: None
        self._load = load
        self._engine: Engine | None = None
        self._scheduler: Scheduler | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests can be answered."""
        return self._scheduler is not None

    @property
    def engine(self) -> Engine:
        """The engine. Raises ApiError while it is loading."""
        if self._engine is None:
            raise ApiError(503, "Loading model")
        return self._engine

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler. Raises ApiError while the models are loading."""
        if self._scheduler is None:
            raise ApiError(503, "Loading model")
        return self._scheduler

    async def load(self) -> None:
        """Load the models in a thread; a failure is kept in ``error``."""
        try:
            engine = await asyncio.to_thread(self._load)
        except Exception as error:
            self.error = error
            logger.error("the models could not be loaded: %s", error)
            self.when_failed()
            return
        self._engine = engine
        self._scheduler = scheduler = Scheduler(engine, self.metrics)
        self.metrics.busy = lambda: (
            min(engine.n_slots, scheduler.n_unfinished),
            max(0, scheduler.n_unfinished - engine.n_slots),
        )
        self.metrics.costs = lambda: engine.draft_costs
        self.metrics.checkpoint_bytes = lambda: engine.checkpoint_bytes
        self.metrics.exact_lengths = engine.exact_lengths
        logger.info(
            "ready: %s, slots: %d of %d tokens, %s",
            self.options.model_name,
            engine.n_slots,
            engine.n_ctx,
            engine.drafting,
        )

    def close(self) -> bool:
        """End what runs; whether it has ended."""
        return self._scheduler is None or self._scheduler.stop()
