"""The bytes that llama.cpp and the drafter would allocate, asked of themselves: both lay out buffers without memory.

One thing is allocated even then: a recurrent state and its snapshots. Where all snapshots would be large, a few are
laid out, and the rest is counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dspine_local import _native
from dspine_local.convert.schema import Tensor
from dspine_local.native_models import open_drafter, open_target
from dspine_local.options import EngineOptions
from dspine_local.planning.plan import HOST_PARTS, PARTS, MemoryLine

CPU = "CPU"
# Recurrent snapshots that may really be allocated while planning.
MAX_SNAPSHOT_BYTES = 256 << 20
# Layers whose state llama.cpp keeps per sequence have one of these tensors.
_RECURRENT = re.compile(r"blk\.(\d+)\.(ssm_conv1d|shortconv\.conv)")

# What llama.cpp keeps of a token and of a merge of two (strings, hash nodes and buckets), and for each tensor of the
# descriptions of its graphs: docs/memory.md.
TOKEN_BYTES, MERGE_BYTES, GRAPH_BYTES = 144, 104, 16 << 10

Amounts = Counter[tuple[str, str]]  # bytes by part and device


@dataclass(frozen=True)
class PlannedFiles:
    """GGUF files of target and drafter; a header without data is enough."""

    target: str
    drafter: str | None


@dataclass(frozen=True)
class Measured:
    """Lines of a plan, and the positions that all slots really get together."""

    lines: tuple[MemoryLine, ...]
    n_ctx: int


def measure(files: PlannedFiles, options: EngineOptions, n_ctx: int, n_draft: int) -> Measured:
    """What the files would need, loaded with these options.

    Args:
        n_ctx: In place of the options': positions of all slots together; 0 is as many as the target was trained for.
        n_draft: Longest draft.
    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: A file is not what it should be.
        PairingError: The drafter does not belong to the target.
        BackendError: Not even a few snapshots of the recurrent state have room.
        ValueError: An option is out of range.
    """
    bare = _laid_out(files, options, n_ctx, n_draft, 0)
    amounts = bare.amounts
    if bare.is_recurrent:
        amounts = _with_snapshots(files, options, n_ctx, n_draft, bare)
    amounts["vocabulary, graphs", CPU] = bookkeeping_bytes(files.target)
    order = sorted(amounts.items(), key=lambda item: (PARTS.index(item[0][0]), item[0][1]))
    lines = tuple(MemoryLine(part, device, n_bytes) for (part, device), n_bytes in order if n_bytes > 0)
    return Measured(lines, bare.n_ctx)


@dataclass(frozen=True)
class _LaidOut:
    amounts: Amounts
    n_ctx: int
    is_recurrent: bool


def _laid_out(files: PlannedFiles, options: EngineOptions, n_ctx: int, n_draft: int, n_snapshots: int) -> _LaidOut:
    target = open_target(files.target, options, n_ctx=n_ctx, n_draft=n_draft, planned=True, n_snapshots=n_snapshots)
    amounts: Amounts = Counter()
    if files.drafter is not None:
        drafter = open_drafter(files.drafter, target, options)
        target.enable_taps(drafter.target_layers)
        codes = sum(t.n_bytes for t in _native.GgufFile(files.drafter).tensors() if t.name == Tensor.INJECT_CODES)
        for device, part, n_bytes in drafter.memory():
            amounts[f"drafter {part}", device] += n_bytes
            if part == "weights":
                amounts["drafter codes", device] += codes
                amounts["drafter weights", device] -= codes
    names = {"weights": "target weights", "cache": "target KV cache", "compute": "target compute"}
    for device, part, n_bytes in target.memory():
        amounts[names.get(part, "logits and taps"), device] += n_bytes
    return _LaidOut(amounts, target.n_ctx_seq * options.n_parallel, target.is_recurrent)


def _with_snapshots(files: PlannedFiles, options: EngineOptions, n_ctx: int, n_draft: int, bare: _LaidOut) -> Amounts:
    """The amounts with the recurrent state told apart from the KV cache, and its snapshots.

    Every snapshot is one more state of every sequence. The compute buffer grows with them by about one layer's states
    each, which the operation that makes a layer's snapshots returns: an estimate, docs/memory.md says how good.
    """
    one = _laid_out(files, options, n_ctx, n_draft, 1).amounts
    state = _parts(one - bare.amounts, "target KV cache")
    n_most = MAX_SNAPSHOT_BYTES // max(1, sum(state.values()))
    n_real = min(n_draft, max(1, n_most))
    real = {0: bare.amounts, 1: one}.get(n_real) or _laid_out(files, options, n_ctx, n_draft, n_real).amounts
    amounts = Counter(real)
    n_layers = len(_recurrent_layers(files.target))
    for device, n_bytes in state.items():
        amounts["target KV cache", device] -= n_bytes * (1 + n_real)
        amounts["recurrent state", device] += n_bytes
        amounts["recurrent snapshots", device] += n_bytes * n_draft
        amounts["target compute", device] += (n_draft - n_real) * n_bytes // max(1, n_layers)
    return amounts


def _parts(amounts: Amounts, part: str) -> dict[str, int]:
    return {device: n_bytes for (name, device), n_bytes in amounts.items() if name == part}


def _recurrent_layers(path: str) -> set[str]:
    return {found[1] for t in _native.GgufFile(path).tensors() if (found := _RECURRENT.match(t.name))}


def bookkeeping_bytes(path: str) -> int:
    """Host memory of a target's vocabulary and of its graphs' descriptions, an estimate.

    A file without a vocabulary counts as if it had a BPE of its size, with as many merges as tokens.
    """
    file = _native.GgufFile(path)
    keys = set(file.keys())
    if "tokenizer.ggml.tokens" in keys:
        n_tokens = len(file.get("tokenizer.ggml.tokens"))
        n_merges = len(file.get("tokenizer.ggml.merges")) if "tokenizer.ggml.merges" in keys else 0
    else:
        n_tokens = n_merges = int(file.get(f"{file.get('general.architecture')}.vocab_size"))
    return n_tokens * TOKEN_BYTES + n_merges * MERGE_BYTES + len(file.tensors()) * GRAPH_BYTES


def on_assumed_device(lines: Sequence[MemoryLine], files: PlannedFiles, device: str) -> tuple[MemoryLine, ...]:
    """Lines of this machine's CPU as they would be with the whole target on a device that this machine lacks.

    llama.cpp leaves the token embedding and the output buffer in host memory; a tied embedding is copied. The device's
    compute buffers are taken to be as large as the CPU's.
    """
    tensors = {t.name: t.n_bytes for t in _native.GgufFile(files.target).tensors()}
    embedding = tensors["token_embd.weight"]
    on_device = sum(tensors.values()) - (embedding if "output.weight" in tensors else 0)
    moved = [MemoryLine("target weights", device, on_device), MemoryLine("target weights", CPU, embedding)]
    moved += [
        MemoryLine(line.part, CPU if line.part in HOST_PARTS else device, line.n_bytes)
        for line in lines
        if line.part != "target weights"
    ]
    return tuple(moved)
