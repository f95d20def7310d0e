"""Options of the engine and of a request, named as in llama.cpp and llama-server, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from dspine_local import _native
from dspine_local.checks import (
    INT32_MAX,
    UINT32_MAX,
    OptionError,
    need_choice,
    need_collection,
    need_flag,
    need_integer,
    need_number,
    need_positive,
    need_text,
)

RANDOM_SEED = UINT32_MAX
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
# What ggml and llama.cpp are compiled for.
MAX_THREADS = 512
MAX_PARALLEL = 256
MAX_CHECKPOINT_MIB = 1 << 20

FLASH_ATTN = ("on", "off", "auto")
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
DRAFTER_CACHE_TYPES = ("f16", "f32", "q8_0")
TRANSITION_ORDERS = ("auto", "path", "full")
SPLIT_MODES = ("layer", "none")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the models are loaded.

    Args:
        n_ctx: Positions of the KV cache, shared evenly by the slots. 0: as many per slot as the target was trained for;
            None: as many of these as fit into memory.
        n_parallel: Slots: requests that run at the same time.
        n_batch: Tokens of one decode call at most.
        n_ubatch: Tokens of one compute graph at most.
        n_gpu_layers: Layers of the target in device memory; -1 is all.
        devices: Names of the devices for the target's layers (``dspine-local doctor`` lists them); empty is the CPU
            alone, None all that llama.cpp would take.
        split_mode: ``"layer"``: layers over all devices; ``"none"``: all on the first.
        tensor_split: Shares of the devices, in their order; empty is in proportion to their free memory.
        drafter_device: Name of the drafter's device; elsewhere than the target's output matrix, it has a copy of that.
            None is where that matrix lies, or a device of this machine where it lies on another's.
        n_threads: CPU threads for single tokens and drafts, 512 at most; 0 is one per core.
        n_threads_batch: CPU threads for longer batches; 0 is the same as ``n_threads``.
        flash_attn: ``"on"``, ``"off"`` or ``"auto"``.
        cache_type_k: Type of the target's keys, such as ``"f16"`` or ``"q8_0"``.
        cache_type_v: Type of the target's values.
        cache_type_drafter: Type of the drafter's keys and values: ``"f16"``, ``"f32"`` or ``"q8_0"``.
        n_draft: Tokens drafted per round. None chooses every round, by measurement; 0 is plain decoding.
        strict: Draft only as much as changes no bit of the answer, by an audit of this very configuration, and decode
            every slot by itself (docs/lossless.md). Without an audit on record a short one is made.
        transition_order: ``"path"``, ``"full"`` or ``"auto"`` (docs/method.md, evaluation orders).
        use_mmap: Map the target's file instead of reading it.
        checkpoint_mib: MiB of host memory for states that a recurrent or hybrid target can go back to, for prompts that
            begin like earlier ones; all slots together, 0 is none.
    """

    n_ctx: int | None = 4096
    n_parallel: int = 1
    n_batch: int = 512
    n_ubatch: int = 512
    n_gpu_layers: int = -1
    devices: Sequence[str] | None = None
    split_mode: str = "layer"
    tensor_split: Sequence[float] = ()
    drafter_device: str | None = None
    n_threads: int = 0
    n_threads_batch: int = 0
    flash_attn: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    cache_type_drafter: str = "f16"
    n_draft: int | None = None
    strict: bool = False
    transition_order: str = "auto"
    use_mmap: bool = True
    checkpoint_mib: int = 512

    def __post_init__(self) -> None:
        for name, low, high in (
            ("n_parallel", 1, MAX_PARALLEL),
            ("n_batch", 1, INT32_MAX),
            ("n_ubatch", 1, INT32_MAX),
            ("n_gpu_layers", -1, INT32_MAX),
            ("n_threads", 0, MAX_THREADS),
            ("n_threads_batch", 0, MAX_THREADS),
            ("checkpoint_mib", 0, MAX_CHECKPOINT_MIB),
        ):
            need_integer(name, getattr(self, name), low, high)
        for name in ("n_ctx", "n_draft"):
            if getattr(self, name) is not None:
                need_integer(name, getattr(self, name), 0)
        need_choice("flash_attn", self.flash_attn, FLASH_ATTN)
        need_choice("cache_type_k", self.cache_type_k, CACHE_TYPES)
        need_choice("cache_type_v", self.cache_type_v, CACHE_TYPES)
        need_choice("cache_type_drafter", self.cache_type_drafter, DRAFTER_CACHE_TYPES)
        need_choice("transition_order", self.transition_order, TRANSITION_ORDERS)
        need_flag("use_mmap", self.use_mmap)
        need_flag("strict", self.strict)
        need_choice("split_mode", self.split_mode, SPLIT_MODES)
        if self.devices is not None:
            names = tuple(need_collection("devices", self.devices, "names of devices"))
            for name in names:
                need_text("devices", name)
            object.__setattr__(self, "devices", names)  # a tuple, so that options can be a key
        shares = tuple(need_collection("tensor_split", self.tensor_split, "numbers"))
        for share in shares:
            need_number("tensor_split", share, 0.0)
        object.__setattr__(self, "tensor_split", shares)
        if self.drafter_device is not None:
            need_text("drafter_device", self.drafter_device)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen. Names, order and defaults are llama-server's; drafting changes none of it.

    Args:
        seed: Of the random numbers, 32 bits; the default, and -1, draws one.
        temperature: Unitless, >= 0; 0 is greedy.
        top_k: Tokens to choose from; 0 or less is all.
        top_p: A probability, as are ``min_p``, ``typical_p``, ``xtc_probability`` and ``xtc_threshold``: 0 to 1.
        repeat_last_n: Tokens that the penalties look back on; -1 is the whole context. DRY has ``dry_penalty_last_n``.
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
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    samplers: Sequence[str] = SAMPLERS
    min_keep: int = 0
    logit_bias: Sequence[tuple[int, float]] = ()
    ignore_eos: bool = False
    grammar: str = ""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("seed", -1, UINT32_MAX),
            ("top_k", -INT32_MAX - 1, INT32_MAX),
            ("repeat_last_n", -1, INT32_MAX),
            ("dry_allowed_length", 0, INT32_MAX),
            ("dry_penalty_last_n", -1, INT32_MAX),
            ("min_keep", 0, INT32_MAX),
        ):
            need_integer(name, getattr(self, name), low, high)
        for name in ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"):
            need_number(name, getattr(self, name), 0.0, 1.0)
        for name in ("temperature", "dynatemp_range", "dynatemp_exponent", "dry_multiplier", "dry_base"):
            need_number(name, getattr(self, name), 0.0)
        for name in ("top_n_sigma", "frequency_penalty", "presence_penalty"):
            need_number(name, getattr(self, name))
        need_positive("repeat_penalty", self.repeat_penalty)
        for pair in need_collection("logit_bias", self.logit_bias, "pairs of token id and value"):
            _check_bias(pair)
        for name in ("dry_sequence_breakers", "samplers"):
            for text in need_collection(name, getattr(self, name), "texts"):
                need_text(f"an entry of {name}", text)
        need_flag("ignore_eos", self.ignore_eos)
        need_text("grammar", self.grammar)

    def to_native(self) -> _native.SamplingParams:
        """The same for the native engine, which knows the vocabulary and checks what depends on it."""
        params = _native.SamplingParams()
        converted = {
            "seed": self.seed & UINT32_MAX,
            "dry_sequence_breakers": list(self.dry_sequence_breakers),
            "samplers": list(self.samplers),
            "logit_bias": [(int(token), float(bias)) for token, bias in self.logit_bias],
        }
        for option in fields(self):
            setattr(params, option.name, converted.get(option.name, getattr(self, option.name)))
        return params


