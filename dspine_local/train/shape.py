"""A trainable drafter's dimensions, and the checkpoint config that says them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dspine_local.checks import OptionError, need_integer
from dspine_local.train.weights import TargetWeights

KINDS = ("dspine", "dflash")
ARCHITECTURES = {"dspine": "DSpineDraftModel", "dflash": "DFlashDraftModel"}


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Dimensions of a drafter; symbols are those of docs/method.md.

    ``windows`` has one entry per layer: the sliding window, None for full attention.
    """

    kind: str
    hidden_size: int
    n_layers: int
    n_heads: int
    n_heads_kv: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    block_size: int
    taps: tuple[int, ...]
    n_target_layers: int
    mask_token_id: int
    causal: bool
    rank: int = 0
    message_size: int = 0
    top_k: int = 1
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_positions: int = 4096
    windows: tuple[int | None, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind = {self.kind!r}, expected {' or '.join(KINDS)}")
        if self.block_size < 2:
            raise ValueError(f"block_size = {self.block_size}, expected at least 2: the anchor and a proposal")
        if self.n_heads % self.n_heads_kv:
            raise ValueError(f"n_heads = {self.n_heads}, expected a multiple of n_heads_kv = {self.n_heads_kv}")

    @property
    def injection(self) -> bool:
        """Whether slots are told of their predecessors."""
        return self.kind == "dspine"

    def window(self, il: int) -> int | None:
        """The sliding window of a layer."""
        return self.windows[il] if self.windows else None

    @classmethod
    def from_config(cls, config: dict[str, Any], message_shape: tuple[int, ...] = ()) -> DrafterShape:
        """From a checkpoint's ``config.json``; ``message_shape`` gives the widths that older layouts leave out."""
        config = config.get("config", config)
        injection = config["architectures"] == [ARCHITECTURES["dspine"]]
        dflash, dspine = config["dflash_config"], config.get("dspine_config", {})
        n_layers = config["num_hidden_layers"]
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        kinds = config.get("layer_types") or ["full_attention"] * n_layers
        rope = config.get("rope_parameters") or config
        return cls(
            kind="dspine" if injection else "dflash",
            hidden_size=config["hidden_size"],
            n_layers=n_layers,
            n_heads=config["num_attention_heads"],
            n_heads_kv=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            ffn_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            block_size=config.get("block_size", dflash.get("block_size", 16)),
            taps=tuple(dflash["target_layer_ids"]),
            n_target_layers=config["num_target_layers"],
            mask_token_id=dflash["mask_token_id"],
            causal=config.get("is_causal", dflash.get("causal", injection)),
            message_size=dspine.get("message_size", message_shape[0] if message_shape else 0),
            rank=dspine.get("transfer_rank", message_shape[1] if message_shape else 0),
            top_k=dspine.get("top_k", 16 if injection else 1),
            rms_eps=config["rms_norm_eps"],
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            max_positions=config["max_position_embeddings"],
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        )

    def to_config(self) -> dict[str, Any]:
        """``config.json`` of the exported checkpoint (docs/method.md, checkpoint layouts)."""
        window = next((w for w in self.windows if w is not None), None)
        sliding = [w is not None for w in self.windows] or [False] * self.n_layers
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.kind]],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "is_causal": self.causal,
            "dtype": "bfloat16",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_heads_kv,
            "head_dim": self.head_dim,
            "num_target_layers": self.n_target_layers,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_positions,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "tie_word_embeddings": False,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.taps),
                "block_size": self.block_size,
            },
        }
        if self.injection:
            config["auto_map"] = {"AutoModel": "dspine.DSpineDraftModel"}
            config["dspine_config"] = {
                "transfer_rank": self.rank,
                "message_size": self.message_size,
                "top_k": self.top_k,
            }
        return config


def shape_for_target(
    target: TargetWeights,
    *,
    kind: str,
    taps: tuple[int, ...],
    mask_token_id: int,
    n_layers: int = 3,
    block_size: int = 8,
    rank: int = 128,
    message_size: int = 64,
    top_k: int = 16,
) -> DrafterShape:
    """A drafter with the target's own widths, so that its layers can begin as the target's.

    Raises:
        ModelFormatError: The target has no such widths.
        ValueError: A tap or mask token that the target does not have.
    """
    if not all(0 <= tap < target.n_layers - 1 for tap in taps):
        raise OptionError("taps", list(taps), f"layers from 0 to {target.n_layers - 2} of the target")
    need_integer("mask_token", mask_token_id, 0, target.shape("token_embd.weight")[0] - 1)
    width, n_heads = target.integer("embedding_length"), target.integer("attention.head_count")
    vocab_size = target.shape("token_embd.weight")[0]
    injected = kind == "dspine"
    return DrafterShape(
        kind=kind,
        hidden_size=width,
        n_layers=n_layers,
        n_heads=n_heads,
        n_heads_kv=target.integer("attention.head_count_kv", n_heads),
        head_dim=target.integer("attention.key_length", width // n_heads),
        ffn_size=target.integer("feed_forward_length"),
        vocab_size=vocab_size,
        block_size=block_size,
        taps=taps,
        n_target_layers=target.n_layers,
        mask_token_id=mask_token_id,
        causal=injected,
        rank=min(rank, width) if injected else 0,
        message_size=message_size if injected else 0,
        top_k=min(top_k, vocab_size) if injected else 1,
        rope_theta=float(target.key("rope.freq_base", 10000.0)),
        max_positions=target.integer("context_length"),
    )
