"""Checks a drafter's config against the target that it is to draft for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine_local._native import GgufFile, vocab_sha256
from dspine_local.convert.config import DrafterConfig
from dspine_local.convert.schema import ARCHITECTURE, Key
from dspine_local.errors import ModelFormatError, PairingError

TOKENS_KEY = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class TargetIdentity:
    """What a drafter's GGUF remembers of its target."""

    architecture: str
    vocab_sha256: str


def check_target(path: Path, config: DrafterConfig) -> TargetIdentity:
    """Compare width, layers and vocabulary of a target GGUF with a drafter's config.

    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: Not a whole GGUF of a language model.
        PairingError: Another width, layer count or vocabulary size; the message names both sides.
    """
    file = GgufFile(str(path))
    architecture = _need(file, path, Key.ARCHITECTURE)
    if architecture == ARCHITECTURE:
        raise PairingError(f"'{path}' is a drafter, expected the target model that it drafts for")
    n_rows = _vocabulary_rows(file, path)
    # Layers for multi-token prediction are counted in the file, but are not part of the model that is tapped.
    n_extra = _optional(file, f"{architecture}.nextn_predict_layers", 0)
    n_layers = _need(file, path, f"{architecture}.block_count") - n_extra
    sides = [
        ("width (hidden_size)", config.hidden_size, _need(file, path, f"{architecture}.embedding_length")),
        ("layers (num_target_layers)", config.n_target_layers, n_layers),
        ("vocabulary (vocab_size)", config.vocab_size, n_rows),
    ]
    differences = [f"{what}: {a} in the drafter, {b} in the target" for what, a, b in sides if a != b]
    if differences:
        raise PairingError(f"the drafter was not made for '{path}': {'; '.join(differences)}")
    return TargetIdentity(architecture, vocab_sha256(str(path)))


def _vocabulary_rows(file: GgufFile, path: Path) -> int:
    """Rows of the token embedding: the vocabulary with its padding, which llama.cpp has as tokens too."""
    n_tokens = len(_need(file, path, TOKENS_KEY))
    for tensor in file.tensors():
        if tensor.name == "token_embd.weight":
            if tensor.shape[1:] != [n_tokens]:
                raise ModelFormatError(
                    f"'{path}' has token_embd.weight of shape {tensor.shape}, expected {n_tokens} rows, one per token"
                )
            return n_tokens
    return n_tokens


def _need(file: GgufFile, path: Path, key: str) -> Any:
    value = _optional(file, key, None)
    if value is None:
        raise ModelFormatError(f"'{path}' has no key '{key}', expected the GGUF of a language model")
    return value


def _optional(file: GgufFile, key: str, default: Any) -> Any:
    try:
        return file.get(key)
    except KeyError:
        return default
