"""A block of drafting against llama.cpp's own DFlash drafter: same dimensions, weights, target, threads and process.

Three drafters of random weights and the demo drafter's dimensions share SmolLM2's (Q8_0) embedding and head: ours with
injection (DSpine), ours without (DFlash), and llama.cpp's DFlash on the very tensors of the second. The last two must
draft the same tokens: that shows that the same computation is timed. Two timings, both to token ids in Python:
- block: the block alone, again and again (llama.cpp then reuses its graph);
- round: commit of the verified rows and block in turn, as in generation. llama.cpp commits all rows of a verified
  block, this project those that stay.
Ratios are medians over repetitions of ours / theirs, run in turn; theirs is the faster of llama.cpp's two samplers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import (
    environment,
    median_ratio,
    parser,
    print_environment,
    random_drafter,
    requantize,
    seconds,
    table,
    time_interleaved,
)
from llama_dflash import LlamaDflash, write_dflash_gguf

from dspine_local import _native
from dspine_local.demo import smollm2_path

N_DRAFT = 7
N_KEPT = 3  # rows that stay of a verified block of 8, in the timing of a round
LIMIT = 1.1
N_CHECKS = 16  # drafts that are compared
CHECK_CONTEXT = 64  # committed positions behind which they are made


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    outtype: str
    n_context: int
    n_layer: int
    causal: bool
    n_threads: int
    n_reps: int


class Ours:
    """This project's drafter."""

    def __init__(self, path: Path, target: _native.Target, setup: Setup) -> None:
        self.drafter = _native.Drafter(
            str(path), target.tensors(), n_ctx=setup.n_context + 64, n_threads=setup.n_threads
        )

    def commit(self, features: np.ndarray[Any, Any]) -> None:
        self.drafter.commit(0, features)

    def draft(self, anchor: int) -> list[int]:
        return self.drafter.draft([(0, anchor)], N_DRAFT)[0].tokens

    def truncate(self, length: int) -> None:
        self.drafter.truncate(0, length)


