"""Which checkpoint tensor becomes which GGUF tensor, and what shape it must have."""

from __future__ import annotations

from dataclasses import dataclass

from dspine_local.convert.checkpoint import FLOAT_DTYPES, Checkpoint, StoredTensor, read_flag
from dspine_local.convert.config import DrafterConfig, Injection
from dspine_local.convert.schema import Tensor
from dspine_local.errors import ModelFormatError

CODES = "transfer_codes"
REFERENCE_CODES = "codes"
READY = "transfer_ready"


@dataclass(frozen=True)
class TensorMapping:
    """One tensor's way: ``source`` in the checkpoint, ``name`` in the GGUF. Vectors (norms, bias) stay float32."""

    source: str
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PlannedTensor:
    """A checked tensor and its name in the GGUF."""

    stored: StoredTensor
    name: str

    @property
    def is_vector(self) -> bool:
        """Norms and the bias."""
        return len(self.stored.shape) == 1


def plan_tensors(checkpoint: Checkpoint, config: DrafterConfig) -> list[PlannedTensor]:
    """The GGUF's tensors in file order, checked against the config.

    Raises:
        ModelFormatError: A tensor that is missing, unknown, or of a wrong shape or dtype; codes that are not ready.
    """
    expected = backbone(config)
    flags = set()
    if config.injection is not None:
        codes = REFERENCE_CODES if REFERENCE_CODES in checkpoint.tensors else CODES
        expected += injection(config, config.injection, codes)
        flags = {READY} if codes == CODES or READY in checkpoint.tensors else set()
    known = {mapping.source for mapping in expected} | flags
    missing = sorted(known - checkpoint.tensors.keys())
    if missing:
        raise ModelFormatError(f"'{checkpoint.folder}' has no tensor {_listed(missing)}")
    if extra := sorted(checkpoint.tensors.keys() - known):
        file = checkpoint.tensors[extra[0]].file
        raise ModelFormatError(f"'{file}' has tensor {_listed(extra)}, which no part of this drafter uses")
    for flag in flags:
        if not read_flag(checkpoint.tensors[flag]):
            raise ModelFormatError(
                f"'{checkpoint.tensors[flag].file}' has {flag} = false: its token codes were never set, "
                "expected a finished checkpoint"
            )
    return [PlannedTensor(_checked(checkpoint.tensors[m.source], m), m.name) for m in expected]


def backbone(config: DrafterConfig) -> list[TensorMapping]:
    """The tensors of every drafter. Source: docs/method.md, context features and block."""
    d, f, h = config.hidden_size, config.ffn_size, config.head_dim
    n_q, n_kv = config.n_heads * h, config.n_heads_kv * h
    mappings = [
        TensorMapping("fc.weight", Tensor.FC, (d, len(config.target_layer_ids) * d)),
        TensorMapping("hidden_norm.weight", Tensor.HIDDEN_NORM, (d,)),
        TensorMapping("norm.weight", Tensor.OUTPUT_NORM, (d,)),
    ]
    for il in range(config.n_layers):
        parts = [
            ("input_layernorm", Tensor.ATTN_NORM, (d,)),
            ("self_attn.q_proj", Tensor.ATTN_Q, (n_q, d)),
            ("self_attn.k_proj", Tensor.ATTN_K, (n_kv, d)),
            ("self_attn.v_proj", Tensor.ATTN_V, (n_kv, d)),
            ("self_attn.o_proj", Tensor.ATTN_OUTPUT, (d, n_q)),
            ("self_attn.q_norm", Tensor.ATTN_Q_NORM, (h,)),
            ("self_attn.k_norm", Tensor.ATTN_K_NORM, (h,)),
            ("post_attention_layernorm", Tensor.FFN_NORM, (d,)),
            ("mlp.gate_proj", Tensor.FFN_GATE, (f, d)),
            ("mlp.up_proj", Tensor.FFN_UP, (f, d)),
            ("mlp.down_proj", Tensor.FFN_DOWN, (d, f)),
        ]
        mappings += [
            TensorMapping(f"layers.{il}.{source}.weight", name.format(il=il), shape) for source, name, shape in parts
        ]
    return mappings


def injection(config: DrafterConfig, widths: Injection, codes: str) -> list[TensorMapping]:
    """The tensors of adjacent injection. Source: docs/method.md, adjacent injection."""
    d, r, m = config.hidden_size, widths.rank, widths.message_size
    mappings = [
        TensorMapping("injection.message.weight", Tensor.INJECT_MESSAGE, (m, r)),
        TensorMapping("injection.receiver_gate.weight", Tensor.INJECT_GATE_RECEIVER, (m, r)),
        TensorMapping("injection.predecessor_gate.weight", Tensor.INJECT_GATE_PREDECESSOR, (m, r)),
        TensorMapping("injection.bias", Tensor.INJECT_BIAS, (m,)),
        TensorMapping(codes, Tensor.INJECT_CODES, (config.vocab_size, r)),
    ]
    for il in range(config.n_layers):
        mappings += [
            TensorMapping(f"injection.readouts.{il}.weight", Tensor.INJECT_READOUT.format(il=il), (r, d)),
            TensorMapping(f"injection.writes.{il}.weight", Tensor.INJECT_WRITE.format(il=il), (d, m)),
        ]
    return mappings


def _checked(stored: StoredTensor, mapping: TensorMapping) -> StoredTensor:
    if stored.shape != mapping.shape:
        raise ModelFormatError(
            f"'{stored.file}' has tensor '{stored.name}' of shape {list(stored.shape)}, "
            f"expected {list(mapping.shape)} from the config"
        )
    if stored.dtype not in FLOAT_DTYPES:
        raise ModelFormatError(
            f"'{stored.file}' has tensor '{stored.name}' of type {stored.dtype}, expected {', '.join(FLOAT_DTYPES)}"
        )
    return stored


def _listed(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"'{names[0]}'{more}"
