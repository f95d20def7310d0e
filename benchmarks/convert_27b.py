"""Converter and quantizer on a drafter of a 27B target's size: time, peak memory, and sizes against the plan.

    python benchmarks/convert_27b.py [--json]

Writes random bf16 weights in shards (the shapes of block_27b.py, 3.5 GiB), then converts them to f16 and to Q8_0, and
quantizes the f16 file to Q8_0, Q6_K, Q4_K and Q4_0, each in a process of its own that says what its peak of resident
memory was. Needs Linux, and 20 GB on disk while it runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from block_27b import CONFIG
from common import environment, parser, print_environment, table

from dspine_local.convert.outtypes import OUTTYPES, type_for
from dspine_local.convert.tensors import CODES, READY, TensorMapping, backbone, injection
from dspine_local.progress import progress_bar

SHARD_BYTES = 1 << 30
MIB = 1 << 20
CHUNK = 1 << 24
# A header longer than this is not expected: a GGUF's keys and tensor list, and padding.
HEADER_BYTES = 1 << 16
RUN = """
import sys
from pathlib import Path
from dspine_local.cli import main
code = main(sys.argv[1:])
lines = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
sys.exit(code)
"""


def main() -> None:
    args = parser(__doc__).parse_args()
    assert CONFIG.injection is not None
    tensors = [*backbone(CONFIG), *injection(CONFIG, CONFIG.injection, CODES)]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with progress_bar("Writing random weights") as report:
            size = write_checkpoint(folder / "drafter", tensors, report)
        f16 = folder / "f16.gguf"
        for outtype in ("f16", "q8_0"):
            out = f16 if outtype == "f16" else folder / "out.gguf"
            command = ["convert", str(folder / "drafter"), "-o", str(out), "--outtype", outtype, "--force"]
            rows.append(measure(f"convert bf16 to {outtype}", command, out, planned(tensors, outtype)))
        for outtype in ("q8_0", "q6_k", "q4_k", "q4_0"):
            command = ["quantize", str(f16), str(folder / "out.gguf"), outtype, "--force"]
            rows.append(measure(f"quantize f16 to {outtype}", command, folder / "out.gguf", planned(tensors, outtype)))
    if args.json:
        print(json.dumps({"environment": environment(), "checkpoint_bytes": size, "rows": rows}))
        return
    print_environment()
    print(f"checkpoint: {size / MIB:,.0f} MiB of bf16 in shards of {SHARD_BYTES / MIB:,.0f} MiB")
    titles = ("step", "seconds", "peak MiB", "file MiB", "planned MiB")
    cells = [
        [row["step"], f"{row['seconds']:.1f}", *(f"{row[name] / MIB:,.1f}" for name in ("peak", "size", "planned"))]
        for row in rows
    ]
    print(table(titles, cells))


def write_checkpoint(folder: Path, tensors: list[TensorMapping], report: Any) -> int:
    """Layout 1 with random bf16 weights; bytes of all tensors."""
    folder.mkdir()
    widths = CONFIG.injection
    assert widths is not None
    config = {
        "architectures": ["DSpineDraftModel"],
        "model_type": "qwen3",
        "block_size": CONFIG.block_size,
        "is_causal": True,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.ffn_size,
        "num_hidden_layers": CONFIG.n_layers,
        "num_attention_heads": CONFIG.n_heads,
        "num_key_value_heads": CONFIG.n_heads_kv,
        "head_dim": CONFIG.head_dim,
        "num_target_layers": CONFIG.n_target_layers,
        "vocab_size": CONFIG.vocab_size,
        "rms_norm_eps": CONFIG.rms_eps,
        "rope_theta": CONFIG.rope.freq_base,
        "max_position_embeddings": CONFIG.context_length,
        "dflash_config": {
            "mask_token_id": CONFIG.mask_token_id,
            "target_layer_ids": list(CONFIG.target_layer_ids),
            "block_size": CONFIG.block_size,
        },
        "dspine_config": {
            "transfer_rank": widths.rank,
            "message_size": widths.message_size,
            "top_k": widths.top_k,
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    sizes = {t.source: 2 * prod(t.shape) for t in tensors}
    shards: list[list[TensorMapping]] = [[]]
    for t in tensors:
        if sum(sizes[s.source] for s in shards[-1]) + sizes[t.source] > SHARD_BYTES and shards[-1]:
            shards.append([])
        shards[-1].append(t)
    rng = np.random.default_rng(0)
    # bf16 numbers of about 0.02: exponent and sign fixed by a table, so that gigabytes take seconds.
    values = (rng.standard_normal(CHUNK, dtype=np.float32) * 0.02).view(np.uint32) >> 16
    pool = values.astype("<u2").tobytes()
    done, total = 0, sum(sizes.values())
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, Any] = {}
        offset = 0
        for t in shard:
            header[t.source] = {
                "dtype": "BF16",
                "shape": list(t.shape),
                "data_offsets": [offset, offset + sizes[t.source]],
            }
            offset += sizes[t.source]
            weight_map[t.source] = name
        if i == 0:
            header[READY] = {"dtype": "BOOL", "shape": [], "data_offsets": [offset, offset + 1]}
            weight_map[READY] = name
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for t in shard:
                for first in range(0, sizes[t.source], len(pool)):
                    part = pool[: min(len(pool), sizes[t.source] - first)]
                    file.write(part)
                    done += len(part)
                    report(done, total, t.source)
            if i == 0:
                file.write(b"\1")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def planned(tensors: list[TensorMapping], outtype: str) -> int:
    """Bytes of all tensors in a type: vectors are f32."""
    total = 0
    for t in tensors:
        kind = OUTTYPES["f32"] if len(t.shape) == 1 else type_for(t.shape[-1], OUTTYPES[outtype])
        total += prod(t.shape[:-1]) * kind.row_bytes(t.shape[-1])
    return total


def measure(step: str, command: list[str], out: Path, expected: int) -> dict[str, Any]:
    """Run ``dspine-local``, and ask the kernel for its high-water mark."""
    start = perf_counter()
    done = subprocess.run([sys.executable, "-c", RUN, *command], capture_output=True, text=True, check=False)
    seconds = perf_counter() - start
    if done.returncode != 0:
        raise RuntimeError(f"{step} failed with exit code {done.returncode}: {done.stderr}")
    peak = int(done.stdout.split()[-1]) * 1024
    size = out.stat().st_size
    if not expected <= size <= expected + HEADER_BYTES:
        raise RuntimeError(f"{step} wrote {size:,} bytes, planned were {expected:,} and a header")
    return {"step": step, "seconds": seconds, "peak": peak, "size": size, "planned": expected}


if __name__ == "__main__":
    main()