def measure(setup: Setup, work_dir: Path, target_path: Path) -> dict[str, Any]:
    """All timings of one setup, in milliseconds."""
    made = {
        injection: random_drafter(
            work_dir,
            target_path,
            injection=injection,
            outtype=setup.outtype,
            n_layer=setup.n_layer,
            causal=injection or setup.causal,
        )
        for injection in (True, False)
    }
    theirs_path = write_dflash_gguf(made[False], target_path, work_dir / f"llama-{made[False].name}")
    target = _native.Target(str(target_path), n_ctx=256, n_rollback=N_DRAFT, n_threads=setup.n_threads)
    llama_options: dict[str, Any] = {
        "n_ctx": setup.n_context,
        "n_draft": N_DRAFT,
        "n_threads": setup.n_threads or target.n_threads,
        "causal": setup.causal,
    }
    ours = Ours(made[True], target, setup)
    sides: dict[str, Ours | LlamaDflash] = {
        "dspine": ours,
        "dflash": Ours(made[False], target, setup),
        "llama, graph sampler": LlamaDflash(theirs_path, target_path, backend_sampling=True, **llama_options),
        "llama, host sampler": LlamaDflash(theirs_path, target_path, backend_sampling=False, **llama_options),
    }
    rng = np.random.default_rng(2)
    width = target.n_embd * len(ours.drafter.target_layers)
    features = rng.standard_normal((setup.n_context, width), dtype=np.float32)
    rows = rng.standard_normal((N_DRAFT + 1, width), dtype=np.float32)
    anchors = [int(a) for a in rng.integers(0, target.n_vocab, N_CHECKS)]
    drafts: dict[str, list[list[int]]] = {name: [] for name in sides}
    for anchor in anchors:  # each behind a context of its own, for drafts that differ
        context = rng.standard_normal((CHECK_CONTEXT, width), dtype=np.float32)
        for name, side in sides.items():
            side.commit(context)
            drafts[name].append(side.draft(anchor))
            side.truncate(0)
    for side in sides.values():
        for first in range(0, setup.n_context, 256):
            side.commit(features[first : first + 256])

    n_same = sum(
        a == b
        for ours, theirs in zip(drafts["dflash"], drafts["llama, host sampler"], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )

    def block(side: Ours | LlamaDflash) -> Callable[[], float]:
        return lambda: seconds(lambda: side.draft(anchors[0]))

    def commit(side: Ours | LlamaDflash, n: int) -> Callable[[], float]:
        def run() -> float:
            time = seconds(lambda: side.commit(rows[:n]))
            side.truncate(setup.n_context)
            return time

        return run

    def whole_round(side: Ours | LlamaDflash) -> Callable[[], float]:
        n = N_KEPT if isinstance(side, Ours) else N_DRAFT + 1
        return lambda: commit(side, n)() + block(side)()

    timings: dict[str, dict[str, list[float]]] = {}
    for what, run in (("block", block), ("round", whole_round), ("commit 8", lambda s: commit(s, N_DRAFT + 1))):
        timings[what] = dict(
            zip(sides, time_interleaved([run(side) for side in sides.values()], setup.n_reps), strict=True)
        )
    for side in sides.values():
        if isinstance(side, LlamaDflash):
            side.close()
    return {
        "outtype": setup.outtype,
        "context": setup.n_context,
        "same_tokens": f"{n_same}/{N_CHECKS * N_DRAFT}",
        "distinct_tokens": len({token for draft in drafts["dflash"] for token in draft}),
        "identical": drafts["dflash"] == drafts["llama, host sampler"] == drafts["llama, graph sampler"],
        **{what: summarize(times) for what, times in timings.items()},
    }


def summarize(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, minima, and our ratios to the faster of llama.cpp's samplers."""
    fastest = min((name for name in times if name.startswith("llama")), key=lambda name: median(times[name]))
    summary: dict[str, Any] = {
        name: {"median_ms": median(values), "min_ms": min(values)} for name, values in times.items()
    }
    summary["ratio"] = {name: median_ratio(times[name], times[fastest]) for name in ("dspine", "dflash")}
    return summary


def print_tables(results: list[dict[str, Any]]) -> None:
    for what in ("block", "round", "commit 8"):
        rows = []
        for result in results:
            times = result[what]
            names = [name for name in times if name != "ratio"]
            cells = [f"{times[name]['median_ms']:.2f} ({times[name]['min_ms']:.2f})" for name in names]
            ratios = [f"{times['ratio'][name]:.2f}" for name in ("dspine", "dflash")]
            rows.append([result["outtype"], str(result["context"]), *cells, *ratios])
        print(f"\n{what}, ms: median (minimum)\n")
        print(table(["drafter", "context", *names, "dspine ratio", "dflash ratio"], rows))
    for r in results:
        same = f"{r['same_tokens']} equal, {r['distinct_tokens']} distinct"
        verdict = "the same tokens" if r["identical"] else "different tokens"
        print(f"\n{r['outtype']}, context {r['context']}: our DFlash and llama.cpp's draft {verdict} ({same})")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--contexts", type=int, nargs="+", default=[512, 2048], help="committed positions")
    options.add_argument("--outtypes", nargs="+", default=["q8_0", "f16", "bf16"], help="the drafters' matrices")
    options.add_argument("--layers", type=int, default=3)
    options.add_argument("--causal", action="store_true", help="DFlash blocks causal too (default: bidirectional)")
    options.add_argument("--reps", type=int, default=100)
    args = options.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="dspine-bench-") as scratch:
        work_dir = args.work_dir or Path(scratch)
        work_dir.mkdir(parents=True, exist_ok=True)
        target = requantize(smollm2_path(), work_dir / "target-q8_0.gguf")
        for outtype in args.outtypes:
            for n_context in args.contexts:
                setup = Setup(outtype, n_context, args.layers, args.causal, args.threads, args.reps)
                results.append(measure(setup, work_dir, target))
    passed = all(r["identical"] and r["block"]["ratio"]["dspine"] <= LIMIT for r in results[:1])
    if args.json:
        print(json.dumps({"environment": environment(), "results": results, "passed": passed}, indent=1))
    else:
        print_environment()
        print_tables(results)
        print(f"\nfirst row, block: dspine ratio at most {LIMIT} and drafts the same: {'yes' if passed else 'NO'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
