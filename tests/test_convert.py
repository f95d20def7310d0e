"""Conversion of whole checkpoints: every tensor and key reads back, whatever the layout and type."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import GOLDEN, Draft, files_in, read_gguf, reference_layout, wide_draft
from random_drafters import random_checkpoint

from dspine_local._native import quantize, type_layout
from dspine_local.cli import convert as command
from dspine_local.convert import OUTTYPES, convert_checkpoint
from dspine_local.convert.checkpoint import StoredTensor, read_rows

pytestmark = pytest.mark.native

GOLDEN_CASES = ("gqa_small", "reference_layout", "sliding_window", "wide_head_dim")
LLAMA_FILE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 32,
    "q8_0": 7,
    "q6_k": 18,
    "q5_k": 17,
    "q4_k": 15,
    "q3_k": 12,
    "q2_k": 10,
    "q5_0": 8,
    "q5_1": 9,
    "q4_0": 2,
    "q4_1": 3,
}
# Largest error of a weight, relative to the largest of its block.
ERROR_BOUNDS = {
    "f32": 0.0,
    "f16": 5e-4,
    "bf16": 4e-3,
    "q8_0": 5e-3,
    "q6_k": 0.04,
    "q5_k": 0.07,
    "q4_k": 0.14,
    "q3_k": 0.30,
    "q2_k": 0.5,
    "q5_0": 0.07,
    "q5_1": 0.04,
    "q4_0": 0.14,
    "q4_1": 0.08,
}
SMALLEST_F16 = 2.0**-24

RENAMED = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "injection.message.weight": "inject.message.weight",
    "injection.receiver_gate.weight": "inject.gate_receiver.weight",
    "injection.predecessor_gate.weight": "inject.gate_predecessor.weight",
    "injection.bias": "inject.bias",
    "transfer_codes": "inject.codes",
    "codes": "inject.codes",
}
RENAMED_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Where the tensor of a checkpoint must be found."""
    if name in RENAMED:
        return RENAMED[name]
    if name.startswith("layers."):
        _, il, part = name.removesuffix(".weight").split(".", 2)
        return f"blk.{il}.{RENAMED_IN_LAYER[part]}.weight"
    _, part, il, _ = name.split(".")
    return f"blk.{il}.inject_{part.removesuffix('s')}.weight"


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_every_golden_tensor_reads_back_exactly(case: str, tmp_path: Path) -> None:
    draft = Draft.golden(case)
    report = convert_checkpoint(GOLDEN / case / "drafter", tmp_path / "out.gguf", outtype="f32")
    _, tensors = read_gguf(tmp_path / "out.gguf")
    expected = {gguf_name(name): array for name, (_, array) in draft.tensors.items() if name != "transfer_ready"}
    assert tensors.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(tensors[name][1], array, err_msg=name)
    assert report.n_tensors == len(expected)
    assert report.n_parameters == sum(array.size for array in expected.values())
    assert report.n_bytes == (tmp_path / "out.gguf").stat().st_size
    assert report.types == {"f32": len(expected)}
    assert report.fallbacks == ()
    assert files_in(tmp_path) == {"out.gguf"}


def test_metadata_says_what_the_config_says(tmp_path: Path) -> None:
    golden = GOLDEN / "sliding_window" / "drafter"
    convert_checkpoint(golden, tmp_path / "out.gguf")
    metadata, _ = read_gguf(tmp_path / "out.gguf")
    assert metadata == {
        "general.architecture": "dspine",
        "general.name": "drafter",
        "general.file_type": 7,
        "general.quantization_version": 2,
        "dspine.block_count": 3,
        "dspine.embedding_length": 64,
        "dspine.feed_forward_length": 128,
        "dspine.context_length": 4096,
        "dspine.vocab_size": 300,
        "dspine.block_size": 8,
        "dspine.target_layers": [1, 3, 7],
        "dspine.injection": True,
        "dspine.transfer_rank": 16,
        "dspine.message_size": 8,
        "dspine.top_k": 8,
        "dspine.attention.head_count": 4,
        "dspine.attention.head_count_kv": 4,
        "dspine.attention.key_length": 16,
        "dspine.attention.value_length": 16,
        "dspine.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "dspine.attention.causal": True,
        "dspine.attention.sliding_window": 16,
        "dspine.attention.sliding_window_pattern": [True, False, True],
        "dspine.rope.dimension_count": 16,
        "dspine.rope.freq_base": 1e6,
        "dspine.rope.scaling.type": "none",
        "dspine.target.block_count": 8,
        "dspine.target.embedding_length": 64,
        "tokenizer.ggml.mask_token_id": 299,
    }


