"""What a GGUF file holds, from its header alone: drafters and targets, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

from dspine_local._native import GgufFile, TensorInfo, vocab_sha256
from dspine_local.convert.schema import ARCHITECTURE, Key
from dspine_local.errors import ModelFormatError
from dspine_local.files import checked_path

MIB = 1 << 20
TOKENS_KEY = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class TypeCount:
    """Tensors of one type: how many, their weights and their bytes."""

    type: str
    n_tensors: int
    n_parameters: int
    n_bytes: int


@dataclass(frozen=True)
class FileSummary:
    """A GGUF file in brief.

    ``kind`` is drafter or target. ``n_bytes`` is the tensors', without header. ``details`` has the kind's own
    entries; one that the file does not give is None.
    """

    path: str
    kind: str
    architecture: str
    name: str | None
    n_tensors: int
    n_parameters: int
    n_bytes: int
    file_bytes: int
    bits_per_weight: float
    types: tuple[TypeCount, ...]
    details: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)

    def to_text(self) -> str:
        """The same for people: one aligned line per entry, sizes in MiB."""
        rows = [
            (self.kind, f"{self.architecture}{f' ({self.name})' if self.name else ''}"),
            ("parameters", f"{self.n_parameters:,} in {self.n_tensors} tensors"),
            ("size", f"{self.file_bytes / MIB:.1f} MiB, {self.bits_per_weight:.2f} bits per weight"),
            *((f"  {t.type}", f"{t.n_tensors} tensors, {t.n_bytes / MIB:.1f} MiB") for t in self.types),
            *((key.replace("_", " "), _shown(value)) for key, value in self.details.items()),
        ]
        width = max(len(label) for label, _ in rows)
        return "\n".join([self.path, *(f"  {label:<{width}}  {value}" for label, value in rows)])


def summarize(path: str | PathLike[str]) -> FileSummary:
    """Summarize a drafter or target GGUF file.

    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: Not a GGUF file, damaged, or without the keys of a model.
        ValueError: A NUL character in the path.
    """
    header = _Header(checked_path(path))
    tensors = header.file.tensors()
    architecture = header.need(Key.ARCHITECTURE)
    n_parameters = sum(prod(tensor.shape) for tensor in tensors)
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    is_drafter = architecture == ARCHITECTURE
    return FileSummary(
        path=str(path),
        kind="drafter" if is_drafter else "target",
        architecture=architecture,
        name=header.get(Key.NAME),
        n_tensors=len(tensors),
        n_parameters=n_parameters,
        n_bytes=n_bytes,
        file_bytes=Path(path).stat().st_size,
        bits_per_weight=8 * n_bytes / n_parameters if n_parameters else 0.0,
        types=_type_counts(tensors),
        details=_drafter_details(header) if is_drafter else _target_details(header, architecture, tensors),
    )


class _Header:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GgufFile(str(path))

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self.file.get(key)
        except KeyError:
            return default

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelFormatError(f"'{self.path}' has no key '{key}', expected a drafter or a language model")
        return value


def _type_counts(tensors: list[TensorInfo]) -> tuple[TypeCount, ...]:
    by_type: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.type, []).append(tensor)
    counts = [
        TypeCount(name, len(group), sum(prod(t.shape) for t in group), sum(t.n_bytes for t in group))
        for name, group in by_type.items()
    ]
    return tuple(sorted(counts, key=lambda count: (-count.n_bytes, count.type)))


def _drafter_details(header: _Header) -> dict[str, Any]:
    has_injection = header.need(Key.INJECTION)
    inputs = header.need(Key.TARGET_LAYERS)
    sliding = header.get(Key.SLIDING_WINDOW_PATTERN, [])
    details = {
        "method": "DSpine" if has_injection else "DFlash",
        "layers": header.need(Key.BLOCK_COUNT),
        "width": header.need(Key.EMBEDDING_LENGTH),
        "ffn_width": header.need(Key.FEED_FORWARD_LENGTH),
        "heads": header.need(Key.HEAD_COUNT),
        "kv_heads": header.need(Key.HEAD_COUNT_KV),
        "head_dim": header.need(Key.KEY_LENGTH),
        "vocabulary": header.need(Key.VOCAB_SIZE),
        "context_length": header.need(Key.CONTEXT_LENGTH),
        "rope_base": header.need(Key.ROPE_FREQ_BASE),
        "rope_scaling": header.get(Key.ROPE_SCALING_TYPE, "none"),
        "block_size": header.need(Key.BLOCK_SIZE),
        "causal_block": header.need(Key.CAUSAL),
        "mask_token_id": header.need(Key.MASK_TOKEN_ID),
        "target_layer_inputs": inputs,
        "target_layer_ids_hf": [lid - 1 for lid in inputs],
        "sliding_window": header.get(Key.SLIDING_WINDOW),
        "sliding_layers": [il for il, slides in enumerate(sliding) if slides],
    }
    if has_injection:
        details["transfer_rank"] = header.need(Key.TRANSFER_RANK)
        details["message_size"] = header.need(Key.MESSAGE_SIZE)
        details["candidates_per_slot"] = header.need(Key.TOP_K)
    details["target_architecture"] = header.get(Key.TARGET_ARCHITECTURE)
    details["target_layers"] = header.need(Key.TARGET_BLOCK_COUNT)
    details["target_width"] = header.need(Key.TARGET_EMBEDDING_LENGTH)
    details["target_vocab_sha256"] = header.get(Key.TARGET_VOCAB_SHA256)
    return details


def _target_details(header: _Header, architecture: str, tensors: list[TensorInfo]) -> dict[str, Any]:
    tokens = header.get(TOKENS_KEY)
    n_head = header.get(f"{architecture}.attention.head_count")
    width = header.need(f"{architecture}.embedding_length")
    head_dim = header.get(f"{architecture}.attention.key_length")
    if head_dim is None and isinstance(n_head, int) and n_head > 0:
        head_dim = width // n_head
    return {
        "layers": header.need(f"{architecture}.block_count"),
        "width": width,
        "ffn_width": header.get(f"{architecture}.feed_forward_length"),
        "heads": n_head,
        "kv_heads": header.get(f"{architecture}.attention.head_count_kv", n_head),
        "head_dim": head_dim,
        "vocabulary": None if tokens is None else len(tokens),
        "tokenizer": header.get("tokenizer.ggml.model"),
        "context_length": header.get(f"{architecture}.context_length"),
        "tied_output": all(tensor.name != "output.weight" for tensor in tensors),
        "chat_template": header.get("tokenizer.chat_template") is not None,
        "vocab_sha256": None if tokens is None else vocab_sha256(str(header.path)),
    }


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) if value else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
