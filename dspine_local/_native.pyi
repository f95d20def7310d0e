"""The compiled extension's interface (native/bindings/). A test holds it against the built module."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

class DSpineError(Exception): ...
class ModelFormatError(DSpineError): ...
class PairingError(DSpineError): ...
class ContextLengthError(DSpineError): ...
class BackendError(DSpineError): ...

class TensorInfo:
    """One tensor of a GGUF file: ``shape`` is in ggml's order (ne0, the row length, first), sizes are bytes."""

    name: str
    type: str
    shape: list[int]
    offset: int
    n_bytes: int

class GgufFile:
    """A GGUF file's header: metadata and tensor list, read and checked without the tensor data.

    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: Not a GGUF file, damaged, or shorter than its tensors need.
    """

    def __init__(self, path: str) -> None: ...
    def keys(self) -> list[str]: ...
    def get(self, key: str) -> Any:
        """The value as int, float, bool, str or a list of these. Raises KeyError."""
    def tensors(self) -> list[TensorInfo]: ...

def vocab_sha256(path: str) -> str:
    """SHA-256 (hex) of a target's vocabulary: every ``tokenizer.ggml.tokens`` string as u32 length + bytes."""

def type_layout(type_name: str) -> tuple[int, int]:
    """Elements and bytes of one block of a ggml type, e.g. ``("q8_0") -> (32, 34)``. Raises ValueError."""

def quantize(
    rows: npt.NDArray[np.float32],
    type_name: str,
    importance: npt.NDArray[np.float32] | None = None,
    n_threads: int = 0,
) -> npt.NDArray[np.uint8]:
    """Encode float32 rows [n_rows, n_per_row] in a ggml type with ggml's own quantizer; uint8 [n_rows, row_bytes].

    ``type_name`` is ggml's: f32, f16, bf16, q8_0, q6_K, q5_K, q4_K, q4_0 (case-insensitive). ``importance``, float32
    [n_per_row]: what an error in each column costs. GIL released.
    Raises ValueError for a row length that the block size does not divide.
    """

def dequantize(rows: npt.NDArray[np.uint8], type_name: str, n_threads: int = 0) -> npt.NDArray[np.float32]:
    """Decode rows of a ggml type, uint8 [n_rows, row_bytes]; float32 [n_rows, n_per_row]. GIL released.

    Raises ValueError for a row length that is not whole blocks.
    """

def cpu_layouts_work() -> bool:
    """Whether llama.cpp's CPU layouts of weights can be used: False where its Intel AMX code was compiled wrongly."""

def set_log_verbose(verbose: bool) -> None:
    """Pass llama.cpp's and ggml's log on to stderr."""

def add_rpc_server(endpoint: str) -> None:
    """Make the devices of llama.cpp's ``rpc-server`` at host:port known. The process ends when none answers there.

    Raises BackendError when this build has no RPC backend, or the server no device.
    """

def serve_rpc(endpoint: str, devices: list[str], n_threads: int = 0) -> None:
    """Lend devices to other machines at host:port for as long as the process lives; returns only when it cannot.

    Raises BackendError when this build has no RPC backend, ValueError for a device that does not exist.
    """

MemoryUse = tuple[str, str, int]  # device, part (weights, cache, compute, output), bytes

def devices() -> list[tuple[str, str, bool, int, int]]:
    """Of every ggml device: name, description, whether it is a GPU, bytes free and in all."""

def quantized_types(arch: str, shape: list[int], tensors: list[tuple[str, list[int]]], file_type: int) -> list[str]:
    """The type that llama.cpp's quantizer gives each tensor of a model; f32 for those that it leaves alone.

    Args:
        shape: Layers, width, feed-forward width, heads, KV heads, head width.
        tensors: Names and shapes, row length first.
        file_type: A number of llama_ftype.
    """

class TargetTensors:
    """Token embedding and output matrix of a target, as a drafter borrows them."""

    @staticmethod
    def from_arrays(embed: npt.NDArray[np.float32], head: npt.NDArray[np.float32]) -> TargetTensors:
        """From float32 [n_vocab, n_embd] each, on the CPU. Raises ValueError for other shapes."""