def test_reference_layout_takes_widths_from_the_shapes(tmp_path: Path) -> None:
    golden = GOLDEN / "reference_layout" / "drafter"
    convert_checkpoint(golden, tmp_path / "out.gguf")
    metadata, _ = read_gguf(tmp_path / "out.gguf")
    assert (metadata["dspine.transfer_rank"], metadata["dspine.message_size"]) == (32, 16)
    assert (metadata["dspine.block_size"], metadata["dspine.top_k"]) == (16, 16)


def test_layouts_one_and_two_give_the_same_weights(tmp_path: Path) -> None:
    draft = Draft.golden()
    convert_checkpoint(draft.write(tmp_path / "one"), tmp_path / "one.gguf")
    convert_checkpoint(reference_layout(draft, tmp_path / "two", "any-name.safetensors"), tmp_path / "two.gguf")
    _, one = read_gguf(tmp_path / "one.gguf")
    _, two = read_gguf(tmp_path / "two.gguf")
    assert one.keys() == two.keys()
    assert all(one[name][0] == two[name][0] and np.array_equal(one[name][1], two[name][1]) for name in one)


@pytest.mark.parametrize("said", [{}, {"is_causal": True}, {"is_causal": False}, {"dflash": True}])
def test_dflash_is_causal_only_if_the_config_says_so(said: dict[str, bool], tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "drafter", architecture="DFlashDraftModel", is_causal=said.get("is_causal"))
    config = json.loads((folder / "config.json").read_text())
    if "dflash" in said:
        config["dflash_config"]["causal"] = said["dflash"]
        (folder / "config.json").write_text(json.dumps(config))
    report = convert_checkpoint(folder, tmp_path / "out.gguf")
    metadata, tensors = read_gguf(tmp_path / "out.gguf")
    assert not report.injection
    assert metadata["dspine.injection"] is False
    assert metadata["dspine.attention.causal"] is any(said.values())
    assert not any("inject" in name for name in tensors)
    assert not any(key in metadata for key in ("dspine.transfer_rank", "dspine.message_size", "dspine.top_k"))


@pytest.mark.parametrize("n_shards", [2, 5])
def test_shards_give_the_same_file(n_shards: int, tmp_path: Path) -> None:
    draft = Draft.golden()
    convert_checkpoint(draft.write(tmp_path / "a" / "drafter"), tmp_path / "whole.gguf")
    convert_checkpoint(draft.write(tmp_path / "b" / "drafter", n_shards), tmp_path / "shards.gguf")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "shards.gguf").read_bytes()


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_checkpoints_are_widened_exactly(dtype: str, tmp_path: Path) -> None:
    folder = wide_draft(tmp_path / "drafter", dtype=dtype)
    convert_checkpoint(folder, tmp_path / "wide.gguf", outtype="f32")
    convert_checkpoint(folder, tmp_path / "same.gguf", outtype=dtype.lower())
    _, wide = read_gguf(tmp_path / "wide.gguf")
    _, same = read_gguf(tmp_path / "same.gguf")
    for name, (_, values) in wide.items():
        np.testing.assert_array_equal(same[name][1], values, err_msg=name)
    weight = wide["blk.0.ffn_up.weight"][1]
    assert 0.05 < weight.std() < 0.08  # 1 / sqrt(256), not bit patterns read as numbers


