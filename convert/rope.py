"""Rotary position settings of a checkpoint, in GGUF's terms."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dspine_local.convert.fields import Section
from dspine_local.errors import ModelFormatError

ROPE_TYPES = ("default", "linear", "yarn")
MAX_POSITIONS = 1 << 30


@dataclass(frozen=True)
class RopeScaling:
    """How positions beyond the trained context are rotated.

    ``attn_factor`` is the total scale of cos and sin, as Hugging Face's ``attention_factor``.
    """

    type: str = "none"
    factor: float = 1.0
    original_context_length: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class Rope:
    """``freq_base`` is the base of the rotation frequencies (``rope_theta``)."""

    freq_base: float
    scaling: RopeScaling


def read_rope(config: Section, context_length: int) -> Rope:
    """The rotation settings from ``rope_theta``, ``rope_parameters`` and ``rope_scaling``, which must agree.

    Args:
        config: The checkpoint's config.
        context_length: ``max_position_embeddings``, YaRN's original context when none is given.
    Raises:
        ModelFormatError: Disagreement, an unsupported type, an unknown key.
    """
    config.fixed("partial_rotary_factor", 1, 1.0)
    bases: dict[str, float] = {}
    scalings: dict[str, RopeScaling] = {}
    if config.has("rope_theta"):
        bases["rope_theta"] = config.number("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        if config.has(key):
            section = config.section(key)
            if section.has("rope_theta"):
                bases[f"{key}.rope_theta"] = section.number("rope_theta")
            scalings[key] = _read_scaling(section, context_length)
    if not bases:
        config.number("rope_theta")
    if len(set(bases.values())) > 1:
        found = ", ".join(f"{key} = {value:g}" for key, value in bases.items())
        raise ModelFormatError(f"the config gives different rotation bases: {found}; expected one value")
    if len(set(scalings.values())) > 1:
        found = ", ".join(f"{key} says {value}" for key, value in scalings.items())
        raise ModelFormatError(f"the config gives different rope settings: {found}; expected the same")
    return Rope(next(iter(bases.values())), next(iter(scalings.values()), RopeScaling()))


def _read_scaling(rope: Section, context_length: int) -> RopeScaling:
    expected = "default, linear or yarn (others are not supported)"
    kinds = {rope.text(key, ROPE_TYPES, expected) for key in ("rope_type", "type") if rope.has(key)}
    if len(kinds) > 1:
        rope.refuse("type", "the same as rope_type")
    kind = kinds.pop() if kinds else "default"
    rope.fixed("partial_rotary_factor", 1, 1.0)
    scaling = RopeScaling()
    if kind == "linear":
        scaling = RopeScaling("linear", rope.number("factor", low=1.0))
    elif kind == "yarn":
        scaling = _read_yarn(rope, context_length)
    rope.refuse_others()
    return scaling


def _read_yarn(rope: Section, context_length: int) -> RopeScaling:
    # ggml rounds YaRN's corner dimensions, as Hugging Face does unless told otherwise.
    rope.fixed("truncate", True)
    factor = rope.number("factor", low=1.0)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    attn_factor = magnitude(1.0)
    if rope.has("mscale") != rope.has("mscale_all_dim"):
        key = "mscale" if rope.has("mscale") else "mscale_all_dim"
        rope.refuse(key, "mscale and mscale_all_dim together")
    if rope.has("mscale"):
        attn_factor = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    if rope.has("attention_factor"):
        attn_factor = rope.number("attention_factor")
    scaling = RopeScaling(
        "yarn",
        factor,
        rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS, default=context_length),
        attn_factor,
        rope.number("beta_fast", default=32.0),
        rope.number("beta_slow", default=1.0),
    )
    if scaling.beta_fast < scaling.beta_slow:
        rope.refuse("beta_fast", f"at least beta_slow = {scaling.beta_slow:g}")
    return scaling
