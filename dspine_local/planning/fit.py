"""Does it fit, with what context, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from dspine_local.errors import BackendError
from dspine_local.options import EngineOptions
from dspine_local.planning.devices import ASSUMED, Budgets
from dspine_local.planning.measure import Measured, PlannedFiles, measure, on_assumed_device
from dspine_local.planning.plan import PARTS, MemoryLine, MemoryPlan

# llama.cpp rounds a sequence's positions up to this.
CTX_STEP = 256
_MAX_TRIES = 24


@dataclass(frozen=True)
class Advice:
    """A change that saves memory: what to write, what it costs, bytes saved, and whether it is enough."""

    change: str
    price: str
    saves: int
    fits: bool


class Planner:
    """Plans for one target and drafter on given memory.

    Args:
        files: Of target and drafter.
        budgets: What the devices have.
        n_draft: Longest draft; 0 without a drafter.
    Raises:
        ValueError: Layers are to be split between the CPU and a device that is only assumed.
    """

    def __init__(self, files: PlannedFiles, budgets: Budgets, n_draft: int) -> None:
        self.files, self.budgets, self.n_draft = files, budgets, n_draft
        self._measure = cache(measure)

    def plan(self, options: EngineOptions, n_ctx: int, n_draft: int | None = None) -> MemoryPlan:
        """The plan for n_ctx positions of all slots together; 0 is as many as the target was trained for."""
        if self.budgets.assumed and options.n_gpu_layers != -1:
            raise ValueError("this machine has no such device: the plan can only put all layers there (-ngl -1)")
        n_draft = self.n_draft if n_draft is None else n_draft
        measured: Measured = self._measure(self.files, options, n_ctx, n_draft)
        lines = measured.lines
        if self.budgets.assumed:
            lines = on_assumed_device(lines, self.files, ASSUMED)
        used = {line.device for line in lines}
        reserve = [MemoryLine("reserve", d, n) for d, n in self.budgets.reserve.items() if d in used]
        ordered = sorted((*lines, *reserve), key=lambda line: (PARTS.index(line.part), line.device))
        return MemoryPlan(tuple(ordered), self.budgets.sizes, measured.n_ctx, options.n_parallel, n_draft)

    def largest(self, options: EngineOptions) -> MemoryPlan | None:
        """The plan with the largest context that fits, up to what the target was trained for; None if none does."""
        step = CTX_STEP * options.n_parallel
        high = self.plan(options, 0)
        if high.fits:
            return high
        low = self.smallest(options)
        if not low.fits:
            return None
        best = low
        for _ in range(_MAX_TRIES):
            if high.n_ctx - best.n_ctx <= step:
                break
            middle = self.plan(options, _between(best, high, step))
            best, high = (middle, high) if middle.fits else (best, middle)
        return best

    def smallest(self, options: EngineOptions) -> MemoryPlan:
        """The plan with the smallest context that llama.cpp makes."""
        return self.plan(options, CTX_STEP * options.n_parallel)

    def advice(self, options: EngineOptions, n_ctx: int) -> list[Advice]:
        """What to change when the plan does not fit, the cheapest change first. Each is measured, alone."""
        now = self.plan(options, n_ctx)
        found = []
        for change, price, plan in self._changes(options, n_ctx, now):
            try:
                changed = plan()
            except BackendError:  # not even the plan has room for a recurrent state
                continue
            saves = sum(now.missing.values()) - sum(changed.missing.values())
            if changed.total < now.total and saves > 0:
                found.append(Advice(change, price, now.total - changed.total, changed.fits))
        return found

    def _changes(
        self, options: EngineOptions, n_ctx: int, now: MemoryPlan
    ) -> Iterator[tuple[str, str, Callable[[], MemoryPlan]]]:
        def with_options(**changes: object) -> Callable[[], MemoryPlan]:
            return lambda: self.plan(replace(options, **changes), n_ctx)  # type: ignore[arg-type]

        if options.n_ubatch > 128:
            yield "-ub 128", "prompts are read more slowly", with_options(n_ubatch=128)
        if options.cache_type_k in ("f32", "f16", "bf16"):
            types = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
            yield "-ctk q8_0 -ctv q8_0", "answers change a little", with_options(**types)
        shorter = min(7, self.n_draft // 2)
        if now.part("recurrent snapshots") and shorter > 0:
            text = f"--n-draft {shorter}"
            yield text, "fewer tokens per round at best", lambda: self.plan(options, n_ctx, shorter)
        if options.n_parallel > 1:
            n_ctx_one = now.n_ctx // options.n_parallel
            one = replace(options, n_parallel=1)
            yield f"-np 1 -c {n_ctx_one}", "one request at a time", lambda: self.plan(one, n_ctx_one)
        largest = self.largest(options)
        if largest is not None and largest.n_ctx < now.n_ctx:
            context = largest
            yield f"-c {largest.n_ctx}", "shorter prompts and answers", lambda: context
        yield "-ctk q4_0 -ctv q4_0", "answers change", with_options(cache_type_k="q4_0", cache_type_v="q4_0")
        if self.files.drafter is not None:
            alone = Planner(PlannedFiles(self.files.target, None), self.budgets, 0)
            yield "no drafter", "one token per decode", lambda: alone.plan(options, n_ctx)
        if not self.budgets.assumed and len(self.budgets.sizes) > 1:
            yield "-ngl 0", "the target runs on the CPU", with_options(n_gpu_layers=0)


def _between(low: MemoryPlan, high: MemoryPlan, step: int) -> int:
    """A context between one that fits and one that does not, where a straight line meets the budget."""
    device, missing = max(high.missing.items(), key=lambda item: item[1])
    slope = (high.needed(device) - low.needed(device)) / (high.n_ctx - low.n_ctx)
    steps = int(high.n_ctx - missing / slope) // step
    return min(max(steps, low.n_ctx // step + 1), (high.n_ctx - 1) // step) * step