def _check_bias(pair: object) -> None:
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise OptionError("logit_bias", pair, "pairs of token id and value")
    token, bias = pair
    need_integer("logit_bias token", token, 0)
    if bias not in (math.inf, -math.inf):  # minus infinity rules a token out
        need_number("logit_bias", bias)


GREEDY = SamplingOptions(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """One request.

    Args:
        max_tokens: Tokens of the answer at most; -1 is until the context is full.
        stop: Texts that end the answer; they are not part of it.
        stop_tokens: Token ids that end the answer, beside the model's own end-of-generation tokens.
        n_draft: Tokens drafted per round, up to the engine's; None is as the engine does, 0 plain decoding.
        cache_prompt: Start from the longest beginning of the prompt that a slot still holds.
        n_probs: Most likely candidates to tell with every token, beside its own log-probability; None tells neither.
        post_sampling_probs: These are of the distribution that is sampled from, not of the model's logits.
        slot: Wait for this slot; None takes the free one that shares the longest beginning.
        sampling: How tokens are chosen.
    """

    max_tokens: int = -1
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    n_draft: int | None = None
    cache_prompt: bool = True
    n_probs: int | None = None
    post_sampling_probs: bool = False
    slot: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)

    def __post_init__(self) -> None:
        need_integer("max_tokens", self.max_tokens, -1)
        for text in need_collection("stop", self.stop, "texts"):
            need_text("stop", text)
            if not text:
                raise OptionError("stop", text, "at least one character in each text")
        for token in need_collection("stop_tokens", self.stop_tokens, "token ids"):
            need_integer("stop_tokens", token, 0)
        if self.n_draft is not None:
            need_integer("n_draft", self.n_draft, 0)
        need_flag("cache_prompt", self.cache_prompt)
        need_flag("post_sampling_probs", self.post_sampling_probs)
        for name in ("n_probs", "slot"):
            if getattr(self, name) is not None:
                need_integer(name, getattr(self, name), 0)
        if not isinstance(self.sampling, SamplingOptions):
            raise OptionError("sampling", self.sampling, "SamplingOptions")
