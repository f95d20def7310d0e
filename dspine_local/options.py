"""Options of the engine and of a request: typed, named as in llama.cpp and llama-server, checked by the native side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from dspine_local import _native

RANDOM_SEED = 0xFFFFFFFF
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_LISTS = ("dry_sequence_breakers", "samplers", "logit_bias")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the models are loaded.

    Args:
        n_ctx: Positions of the KV cache, shared evenly by the slots. 0: as many per slot as the target was trained for.
        n_parallel: Slots: requests that run at the same time.
        n_batch: Tokens of one decode call at most.
        n_ubatch: Tokens of one compute graph at most.
        n_gpu_layers: Layers of the target in device memory; -1 is all.
        n_threads: CPU threads for single tokens and drafts; 0 is one per core.
        n_threads_batch: CPU threads for longer batches; 0 is the same as ``n_threads``.
        flash_attn: ``"on"``, ``"off"`` or ``"auto"``.
        cache_type_k: Type of the target's keys, such as ``"f16"`` or ``"q8_0"``.
        cache_type_v: Type of the target's values.
        cache_type_drafter: Type of the drafter's keys and values: ``"f16"``, ``"f32"`` or ``"q8_0"``.
        n_draft: Tokens drafted per round at most. None is 7, or what the drafter can; 0 is plain decoding.
        transition_order: ``"path"``, ``"full"`` or ``"auto"`` (docs/method.md, evaluation orders).
        use_mmap: Map the target's file instead of reading it.
    """

    n_ctx: int = 4096
    n_parallel: int = 1
    n_batch: int = 512
    n_ubatch: int = 512
    n_gpu_layers: int = -1
    n_threads: int = 0
    n_threads_batch: int = 0
    flash_attn: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    cache_type_drafter: str = "f16"
    n_draft: int | None = None
    transition_order: str = "auto"
    use_mmap: bool = True


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen. Names, order and defaults are llama-server's; drafting changes none of it.

    Args:
        seed: Of the random numbers; the default draws one.
        temperature: Unitless, >= 0; 0 is greedy.
        repeat_last_n: Tokens that the penalties look back on; -1 is the whole context.
        dry_sequence_breakers: Texts that end a repetition for DRY.
        samplers: Names in the order in which they are applied; one that is not named is not used.
        min_keep: Tokens that ``typ_p``, ``top_p``, ``min_p`` and ``xtc`` leave at least.
        logit_bias: Pairs of token id and value added to its logit.
        ignore_eos: Never choose an end-of-generation token.
        grammar: GBNF that the answer follows; empty is none.
    """

    seed: int = RANDOM_SEED
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    samplers: Sequence[str] = SAMPLERS
    min_keep: int = 0
    logit_bias: Sequence[tuple[int, float]] = ()
    ignore_eos: bool = False
    grammar: str = ""

    def to_native(self) -> _native.SamplingParams:
        """The same for the native engine, which checks the values."""
        params = _native.SamplingParams()
        for option in fields(self):
            value = getattr(self, option.name)
            try:
                setattr(params, option.name, list(value) if option.name in _LISTS else value)
            except TypeError as error:
                raise ValueError(f"{option.name} = {value!r}, expected {option.type}") from error
        return params


GREEDY = SamplingOptions(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """One request.

    Args:
        max_tokens: Tokens of the answer at most; -1 is until the context is full.
        stop: Texts that end the answer; they are not part of it.
        stop_tokens: Token ids that end the answer, beside the model's own end-of-generation tokens.
        n_draft: Tokens drafted per round at most, up to the engine's; None is the engine's, 0 plain decoding.
        cache_prompt: Start from the longest beginning of the prompt that a slot still holds.
        n_probs: Most likely candidates to tell with every token, beside its own log-probability; None tells neither.
        slot: Wait for this slot; None takes the free one that shares the longest beginning.
        sampling: How tokens are chosen.
    """

    max_tokens: int = -1
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    n_draft: int | None = None
    cache_prompt: bool = True
    n_probs: int | None = None
    slot: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ValueError(f"stop = {self.stop!r}, expected a list of texts")
        if "" in self.stop:
            raise ValueError("stop has an empty text, expected at least one character in each")