class Target:
    """A llama.cpp model and its context. ``n_rollback`` is the longest draft that will be verified."""

    path: str
    arch: str
    description: str
    n_vocab: int
    n_embd: int
    n_layer: int
    n_ctx_seq: int
    n_seq: int
    n_batch: int
    n_threads: int
    n_threads_batch: int
    n_rollback: int
    is_recurrent: bool
    n_ctx_train: int
    n_bytes: int
    graph_splits: tuple[int, int]
    """Parts that the graphs of a prompt and of one token are cut into for the devices; -1 where that is not known."""
    chat_template: str | None
    bos_token: int
    eos_token: int

    def __init__(
        self,
        path: str,
        *,
        n_ctx: int = 4096,
        n_seq: int = 1,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_rollback: int = 0,
        n_gpu_layers: int = -1,
        n_threads: int = 0,
        n_threads_batch: int = 0,
        flash_attn: str = "auto",
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        use_mmap: bool = True,
        hidden: bool = False,
        planned: bool = False,
        n_snapshots: int = -1,
        devices: list[str] | None = None,
        split_mode: str = "layer",
        tensor_split: list[float] = [],
    ) -> None:
        """``planned``: allocates nothing, for ``memory``; of a recurrent state ``n_snapshots`` are even so."""
    def memory(self) -> list[MemoryUse]:
        """Bytes allocated, or when planned those that would be, with the layers that are tapped now."""
    def tensors(self) -> TargetTensors: ...
    def is_end_of_generation(self, token: int) -> bool: ...
    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...
    def piece(self, token: int, *, special: bool = False) -> bytes: ...
    def enable_taps(self, layers: list[int]) -> None:
        """Keep the inputs of these layers of every decode. Raises PairingError for one that cannot be tapped."""
    def length(self, seq: int) -> int: ...
    def reusable(self, seq: int, n: int) -> int:
        """The longest length up to n that the sequence can be cut back to."""
    def truncate(self, seq: int, n: int) -> None: ...
    def save_recurrent(self, seq: int) -> bytes:
        """The part of a sequence's state that cannot be cut back; only of a recurrent target."""
    def load_recurrent(self, seq: int, state: bytes, n: int) -> None:
        """Put it back while the sequence has the n positions that it was saved at, and cut the sequence to these.

        Raises BackendError; the sequence is then empty.
        """
    def decode(self, seq: int, tokens: list[int], *, n_outputs: int = 1) -> npt.NDArray[np.float32]:
        """Append tokens to a sequence; the logits of the last ``n_outputs`` rows, float32 [n_outputs, n_vocab]."""
    def hidden(self, n_tokens: int) -> npt.NDArray[np.float32]:
        """Of the last decode: final hidden states behind the output norm, float32 [n_tokens, n_embd].

        Raises ValueError when the target was made without ``hidden``.
        """
    def taps(self, tap: int, n_tokens: int) -> npt.NDArray[np.float32]:
        """Of the last decode: the input of the tap's layer, float32 [n_tokens, n_embd]."""

class Draft:
    """``probabilities[i]``: of token i among its slot's candidates; empty for drafters without injection."""

    tokens: list[int]
    probabilities: list[float]

class DraftSource:
    """Where an engine's drafts come from."""

    max_draft: int

class Drafter(DraftSource):
    """A DSpine or DFlash drafter on one device; elsewhere than the target's output matrix, it has a copy of that."""

    block_size: int
    n_taps: int
    n_embd: int
    has_injection: bool
    target_layers: list[int]
    target_vocab_sha256: str
    device: str
    order: str
    weight_bytes: int
    cache_bytes: int
    compute_bytes: int

    def __init__(
        self,
        path: str,
        target: TargetTensors,
        *,
        n_seq: int = 1,
        n_ctx: int = 4096,
        n_threads: int = 0,
        cache_type: str = "f16",
        order: str = "auto",
        device: str = "",
    ) -> None: ...
    def memory(self) -> list[MemoryUse]:
        """Bytes allocated, or beside a planned target those that would be."""
    def operations(self, device: str) -> list[tuple[str, str, int, bool]]:
        """Operations of its largest graphs as they would be on a device: name, type of the operand that matters
        (weights, a cache), number of nodes, whether the device can run all of them. Raises ValueError for a device that
        does not exist."""
    def length(self, seq: int) -> int: ...
    def reusable(self, seq: int, n: int) -> int: ...
    def truncate(self, seq: int, n: int) -> None: ...
    def commit(self, seq: int, features: npt.NDArray[np.float32]) -> None:
        """Append features, float32 [n, n_taps * n_embd], to a sequence's cache."""
    def draft(self, blocks: list[tuple[int, int]], n_draft: int) -> list[Draft]:
        """One draft per block (sequence, anchor token), behind the sequence's committed context."""
    def trace(self, seq: int, anchor: int, n_draft: int) -> dict[str, Any]:
        """Every intermediate array of one block, float32, slots first (docs/parity.md)."""