@pytest.mark.parametrize("outtype", list(OUTTYPES))
def test_every_type_is_used_and_stays_near_float32(outtype: str, tmp_path: Path) -> None:
    folder = wide_draft(tmp_path / "drafter")
    convert_checkpoint(folder, tmp_path / "f32.gguf", outtype="f32")
    report = convert_checkpoint(folder, tmp_path / "out.gguf", outtype=outtype.upper())
    metadata, tensors = read_gguf(tmp_path / "out.gguf")
    _, exact = read_gguf(tmp_path / "f32.gguf")
    assert report.outtype == outtype
    assert report.fallbacks == ()
    assert metadata["general.file_type"] == LLAMA_FILE_TYPES[outtype]
    block = min(32, type_layout(outtype)[0])
    for name, (kind, values) in tensors.items():
        assert kind == ("f32" if exact[name][1].ndim == 1 else outtype), name
        blocks = exact[name][1].reshape(-1, block)
        error = np.abs(values.reshape(-1, block) - blocks)
        bound = ERROR_BOUNDS[outtype] * np.abs(blocks).max(axis=1, keepdims=True) + SMALLEST_F16
        assert np.all(error <= bound), name
    n_values, n_block_bytes = type_layout(outtype)
    matrix_bytes = sum(a.size * n_block_bytes // n_values for _, a in exact.values() if a.ndim > 1)
    vector_bytes = sum(4 * a.size for _, a in exact.values() if a.ndim == 1)
    assert 0 <= report.n_bytes - matrix_bytes - vector_bytes < 8192  # header and padding


@pytest.mark.parametrize(
    ("outtype", "n_cols", "got"),
    [
        *(("q6_k", 64, "q8_0"), ("q5_k", 64, "q5_1"), ("q4_k", 64, "q5_0"), ("q3_k", 64, "q4_0"), ("q2_k", 64, "q4_0")),
        *(("q6_k", 8, "f16"), ("q8_0", 8, "f16"), ("q4_0", 8, "f16")),
    ],
)
def test_rows_that_do_not_divide_fall_back_and_this_is_said(
    outtype: str, n_cols: int, got: str, tmp_path: Path
) -> None:
    golden = GOLDEN / "sliding_window" / "drafter"
    report = convert_checkpoint(golden, tmp_path / "out.gguf", outtype=outtype)
    _, tensors = read_gguf(tmp_path / "out.gguf")
    matrices = {name: (kind, a.shape[1]) for name, (kind, a) in tensors.items() if a.ndim > 1}
    assert {kind for kind, width in matrices.values() if width == n_cols} == {got}
    fallbacks = {f.tensor: (f.wanted, f.got) for f in report.fallbacks}
    assert fallbacks == {name: (outtype, kind) for name, (kind, _) in matrices.items() if kind != outtype}
    text = command.report_text(report)
    assert f"stored as {got} instead of {outtype}" in text
    assert f"rows of {n_cols} values do not divide" in text


def test_rows_come_in_order_whatever_the_chunk_size(tmp_path: Path) -> None:
    values = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)
    (tmp_path / "raw").write_bytes(b"head" + values.tobytes() + b"tail")
    stored = StoredTensor("weight", tmp_path / "raw", "F32", values.shape, 4)
    for chunk_bytes in (1, 20, 60, 1 << 20):
        chunks = list(read_rows(stored, chunk_bytes))
        assert max(len(chunk) for chunk in chunks) == min(7, max(1, chunk_bytes // 20))
        np.testing.assert_array_equal(np.concatenate(chunks), values)


def test_weights_are_encoded_by_ggml(tmp_path: Path) -> None:
    folder = wide_draft(tmp_path / "drafter")
    convert_checkpoint(folder, tmp_path / "f32.gguf", outtype="f32")
    convert_checkpoint(folder, tmp_path / "out.gguf", outtype="q4_k")
    _, exact = read_gguf(tmp_path / "f32.gguf")
    encoded = quantize(exact["fc.weight"][1], "q4_k").tobytes()
    assert encoded in (tmp_path / "out.gguf").read_bytes()


def test_name_comes_from_the_config_or_the_folder(tmp_path: Path) -> None:
    draft = Draft.golden()
    assert convert_checkpoint(draft.write(tmp_path / "my-drafter"), tmp_path / "a.gguf").name == "my-drafter"
    draft.config["_name_or_path"] = "some-org/Some-DSpine"
    assert convert_checkpoint(draft.write(tmp_path / "named"), tmp_path / "b.gguf").name == "Some-DSpine"


def test_progress_counts_up_to_all_bytes(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    report = convert_checkpoint(
        Draft.golden().write(tmp_path / "drafter"), tmp_path / "out.gguf", progress=lambda *call: calls.append(call)
    )
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1] <= report.n_bytes
    assert {call[1] for call in calls} == {calls[-1][1]}


def run_command(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["convert", *argv])
    return int(args.run(args))


def test_command_writes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Draft.golden().write(tmp_path / "drafter")
    assert run_command(str(folder), "-o", str(tmp_path / "out.gguf")) == 0
    out, err = capsys.readouterr()
    assert "DSpine drafter 'drafter'" in out
    assert "note: 3 tensors stored as f16 instead of q8_0, e.g. blk.0.inject_write.weight" in out
    assert err == ""
    with pytest.raises(FileExistsError, match="--force"):
        run_command(str(folder), "-o", str(tmp_path / "out.gguf"))
    assert run_command(str(folder), "-o", str(tmp_path / "out.gguf"), "--force", "--json", "--outtype", "f16") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["types"] == {"f16": 32, "f32": 15}
    assert report["path"] == str(tmp_path / "out.gguf")
