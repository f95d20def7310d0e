"""A drafter's hyperparameters from a checkpoint's config. Every key is used here, harmless, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine_local.convert.fields import Section
from dspine_local.convert.rope import MAX_POSITIONS, Rope, read_rope
from dspine_local.errors import ModelFormatError

DSPINE = "DSpineDraftModel"
DFLASH = "DFlashDraftModel"

# The native reader has the same limits (native/core/drafter_config.cpp).
MAX_WIDTH = 1 << 18
MAX_VOCAB = 1 << 24
MAX_LAYERS = 128
MAX_TARGET_LAYERS = 4096
MAX_HEADS = 4096
MAX_TAPS = 64
MAX_BLOCK = 64
MAX_TOP_K = 256
MAX_WINDOW = 1 << 24

# What checkpoints without dspine_config were trained with (docs/method.md, layout 2).
REFERENCE_BLOCK_SIZE = 16
REFERENCE_TOP_K = 16

# Keys without effect on drafting, by section, and why.
_LIBRARY = "how a Python library loads, stores or names the model"
_TRAINING = "training only"
_TARGET = "the target's tokenizer, embedding and head are used"
HARMLESS: dict[str, dict[str, str]] = {
    "": {
        "_name_or_path": _LIBRARY,
        "auto_map": _LIBRARY,
        "dtype": _LIBRARY,
        "torch_dtype": _LIBRARY,
        "transformers_version": _LIBRARY,
        "use_cache": _LIBRARY,
        "attention_dropout": _TRAINING,
        "initializer_range": _TRAINING,
        "bos_token_id": _TARGET,
        "eos_token_id": _TARGET,
        "pad_token_id": _TARGET,
        "max_window_layers": "only a default for layer_types, which must be given when a layer slides",
    },
    "dflash_config": {"mask_token": "a name for mask_token_id, which decides"},
    "dspine_config": {
        "alignment_warmup_steps": _TRAINING,
        "alignment_weight": _TRAINING,
        "candidate_mass_threshold": _TRAINING,
        "ce_weight": _TRAINING,
        "replacement_end_ratio": _TRAINING,
        "replacement_hold_ratio": _TRAINING,
        "replacement_layers": _TRAINING,
        "replacement_probability": _TRAINING,
    },
}


@dataclass(frozen=True)
class Injection:
    """Adjacent injection: widths of the transfer space and of a message, candidates per slot."""

    rank: int
    message_size: int
    top_k: int


@dataclass(frozen=True)
class DrafterConfig:
    """What a drafter's GGUF says of it. ``target_layer_ids`` are Hugging Face's, 0-based layer outputs.

    ``injection`` is None for DFlash; ``sliding`` has one entry per layer, and ``window`` is 0 when none slides.
    """

    n_layers: int
    hidden_size: int
    ffn_size: int
    context_length: int
    vocab_size: int
    block_size: int
    n_heads: int
    n_heads_kv: int
    head_dim: int
    rms_eps: float
    rope: Rope
    causal: bool
    window: int
    sliding: tuple[bool, ...]
    n_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    injection: Injection | None


def read_config(values: Mapping[str, Any], file: Path, shapes: Mapping[str, Sequence[int]]) -> DrafterConfig:
    """Read and check a config.

    Args:
        values: The config, not nested.
        file: Where it was read, for messages.
        shapes: The checkpoint's tensor shapes [rows, columns]; they give the injection's widths when no
            ``dspine_config`` does.
    Raises:
        ModelFormatError: A key that is missing, unknown, out of range, or at odds with another.
    Source: docs/method.md, checkpoint layouts.
    """
    config = Section(values, file)
    architecture = _read_architecture(config)
    for key, allowed in _FIXED.items():
        config.fixed(key, *allowed)
    # No drafter has an embedding or a head of its own, so that tied or not makes no difference.
    config.fixed("tie_word_embeddings", True, False)

    dflash = config.section("dflash_config")
    vocab_size = config.integer("vocab_size", 2, MAX_VOCAB)
    config.fixed("draft_vocab_size", vocab_size)
    injection = _read_injection(config, file, shapes, vocab_size) if architecture == DSPINE else None
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    n_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    n_heads, n_heads_kv, head_dim = _read_heads(config, hidden_size)
    context_length = config.integer("max_position_embeddings", 1, MAX_POSITIONS)
    window, sliding = _read_sliding(config, n_layers)
    n_target_layers = config.integer("num_target_layers", 1, MAX_TARGET_LAYERS)
    reference = injection is not None and not config.has("dspine_config")
    result = DrafterConfig(
        n_layers=n_layers,
        hidden_size=hidden_size,
        ffn_size=config.integer("intermediate_size", 1, MAX_WIDTH),
        context_length=context_length,
        vocab_size=vocab_size,
        block_size=_read_block_size(config, dflash, REFERENCE_BLOCK_SIZE if reference else None),
        n_heads=n_heads,
        n_heads_kv=n_heads_kv,
        head_dim=head_dim,
        rms_eps=config.number("rms_norm_eps"),
        rope=read_rope(config, context_length),
        causal=_read_causal(config, dflash, architecture),
        window=window,
        sliding=sliding,
        n_target_layers=n_target_layers,
        target_layer_ids=_read_taps(dflash, n_target_layers),
        mask_token_id=_read_mask(dflash, vocab_size),
        injection=injection,
    )
    dflash.refuse_others(HARMLESS["dflash_config"])
    config.refuse_others(HARMLESS[""])
    return result


# Keys that may be left out, but if given must have one of these values.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3", "dspine", "dflash"),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


def _read_architecture(config: Section) -> str:
    names = config.strings("architectures")
    if len(names) != 1 or names[0] not in (DSPINE, DFLASH):
        config.refuse("architectures", f'["{DSPINE}"] or ["{DFLASH}"]')
    return names[0]


def _read_injection(config: Section, file: Path, shapes: Mapping[str, Sequence[int]], vocab_size: int) -> Injection:
    max_top_k = min(MAX_TOP_K, vocab_size)
    if config.has("dspine_config"):
        dspine = config.section("dspine_config")
        injection = Injection(
            rank=dspine.integer("transfer_rank", 1, MAX_WIDTH),
            message_size=dspine.integer("message_size", 1, MAX_WIDTH),
            top_k=dspine.integer("top_k", 1, max_top_k),
        )
        dspine.refuse_others(HARMLESS["dspine_config"])
        return injection
    shape = shapes.get("injection.message.weight", ())
    if len(shape) != 2 or not all(1 <= n <= MAX_WIDTH for n in shape):
        raise ModelFormatError(
            f"'{file}' has no dspine_config, and no matrix 'injection.message.weight' gives the widths instead"
        )
    return Injection(rank=shape[1], message_size=shape[0], top_k=min(REFERENCE_TOP_K, max_top_k))


def _read_heads(config: Section, hidden_size: int) -> tuple[int, int, int]:
    n_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    n_heads_kv = config.integer("num_key_value_heads", 1, MAX_HEADS, default=n_heads)
    if n_heads % n_heads_kv != 0:
        config.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {n_heads}")
    if not config.has("head_dim") and hidden_size % n_heads != 0:
        config.refuse("num_attention_heads", f"a divisor of hidden_size = {hidden_size}, as there is no head_dim")
    head_dim = config.integer("head_dim", 2, MAX_HEADS, default=hidden_size // n_heads)
    if head_dim % 2 != 0:
        config.refuse("head_dim", "an even number")
    return n_heads, n_heads_kv, head_dim


def _read_sliding(config: Section, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    use = config.boolean("use_sliding_window", default=False)
    types = ["full_attention"] * n_layers
    if config.has("layer_types"):
        types = config.strings("layer_types")
        if len(types) != n_layers:
            config.refuse("layer_types", f"{n_layers} entries, one per layer (num_hidden_layers)")
        if not set(types) <= {"full_attention", "sliding_attention"}:
            config.refuse("layer_types", "only full_attention and sliding_attention")
    elif use:
        config.refuse("use_sliding_window", "false, or layer_types to say which layers slide")
    slides = "sliding_attention" in types
    if slides and not config.has("use_sliding_window"):
        config.refuse("use_sliding_window", "true or false, as layer_types has sliding_attention")
    if config.has("sliding_window") or (use and slides):
        window = config.integer("sliding_window", 1, MAX_WINDOW)
        if use and slides:
            return window, tuple(kind == "sliding_attention" for kind in types)
    return 0, (False,) * n_layers


def _read_block_size(config: Section, dflash: Section, default: int | None) -> int:
    sizes = [s.integer("block_size", 2, MAX_BLOCK) for s in (config, dflash) if s.has("block_size")]
    if not sizes:
        return default or config.integer("block_size", 2, MAX_BLOCK)
    if len(set(sizes)) > 1:
        dflash.refuse("block_size", f"the same as block_size = {sizes[0]}")
    return sizes[0]


def _read_causal(config: Section, dflash: Section, architecture: str) -> bool:
    places = [(config, "is_causal"), (dflash, "causal")]
    given = [(section, key, section.boolean(key)) for section, key in places if section.has(key)]
    causal = given[0][2] if given else architecture == DSPINE
    for section, key, value in given:
        if architecture == DSPINE and not value:
            section.refuse(key, f"true: a {DSPINE} is causal inside the block")
        if value != causal:
            section.refuse(key, f"the same as is_causal = {str(causal).lower()}")
    return causal


def _read_taps(dflash: Section, n_target_layers: int) -> tuple[int, ...]:
    taps = dflash.integers("target_layer_ids")
    if len(taps) > MAX_TAPS:
        dflash.refuse("target_layer_ids", f"at most {MAX_TAPS} layers")
    if len(set(taps)) != len(taps):
        dflash.refuse("target_layer_ids", "no layer twice")
    if min(taps) < 0 or max(taps) >= n_target_layers:
        dflash.refuse("target_layer_ids", f"layers 0 to {n_target_layers - 1} (num_target_layers = {n_target_layers})")
    if max(taps) == n_target_layers - 1:
        dflash.refuse(
            "target_layer_ids",
            f"layers 0 to {n_target_layers - 2}: llama.cpp gives the inputs of layers, so the output of layer i is "
            f"read as the input of layer i + 1, and the last one (num_target_layers = {n_target_layers}) has no next",
        )
    return tuple(taps)


def _read_mask(dflash: Section, vocab_size: int) -> int:
    mask = dflash.integer("mask_token_id", 0, MAX_VOCAB)
    if mask >= vocab_size:
        dflash.refuse("mask_token_id", f"a token id below vocab_size = {vocab_size}")
    return mask
