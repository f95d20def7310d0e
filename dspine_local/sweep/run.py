"""A sweep from start to end: each type is written, tried on every prompt, and put on record, one after the other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import llama_cpp

from dspine_local.convert.outtypes import OUTTYPES
from dspine_local.engine import Engine
from dspine_local.evaluation.prompts import Prompt
from dspine_local.files import StrPath, checked_path, output_folder, output_path
from dspine_local.loading import longest_draft
from dspine_local.machine import processor
from dspine_local.options import GREEDY, EngineOptions
from dspine_local.planning.measure import PlannedFiles, measure
from dspine_local.progress import Report
from dspine_local.quantize import quantize_file
from dspine_local.slot_files import file_fingerprint
from dspine_local.sweep.record import read_sweep, write_sweep
from dspine_local.sweep.result import PromptResult, Sweep, TypeResult, need_spread

TYPES = ("f16", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0")


def sweep_types(
    target: StrPath,
    drafter: StrPath,
    folder: StrPath,
    prompts: Sequence[Prompt],
    *,
    types: Sequence[str] = TYPES,
    options: EngineOptions | None = None,
    max_tokens: int = 128,
    allow_requantize: bool = False,
    overwrite: bool = False,
    report: Report = lambda _done, _total, _label: None,
) -> Sweep:
    """Quantize a drafter to every type and measure each. What is on record in the folder is not measured again.

    Args:
        drafter: In f16, bf16 or f32; the types are made of it.
        folder: For the drafters and the record; made if need be.
        options: How to load the models. Drafts are as long as their ``n_draft``, or as the drafter's block.
        max_tokens: Tokens of each answer at most, at temperature 0.
        overwrite: Start anew, and replace files of these names.
    Raises:
        FileExistsError: A file is in the way that no earlier run of this sweep has made.
        ValueError: An unknown type, fewer than two prompts of a category, a quantized drafter, or a folder of another
            sweep.
        OSError, DSpineError: As ``quantize_file`` and ``Engine``.
    """
    source, out = checked_path(drafter), output_folder(folder)
    options = EngineOptions() if options is None else options
    names = _type_names(types)
    need_spread([prompt.category for prompt in prompts])
    about = _about(checked_path(target), source, prompts, options, max_tokens)
    done = Sweep(about, ()) if overwrite else read_sweep(out, about)
    files = {name: out / f"{source.stem}-{name}.gguf" for name in names}
    missing = [name for name in names if not any(_is_done(result, name, out) for result in done.results)]
    # Everything that can be refused is refused before hours of work.
    for name in missing:
        if out.is_dir():
            output_path(files[name], overwrite=overwrite, hint="give another --out, or --force to replace it")
        quantize_file(source, files[name], name, allow_requantize=allow_requantize, dry_run=True)
    measure(PlannedFiles(str(target), str(source)), options, 256, longest_draft(str(source), options.n_draft))
    out.mkdir(parents=True, exist_ok=True)
    results = {result.type: result for result in done.results}
    n_steps = len(missing) * len(prompts)
    for i, name in enumerate(missing):
        # Until it has figures it has another name, which the next run replaces if this one is killed.
        partial = files[name].with_suffix(".unmeasured")
        try:
            quantized = quantize_file(source, partial, name, allow_requantize=allow_requantize, overwrite=True)
            measured = _measure(target, partial, prompts, options, max_tokens, report, (i * len(prompts), n_steps))
            n_bytes = partial.stat().st_size
            partial.replace(files[name])
            results[name] = TypeResult(name, files[name].name, n_bytes, dict(quantized.types), measured)
            write_sweep(out, Sweep(about, tuple(results.values())))
        finally:
            partial.unlink(missing_ok=True)
    return Sweep(about, tuple(results[name] for name in names))


def _type_names(types: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(name.lower() for name in types))
    unknown = [name for name in names if name not in OUTTYPES]
    if unknown or not names:
        raise ValueError(f"types = {list(types)}, expected some of {', '.join(OUTTYPES)}")
    return names


def _is_done(result: TypeResult, name: str, folder: Path) -> bool:
    file = folder / result.file
    return result.type == name and file.is_file() and file.stat().st_size == result.n_bytes


def _measure(
    target: StrPath,
    drafter: Path,
    prompts: Sequence[Prompt],
    options: EngineOptions,
    max_tokens: int,
    report: Report,
    progress: tuple[int, int],
) -> tuple[PromptResult, ...]:
    """Every prompt's first turn, one at a time."""
    longest = longest_draft(str(drafter), options.n_draft)
    engine = Engine(target, drafter, replace(options, n_draft=longest))
    n_done, n_steps = progress
    results: list[PromptResult] = []
    for prompt in prompts:
        report(n_done + len(results), n_steps, drafter.stem)
        messages = [{"role": "user", "content": prompt.turns[0]}]
        answer = engine.chat(messages, max_tokens=max_tokens, sampling=GREEDY, cache_prompt=False)
        answer.read()
        stats = answer.stats
        assert stats is not None
        results.append(
            PromptResult(prompt.category, stats.rounds, stats.rounds + stats.accepted, stats.draft_s, stats.verify_s)
        )
    if not any(result.rounds for result in results):
        raise ValueError("no answer had more than one token: nothing was drafted")
    return tuple(results)


def _about(
    target: Path, drafter: Path, prompts: Sequence[Prompt], options: EngineOptions, max_tokens: int
) -> Mapping[str, Any]:
    """All that the figures depend on, beside the noise of timing."""
    asked = hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts]).encode()).hexdigest()[:16]
    return {
        "target": [target.name, file_fingerprint(target)[:16]],
        "drafter": [drafter.name, file_fingerprint(drafter)[:16]],
        "prompts": [len(prompts), asked],
        "max_tokens": max_tokens,
        "options": asdict(options),
        "processor": processor(),
        "llama-cpp-python": llama_cpp.__version__,
    }