class SimulatedDrafter(DraftSource):
    """Another drafter's costs with a chosen acceptance: its tokens are made right or wrong against a known answer.

    ``acceptance[i]`` is the probability that a draft's token i is right given that all before it are; later tokens are
    wrong. What is right follows from the seed, the prompt and the position, not from the draft length.
    """

    def __init__(self, drafter: DraftSource, acceptance: list[float], *, seed: int, n_vocab: int) -> None: ...
    def expect(self, prompt: list[int], answer: list[int]) -> None:
        """The answer that requests with this prompt will get. Call it while no request runs."""

class CallbackDrafter(DraftSource):
    """Drafts from a function ``(sequence, tokens so far, n_draft) -> tokens``."""

    def __init__(self, draft: Any, *, n_seq: int = 1, max_draft: int = 15, taps: list[int] = ...) -> None: ...
    def length(self, seq: int) -> int: ...

class SamplingParams:
    """See dspine_local.options.SamplingOptions."""

    seed: int
    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    repeat_last_n: int
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: list[str]
    samplers: list[str]
    min_keep: int
    logit_bias: list[tuple[int, float]]
    ignore_eos: bool
    grammar: str

class RequestStats:
    """Counters of one request; times in microseconds. See dspine_local.stats.GenerationStats."""

    n_prompt: int
    n_reused: int
    n_generated: int
    n_rounds: int
    n_drafted: int
    n_accepted: int
    rounds_by_draft: list[int]
    drafted_at: list[int]
    accepted_at: list[int]
    prefill_us: int
    draft_us: int
    verify_us: int
    commit_us: int
    round_us: int

class TokenLogprobs:
    """Natural log-probability of an emitted token, and the most likely candidates: (token, log-probability)."""

    logprob: float
    top: list[tuple[int, float]]

class SlotInfo:
    """One slot; ``request`` is None while it is idle, ``generating`` False while it reads a prompt."""

    id: int
    request: int | None
    generating: bool
    n_cached: int
    n_prompt: int
    n_generated: int

class SlotState:
    """What an idle slot holds: tokens and both caches; ``drafter`` is empty without one."""

    tokens: list[int]
    target: bytes
    drafter: bytes

    def __init__(self, tokens: list[int], target: bytes, drafter: bytes) -> None: ...

class StepEvent:
    """What one step did to one request; ``finish_reason`` is None, stop, length, cancelled or error.

    ``logprobs`` has one entry per token when ``n_probs`` was given, else none. ``slot`` is -1 while it is queued.
    """

    id: int
    slot: int
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    error: str
    stats: RequestStats

Costs = list[tuple[int, float]]  # microseconds by number of columns, in rising order

class Forecast:
    """What the next draft of one request is worth."""

class DraftPlan:
    n_draft: int
    probe: bool
    rate: float

class SlotRecord:
    """A slot's part in a round, as the policy was told; without ``probabilities`` where nothing was drafted."""

    request: int
    limit: int
    lengths: list[int]
    n_verified: int
    probabilities: list[float]
    n_agreed: int
    ended: bool

class RoundRecord:
    """All that the policy was asked and told in one round. Times are 0 when it was shared with prompts."""

    plan: DraftPlan
    n_other: int
    slots: list[SlotRecord]
    n_rows: int
    n_columns: int
    verify_us: float
    decodes: Costs
    draft_us: float
    rest_us: float
    n_emitted: int

