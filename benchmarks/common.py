"""What the benchmarks share: models to measure on, the machine's description, medians and tables."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from safetensors.numpy import save_file

from dspine_local.convert import convert_checkpoint
from dspine_local.demo import drafter_checkpoint
from dspine_local.machine import processor

ROOT = Path(__file__).resolve().parents[1]
N_WARM_UP = 3


def requantize(source: Path, out: Path, outtype: str = "Q8_0") -> Path:
    """The same target in another type; of Q8_0, batched logits equal those of single tokens bit by bit."""
    if out.is_file():
        return out
    silence_llama()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{outtype}")
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(out), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"llama.cpp could not requantize '{source}' (status {status})")
    return out


def random_drafter(folder: Path, target: Path, *, injection: bool, outtype: str, n_layer: int, causal: bool) -> Path:
    """A drafter GGUF of random weights and the demo drafter's dimensions; the backbone is the same with injection."""
    kind = "dspine" if injection else "dflash"
    out = folder / f"{kind}-{n_layer}-{'causal' if causal else 'bidirectional'}-{outtype}.gguf"
    if out.is_file():
        return out
    config: dict[str, Any] = json.loads((drafter_checkpoint() / "config.json").read_text())
    config |= {"num_hidden_layers": n_layer, "layer_types": ["full_attention"] * n_layer, "is_causal": causal}
    injected = config["dspine_config"]
    if not injection:
        config["architectures"] = ["DFlashDraftModel"]
        del config["dspine_config"]
    checkpoint = folder / out.stem
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "config.json").write_text(json.dumps(config))

    backbone, writes = np.random.default_rng(0), np.random.default_rng(1)
    width, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    n_q, n_kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(n_rows: int, n_cols: int, rng: np.random.Generator = backbone) -> np.ndarray[Any, Any]:
        return rng.standard_normal((n_rows, n_cols), dtype=np.float32) / np.float32(n_cols**0.5)

    def norm(n: int) -> np.ndarray[Any, Any]:
        return 1 + np.float32(0.1) * backbone.standard_normal(n, dtype=np.float32)

    tensors = {
        "fc.weight": matrix(width, len(config["dflash_config"]["target_layer_ids"]) * width),
        "hidden_norm.weight": norm(width),
        "norm.weight": norm(width),
    }
    for il in range(n_layer):
        layer = f"layers.{il}."
        tensors |= {
            layer + "input_layernorm.weight": norm(width),
            layer + "post_attention_layernorm.weight": norm(width),
            # Large, so that attention is peaked: else the slots, alike but for their position, all draft one token.
            layer + "self_attn.q_norm.weight": 4 * norm(head_dim),
            layer + "self_attn.k_norm.weight": norm(head_dim),
            layer + "self_attn.q_proj.weight": matrix(n_q, width),
            layer + "self_attn.k_proj.weight": matrix(n_kv, width),
            layer + "self_attn.v_proj.weight": matrix(n_kv, width),
            layer + "self_attn.o_proj.weight": matrix(width, n_q),
            layer + "mlp.gate_proj.weight": matrix(ffn, width),
            layer + "mlp.up_proj.weight": matrix(ffn, width),
            layer + "mlp.down_proj.weight": matrix(width, ffn),
        }
    if injection:
        rank, message = injected["transfer_rank"], injected["message_size"]
        codes = writes.standard_normal((config["vocab_size"], rank), dtype=np.float32)
        tensors |= {
            "injection.message.weight": matrix(message, rank, writes),
            "injection.receiver_gate.weight": matrix(message, rank, writes),
            "injection.predecessor_gate.weight": matrix(message, rank, writes),
            "injection.bias": writes.standard_normal(message, dtype=np.float32),
            "transfer_codes": codes / np.linalg.norm(codes, axis=-1, keepdims=True),
            "transfer_ready": np.array(True),
        }
        for il in range(n_layer):
            tensors[f"injection.readouts.{il}.weight"] = matrix(rank, width, writes)
            tensors[f"injection.writes.{il}.weight"] = matrix(width, message, writes)
    save_file(tensors, checkpoint / "model.safetensors")
    convert_checkpoint(checkpoint, out, outtype=outtype, target=target)
    return out


def silence_llama() -> None:
    """Drop llama.cpp's log; errors still show as failures."""
    llama_cpp.llama_log_set(_DROP, ctypes.c_void_p())


@llama_cpp.llama_log_callback
def _DROP(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:  # noqa: N802 - a callback that must stay alive
    pass


def time_interleaved(sides: Sequence[Callable[[], float]], n_reps: int) -> list[list[float]]:
    """Milliseconds of every side, run in turn, so that a busy moment of the machine hits all of them alike.

    Args:
        sides: Each runs once and returns its own seconds.
    """
    for _ in range(N_WARM_UP):
        for side in sides:
            side()
    times: list[list[float]] = [[] for _ in sides]
    gc.collect()
    gc.disable()
    try:
        for rep in range(n_reps):
            order = range(len(sides)) if rep % 2 == 0 else range(len(sides) - 1, -1, -1)
            for i in order:
                times[i].append(sides[i]() * 1e3)
    finally:
        gc.enable()
    return times


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over repetitions of our time over theirs in the same repetition."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = perf_counter()
    run()
    return perf_counter() - start


def environment() -> dict[str, str]:
    """Date, machine, versions and commit, as results need them."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)  # noqa: S607
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "llama-cpp-python": version("llama-cpp-python"),
        "commit": git.stdout.strip() or "unknown",
        "load average at the end": f"{os.getloadavg()[0]:.2f}",
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join([first.strip().ljust(widths[0]), *others]) + " |"

    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--threads", type=int, default=0, help="CPU threads of both sides; 0 is one per core")
    options.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options.add_argument("--work-dir", type=Path, help="keep the made models here (default: a temporary folder)")
    return options


def print_environment() -> None:
    """The environment as a list."""
    for name, value in environment().items():
        print(f"- {name}: {value}")
