"""A drafter's block at the shapes of a 27B target, against the time to read its weights once from memory.

    python benchmarks/block_27b.py [--context 512] [--repetitions 5] [--json]

Random weights: width 5120, 5 layers, transfer rank 1024, messages of 512, vocabulary 248,320, a block of 16. The
backbone's other sizes are assumed (24 heads, 4 KV heads of 256, feed-forward 12,288): with them the drafter has about
the 3.5 GB in bf16 of the published one. Needs about 8 GB of memory, and 5 GB on disk while it runs.
"""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import gguf
import numpy as np
from common import environment, parser, print_environment, table, time_interleaved

from dspine_local import _native
from dspine_local.convert.config import DrafterConfig, Injection
from dspine_local.convert.outtypes import parse_outtype
from dspine_local.convert.rope import Rope, RopeScaling
from dspine_local.convert.run import metadata
from dspine_local.convert.schema import ARCHITECTURE
from dspine_local.convert.tensors import backbone, injection
from dspine_local.convert.writer import add_key
from dspine_local.progress import progress_bar

WIDTH, N_VOCAB, BLOCK = 5120, 248_320, 16
CONFIG = DrafterConfig(
    n_layers=5,
    hidden_size=WIDTH,
    ffn_size=12_288,
    context_length=262_144,
    vocab_size=N_VOCAB,
    block_size=BLOCK,
    n_heads=24,
    n_heads_kv=4,
    head_dim=256,
    rms_eps=1e-6,
    rope=Rope(1e7, RopeScaling()),
    causal=True,
    window=0,
    sliding=(False,) * 5,
    n_target_layers=64,
    target_layer_ids=(1, 16, 31, 46, 61),
    mask_token_id=248_000,
    injection=Injection(rank=1024, message_size=512, top_k=16),
)


def random_rows(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A matrix in Q8_0 with entries of about 1/sqrt(columns): random blocks, not quantized from floats."""
    n_rows, n_cols = shape
    blocks = np.empty((n_rows, n_cols // 32, 34), dtype=np.uint8)
    scale = np.float16(1 / (74 * n_cols**0.5))  # 74 is the deviation of a random byte
    blocks[..., :2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
    blocks[..., 2:] = rng.integers(0, 256, blocks[..., 2:].shape, dtype=np.uint8)
    return blocks.reshape(n_rows, -1)


def write_drafter(path: Path) -> int:
    """Its tensors' bytes."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, ARCHITECTURE)
    for key, value in metadata(CONFIG, "random", parse_outtype("q8_0"), None):
        add_key(writer, key, value)
    assert CONFIG.injection is not None
    n_bytes = 0
    for mapping in backbone(CONFIG) + injection(CONFIG, CONFIG.injection, "transfer_codes"):
        if len(mapping.shape) == 1:
            data: np.ndarray[Any, Any] = np.ones(mapping.shape, dtype=np.float32)
            writer.add_tensor(mapping.name, data)
        else:
            data = random_rows(mapping.shape, rng)
            writer.add_tensor(mapping.name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        n_bytes += data.nbytes
    finish(writer)
    return n_bytes


def write_target(path: Path) -> int:
    """The big target's embedding and output matrix around layers that are hardly there; bytes of the latter."""
    rng, writer = np.random.default_rng(1), gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.n_target_layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("none")
    shapes = {"token_embd.weight": (N_VOCAB, WIDTH), "output.weight": (N_VOCAB, WIDTH)}
    norms = ["output_norm.weight"]
    for il in range(CONFIG.n_target_layers):
        shapes |= {f"blk.{il}.{name}.weight": (64, WIDTH) for name in ("attn_q", "attn_k", "attn_v")}
        shapes |= {f"blk.{il}.{name}.weight": (32, WIDTH) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{il}.attn_output.weight": (WIDTH, 64), f"blk.{il}.ffn_down.weight": (WIDTH, 32)}
        norms += [f"blk.{il}.attn_norm.weight", f"blk.{il}.ffn_norm.weight"]
    head_bytes = 0
    for name, shape in shapes.items():
        data = random_rows(shape, rng)
        head_bytes = data.nbytes if name == "output.weight" else head_bytes
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in norms:
        writer.add_tensor(name, np.ones(WIDTH, dtype=np.float32))
    finish(writer)
    return head_bytes


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--context", type=int, default=512, help="committed positions (default: %(default)s)")
    arguments.add_argument("--repetitions", type=int, default=5)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="dspine-27b-") as scratch, progress_bar("Writing", unit="steps") as report:
        report(0, 2, "drafter")
        drafter_bytes = write_drafter(Path(scratch) / "drafter.gguf")
        report(1, 2, "target")
        head_bytes = write_target(Path(scratch) / "target.gguf")
        target = _native.Target(str(Path(scratch) / "target.gguf"), n_ctx=512, use_mmap=False)
        drafter = _native.Drafter(str(Path(scratch) / "drafter.gguf"), target.tensors(), n_ctx=args.context + BLOCK)
    rng = np.random.default_rng(2)
    features = rng.standard_normal((args.context, drafter.n_taps * WIDTH), dtype=np.float32)
    for first in range(0, args.context, 64):
        drafter.commit(0, features[first : first + 64])

    # fc and the keys and values of the context are the commit's, and codes are read for the candidates only.
    assert CONFIG.injection is not None
    unread = 34 * (WIDTH * len(CONFIG.target_layer_ids) * WIDTH + N_VOCAB * CONFIG.injection.rank) // 32
    n_bytes = drafter_bytes - unread + head_bytes
    memory = np.ones(n_bytes // 8, dtype=np.int64)

    def block() -> float:
        start = perf_counter()
        drafter.draft([(0, 1)], BLOCK - 1)
        return perf_counter() - start

    def read() -> float:
        start = perf_counter()
        parallel_sum(memory, target.n_threads)
        return perf_counter() - start

    block_ms, read_ms = (median(times) for times in time_interleaved([block, read], args.repetitions))
    result = {
        "weights_gb": n_bytes / 1e9,
        "block_ms": block_ms,
        "read_ms": read_ms,
        "ratio": block_ms / read_ms,
        "context": args.context,
        "threads": target.n_threads,
        "order": drafter.order,
        **environment(),
    }
    if args.json:
        print(json.dumps(result))
        return
    print_environment()
    row = [f"{n_bytes / 1e9:.2f}", f"{block_ms:.0f}", f"{read_ms:.0f}", f"{block_ms / read_ms:.2f}"]
    print(table(["weights, GB", "block, ms", "one read, ms", "ratio"], [row]))


def parallel_sum(memory: np.ndarray[Any, Any], n_threads: int) -> None:
    """Read it all, every thread its part; NumPy's sum releases the lock."""
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(np.sum, np.array_split(memory, n_threads)))


if __name__ == "__main__":
    main()