class DraftLengthPolicy:
    """How many tokens to draft (docs/draft-length.md): reads no clock, so that rounds can be replayed.

    Slots are pairs of a request's forecast and the longest draft that it can use; ``lengths`` the lengths that each of
    them may verify, in rising order, an empty list for any.
    """

    def __init__(self, verify_costs: Costs, draft_costs: Costs, *, apart: bool = False) -> None:
        """``apart``: every slot has a decode of its own; only then may ``lengths`` be restricted.

        Raises ValueError for costs that are not positive or not in rising order of columns.
        """
    @property
    def verify_costs(self) -> Costs: ...
    @property
    def draft_costs(self) -> Costs: ...
    def plan(
        self, slots: list[tuple[Forecast, int]], n_other: int = 0, *, lengths: list[list[int]] = ...
    ) -> DraftPlan: ...
    def cut(
        self,
        plan: DraftPlan,
        slots: list[tuple[Forecast, int]],
        probabilities: list[list[float]],
        n_other: int = 0,
        *,
        lengths: list[list[int]] = ...,
    ) -> list[int]:
        """How many tokens of each draft to verify, from the drafter's probabilities of them."""
    def observe_draft(
        self,
        forecast: Forecast,
        probabilities: list[float],
        n_agreed: int,
        ended: bool,
    ) -> None:
        """n_agreed tokens of the draft's beginning were emitted; with `ended`, the next one is known to differ."""
    def observe_round(
        self,
        plan: DraftPlan,
        *,
        n_rows: int,
        n_columns: int,
        verify_us: float,
        draft_us: float,
        rest_us: float,
        n_emitted: int,
        decodes: Costs = ...,
    ) -> None:
        """``decodes``: tokens and microseconds of each, where the round had several."""

def measure_costs(
    target: Target,
    drafter: DraftSource,
    *,
    budget_s: float = 1.5,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Costs, Costs]:
    """Time the target's decode by tokens and the drafter by draft length; both caches are emptied."""

class Engine:
    """Rounds of draft and verify. One thread steps; submit and cancel are allowed from any."""

    n_slots: int
    n_replaced: int
    costs: tuple[Costs, Costs] | None  # what the automatic draft length goes by now
    checkpoint_bytes: int  # host memory that states to go back to take now, recurrent targets only

    def __init__(
        self,
        target: Target,
        drafter: DraftSource | None = None,
        *,
        n_draft: int | None = 7,
        verify_costs: Costs = ...,
        draft_costs: Costs = ...,
        checkpoint_bytes: int = ...,
        exact: list[list[tuple[int, int]]] | None = None,
    ) -> None:
        """n_draft None: chosen every round, from the costs that were measured.

        ``exact``: strict. ``exact[k - 1]`` are ranges of positions (first, behind the last): only there a draft of k
        tokens is verified, and every slot has a decode of its own.
        """
    def submit(
        self,
        tokens: list[int],
        sampling: SamplingParams,
        *,
        max_tokens: int = -1,
        stop_tokens: list[int] = ...,
        n_draft: int | None = None,
        cache_prompt: bool = True,
        n_probs: int = -1,
        post_sampling: bool = False,
        slot: int = -1,
        replay: list[int] = ...,
    ) -> int:
        """Queue a request; its id. Raises ValueError, ContextLengthError."""
    def cancel(self, id: int) -> bool: ...  # noqa: A002 - the module's own name
    def has_work(self) -> bool: ...
    def step(self) -> list[StepEvent]: ...
    def record_rounds(self, n: int) -> None:
        """Keep the last n rounds whose draft length was automatic; 0, the default, keeps none."""

    def take_rounds(self) -> list[RoundRecord]:
        """What was kept, oldest first."""

    def lengths(self, slot: int) -> tuple[int, int]:
        """Committed positions in the target's and the drafter's cache, -1 without a drafter."""
    def slots(self) -> list[SlotInfo]: ...
    def save_slot(self, slot: int) -> SlotState:
        """What an idle slot holds. Raises ValueError when it is busy or empty."""
    def restore_slot(self, slot: int, state: SlotState) -> None:
        """Replace what an idle slot holds. Raises ValueError, ModelFormatError, ContextLengthError."""
    def erase_slot(self, slot: int) -> None: ...
