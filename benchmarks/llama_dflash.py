"""llama.cpp's own DFlash drafter through its C API, step for step as llama.cpp's draft-dflash speculation uses it.

Its rounds: inject the features of the verified rows into the drafter's cache (one embedding batch), decode the block
[anchor, mask, ...] with logits wanted in every slot, pick each slot's best of the top 10, cut the cache back.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt
from common import silence_llama

from dspine_local import _native
from dspine_local.convert.schema import ARCHITECTURE

TOP_K = 10  # of llama.cpp's draft sampler
N_CTX_MARGIN = 64


def write_dflash_gguf(drafter: Path, target: Path, out: Path) -> Path:
    """The drafter as llama.cpp reads it: architecture ``dflash``, the same tensor bytes, the target's vocabulary."""
    ours, theirs = gguf.GGUFReader(drafter), gguf.GGUFReader(target)
    writer = gguf.GGUFWriter(out, "dflash")

    def copy(field: Any, name: str) -> None:
        sub_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)

    left_out = (f"{ARCHITECTURE}.target.", f"{ARCHITECTURE}.injection")
    for name, field in ours.fields.items():
        if name.startswith(ARCHITECTURE + ".") and not name.startswith(left_out):
            copy(field, "dflash" + name.removeprefix(ARCHITECTURE))
        elif name in ("general.quantization_version", "general.file_type", "tokenizer.ggml.mask_token_id"):
            copy(field, name)
    for name, field in theirs.fields.items():
        if name.startswith("tokenizer.ggml.") and name != "tokenizer.ggml.mask_token_id":
            copy(field, name)
    for tensor in ours.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


class LlamaDflash:
    """A dflash drafter beside its target, whose embedding and head it shares (``ctx_other``).

    Args:
        backend_sampling: Top-k inside the graph, llama.cpp's default; False is its sampler on the host.
    """

    def __init__(
        self,
        drafter: Path,
        target: Path,
        *,
        n_ctx: int,
        n_draft: int,
        n_threads: int,
        causal: bool,
        backend_sampling: bool,
    ) -> None:
        silence_llama()
        self.n_draft = n_draft
        self.length = 0
        self._target_model = load_model(target)
        self._target = new_context(self._target_model, n_ctx=256, n_threads=n_threads)
        self._model = load_model(drafter)
        self._context = new_context(
            self._model,
            n_ctx=n_ctx + N_CTX_MARGIN,
            n_threads=n_threads,
            ctx_other=self._target,
            n_outputs_max=n_draft + 1,
            n_outputs_max_per_seq=n_draft + 1 if backend_sampling else 1,
        )
        llama_cpp.llama_set_causal_attn(self._context, causal)
        self._mask = mask_token(drafter)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_ext_init(self._context)
        self._inject = llama_cpp.llama_batch_ext_init(self._context)
        self._position = (llama_cpp.llama_pos * 1)()
        self._chain = sampler_chain(llama_cpp.llama_sampler_init_top_k(TOP_K), llama_cpp.llama_sampler_init_greedy())
        self._backend_chain = None
        if backend_sampling:
            self._backend_chain = sampler_chain(llama_cpp.llama_sampler_init_top_k(TOP_K))
            if not llama_cpp.llama_set_sampler(self._context, 0, self._backend_chain):
                raise RuntimeError("llama.cpp cannot sample in this device's graph")

    def close(self) -> None:
        """Free everything, users before what they use."""
        for batch in (self._batch, self._inject):
            llama_cpp.llama_batch_ext_free(batch)
        llama_cpp.llama_free(self._context)
        for chain in (self._chain, self._backend_chain):
            if chain is not None:
                llama_cpp.llama_sampler_free(chain)
        llama_cpp.llama_model_free(self._model)
        llama_cpp.llama_free(self._target)
        llama_cpp.llama_model_free(self._target_model)

    def commit(self, features: npt.NDArray[np.float32]) -> None:
        """Append features, float32 [n, n_taps * n_embd]."""
        n, width = features.shape
        llama_cpp.llama_batch_ext_clear(self._inject)
        for i in range(n):
            row = features[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            at = llama_cpp.llama_batch_ext_add_embd(self._inject, 0, llama_cpp.llama_embd(row, 1, width))
            self._place(self._inject, at, self.length + i, output=False)
        self._process(self._inject)
        self.length += n

    def draft(self, anchor: int) -> list[int]:
        """The proposals behind the committed context."""
        llama_cpp.llama_sampler_reset(self._chain)
        llama_cpp.llama_batch_ext_clear(self._batch)
        for i in range(self.n_draft + 1):
            at = llama_cpp.llama_batch_ext_add_token(self._batch, 0, anchor if i == 0 else self._mask)
            self._place(self._batch, at, self.length + i, output=True)
        self._process(self._batch)
        tokens = [
            int(llama_cpp.llama_sampler_sample(self._chain, self._context, i)) for i in range(1, self.n_draft + 1)
        ]
        llama_cpp.llama_memory_seq_rm(self._memory, 0, self.length, -1)
        return tokens

    def truncate(self, length: int) -> None:
        """Forget what follows the first ``length`` positions."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1)
        self.length = length

    def _place(self, batch: Any, at: int, position: int, *, output: bool) -> None:
        self._position[0] = position
        llama_cpp.llama_batch_ext_set_pos(batch, at, self._position)
        llama_cpp.llama_batch_ext_set_output_logits(batch, at, output)

    def _process(self, batch: Any) -> None:
        status = llama_cpp.llama_process(self._context, llama_cpp.LLAMA_PROCESS_TYPE_DECODE, batch)
        if status != 0:
            raise RuntimeError(f"llama.cpp failed to decode (status {status})")
        llama_cpp.llama_synchronize(self._context)


def load_model(path: Path) -> Any:
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = _native.cpu_layouts_work()  # as our own target is loaded
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise RuntimeError(f"llama.cpp could not load '{path}'")
    return model


def new_context(model: Any, *, n_threads: int, **values: Any) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = 1
    params.n_threads = params.n_threads_batch = n_threads
    params.no_perf = True
    for name, value in values.items():
        setattr(params, name, value)
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp could not make a context")
    return context


def sampler_chain(*samplers: Any) -> Any:
    params = llama_cpp.llama_sampler_chain_default_params()
    params.no_perf = True
    chain = llama_cpp.llama_sampler_chain_init(params)
    for sampler in samplers:
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    return chain


def mask_token(drafter: Path) -> int:
    field = gguf.GGUFReader(drafter).get_field("tokenizer.ggml.mask_token_id")
    if field is None:
        raise RuntimeError(f"'{drafter}' has no mask token")
    return int(field.contents())
