"""The memory plan against the memory of a process: SmolLM2 with and without its drafter, each case in a new process.

What grows between the moment when everything is imported and the end of one answer per slot behind a prompt that fills
a batch, and the plan for the same options. Weights are read, not mapped, so that all of it is the process's own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import environment, parser, print_environment, requantize, table

from dspine_local import GREEDY, Engine
from dspine_local.convert import convert_checkpoint
from dspine_local.demo import drafter_checkpoint, smollm2_path
from dspine_local.loading import longest_draft
from dspine_local.options import EngineOptions
from dspine_local.planning.measure import PlannedFiles, measure

MIB = 1 << 20
LIMIT = 0.03
CONTEXTS, SLOTS = (512, 4096, 8192), (1, 4)


def own_memory() -> int:
    """Bytes of this process that no file backs, without what the C library only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon:")))


def growth(files: PlannedFiles, options: EngineOptions, n_draft: int) -> tuple[int, int]:
    """Bytes that the plan says and that the process grows by."""
    planned = sum(line.n_bytes for line in measure(files, options, options.n_ctx or 0, n_draft).lines)
    before = own_memory()
    engine = Engine(files.target, files.drafter, options)
    prompt = engine.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 60)
    n_tokens = min(len(prompt), engine.n_ctx - 40)
    for answer in [
        engine.generate(prompt[slot:n_tokens], sampling=GREEDY, max_tokens=30, slot=slot)
        for slot in range(options.n_parallel)
    ]:
        answer.read()
    return planned, own_memory() - before


def main() -> int:
    options = parser(__doc__)
    args = options.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dspine-bench-") as scratch:
        work_dir = args.work_dir or Path(scratch)
        work_dir.mkdir(parents=True, exist_ok=True)
        target = requantize(smollm2_path(), work_dir / "target-q8_0.gguf")
        drafter = work_dir / "drafter-q8_0.gguf"
        convert_checkpoint(drafter_checkpoint(), drafter, outtype="q8_0", target=target, overwrite=True)
        for path in (None, drafter):
            files = PlannedFiles(str(target), None if path is None else str(path))
            n_draft = 0 if path is None else longest_draft(str(path), None)
            for n_ctx in CONTEXTS:
                for n_parallel in SLOTS:
                    loading = EngineOptions(n_ctx=n_ctx, n_parallel=n_parallel, use_mmap=False, n_threads=args.threads)
                    with multiprocessing.get_context("spawn").Pool(1) as pool:
                        planned, real = pool.apply(growth, (files, loading, n_draft))
                    case = {"drafter": path is not None, "n_ctx": n_ctx, "n_parallel": n_parallel}
                    results.append({**case, "planned": planned, "process": real, "share": real / planned - 1})
    passed = all(abs(r["share"]) <= LIMIT for r in results)
    if args.json:
        print(json.dumps({"environment": environment(), "results": results, "passed": passed}, indent=1))
    else:
        print_environment()
        rows = [
            ["yes" if r["drafter"] else "no", str(r["n_ctx"]), str(r["n_parallel"])]
            + [f"{r[name] / MIB:.1f}" for name in ("planned", "process")]
            + [f"{100 * r['share']:+.1f} %"]
            for r in results
        ]
        print("\nMiB\n")
        print(table(["drafter", "context", "slots", "planned", "process", "difference"], rows))
        print(f"\neach within {100 * LIMIT:.0f} %: {'yes' if passed else 'NO'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
