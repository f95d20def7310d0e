"""The process in which llama.cpp quantizes a target: ``python -m dspine_local.quantize.target_worker``.

llama.cpp's quantizer cannot be interrupted, and ends the process on some damaged files. One JSON object on stdin says
what to do; every line on stdout is a JSON object: a tensor that is done, or at the end what went wrong.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from typing import Any

import gguf
import llama_cpp
import numpy as np

# llama.cpp would otherwise hold up to 8 GiB of a tensor's rows.
MAX_BUFFER = 256 << 20
_TENSOR = re.compile(r"\[ *(\d+)/ *(\d+)\] +(\S+) +- \[[^]]*\], type = +(\S+), size = .*?(?:\((\S+)\))?$")
_ERROR_LEVEL = 4  # enum ggml_log_level


class _Log:
    """llama.cpp's log: tensors are passed on, errors are kept for the end."""

    def __init__(self) -> None:
        self.line = ""
        self.errors: list[str] = []
        self.callback = llama_cpp.llama_log_callback(self._take)

    def _take(self, level: int, text: bytes, _data: object) -> None:
        part = text.decode("utf-8", "replace")
        if level == _ERROR_LEVEL:
            self.errors.append(part.strip())
        self.line += part
        if not self.line.endswith("\n"):
            return
        found = _TENSOR.match(self.line.strip())
        self.line = ""
        if found is not None:
            done, total, name, before, after = found.groups()
            report({"done": int(done), "total": int(total), "tensor": name, "type": (after or before).lower()})


def report(entry: dict[str, Any]) -> None:
    """Tell the parent."""
    print(json.dumps(entry), flush=True)


def main() -> int:
    """Quantize; 0 when the file was written."""
    task = json.load(sys.stdin)
    log = _Log()
    llama_cpp.llama_log_set(log.callback, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = task["file_type"]
    params.nthread = task["n_threads"]
    params.allow_requantize = True  # asked for, or not needed: the parent has seen to it
    params.dry_run = task["dry_run"]
    params.max_buf_size = MAX_BUFFER
    overrides = _overrides(task["overrides"])
    if task["overrides"]:
        params.tt_overrides = ctypes.cast(overrides, type(params.tt_overrides))
    kept: list[Any] = []
    if task["imatrix"] is not None:
        matrix = _imatrix(task["imatrix"], task["imatrix_names"], kept)
        params.imatrix = ctypes.cast(matrix, type(params.imatrix))
    status = llama_cpp.llama_model_quantize(task["source"].encode(), task["out"].encode(), ctypes.byref(params))
    if status != 0:
        report({"error": "; ".join(log.errors) or f"status {status}"})
    return int(status != 0)


def _overrides(listed: list[tuple[str, str]]) -> Any:
    entries = [
        llama_cpp.llama_model_tensor_override(pattern.encode(), int(gguf.GGMLQuantizationType[name.upper()]))
        for pattern, name in listed
    ]
    return (llama_cpp.llama_model_tensor_override * (len(entries) + 1))(*entries)


def _imatrix(path: str, names: list[str], kept: list[Any]) -> Any:
    """The entries of a ``.npz`` file, which are numbered; ``kept`` holds what they point to."""
    with np.load(path, allow_pickle=False) as file:
        arrays = [np.ascontiguousarray(file[str(i)], dtype=np.float32) for i in range(len(names))]
    entries = []
    for name, values in zip(names, arrays, strict=True):
        pointer = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        kept.append(values)
        entries.append(llama_cpp.llama_model_imatrix_data(name.encode(), pointer, values.size))
    return (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries)


if __name__ == "__main__":
    sys.exit(main())
