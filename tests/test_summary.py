"""What `inspect` says about drafters and targets."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import gguf
import pytest
from checkpoints import GOLDEN
from conftest import DrafterFactory, TargetFactory

from dspine_local._native import vocab_sha256
from dspine_local.cli import inspect as command
from dspine_local.convert import convert_checkpoint
from dspine_local.errors import ModelFormatError
from dspine_local.summary import summarize

pytestmark = pytest.mark.native


def run_command(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["inspect", *argv])
    return int(args.run(args))


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return convert_checkpoint(GOLDEN / "sliding_window" / "drafter", tmp_path / "drafter.gguf").path


def test_drafter(drafter: Path) -> None:
    summary = summarize(drafter)
    assert (summary.kind, summary.architecture, summary.name) == ("drafter", "dspine", "drafter")
    assert (summary.n_tensors, summary.n_parameters) == (47, 145576)
    assert summary.file_bytes == drafter.stat().st_size
    assert {t.type: t.n_tensors for t in summary.types} == {"q8_0": 25, "f16": 7, "f32": 15}
    assert sum(t.n_bytes for t in summary.types) == summary.n_bytes < summary.file_bytes
    assert sum(t.n_parameters for t in summary.types) == summary.n_parameters
    assert summary.bits_per_weight == pytest.approx(8 * summary.n_bytes / summary.n_parameters)
    assert summary.details["target_layer_inputs"] == [1, 3, 7]
    assert summary.details["target_layer_ids_hf"] == [0, 2, 6]
    assert summary.details["sliding_layers"] == [0, 2]
    assert summary.details["sliding_window"] == 16
    assert (summary.details["block_size"], summary.details["candidates_per_slot"]) == (8, 8)
    assert (summary.details["transfer_rank"], summary.details["message_size"]) == (16, 8)
    assert summary.details["method"] == "DSpine"
    assert summary.details["target_vocab_sha256"] is None


def test_drafter_and_its_target_show_the_same_vocabulary(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path: Path
) -> None:
    target = tiny_target("qwen3", tied=True)
    folder = tiny_drafter(target, architecture="DFlashDraftModel")
    convert_checkpoint(folder, tmp_path / "out.gguf", target=target.path)
    drafter = summarize(tmp_path / "out.gguf")
    assert drafter.details["method"] == "DFlash"
    assert "transfer_rank" not in drafter.details
    assert drafter.details["target_vocab_sha256"] == summarize(target.path).details["vocab_sha256"]
    assert drafter.details["target_architecture"] == "qwen3"


@pytest.mark.parametrize(("arch", "tied"), [("llama", False), ("qwen3", True), ("qwen35", False)])
def test_target(arch: str, tied: bool, tiny_target: TargetFactory) -> None:
    target = tiny_target(arch, tied=tied)
    summary = summarize(target.path)
    assert (summary.kind, summary.architecture) == ("target", arch)
    assert summary.details == {
        "layers": target.n_layer,
        "width": 64,
        "ffn_width": 160,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "vocabulary": 384,
        "tokenizer": "gpt2",
        "context_length": 4096,
        "tied_output": tied,
        "chat_template": True,
        "vocab_sha256": vocab_sha256(str(target.path)),
    }


def test_text_names_everything(drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(str(drafter)) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    entries = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines)
    assert first == str(drafter)
    assert entries["drafter"] == "dspine (drafter)"
    assert entries["parameters"] == "145,576 in 47 tensors"
    assert entries["size"] == "0.2 MiB, 8.95 bits per weight"
    assert entries["f16"] == "7 tensors, 0.0 MiB"
    assert entries["target layer inputs"] == "1, 3, 7"
    assert entries["target layer ids hf"] == "0, 2, 6"
    assert entries["causal block"] == "yes"
    assert entries["target vocab sha256"] == "not given"


def test_json_is_one_object(drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(str(drafter), "--json") == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == json.loads(json.dumps(summarize(drafter).to_json()))


def test_bad_files_are_refused(drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.gguf"):
        summarize(tmp_path / "nothing.gguf")
    whole = drafter.read_bytes()
    for content in (b"", b"GGUF", whole[:500], whole[:-500], b"GGML" + whole[4:]):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ModelFormatError, match=r"bad\.gguf"):
            summarize(tmp_path / "bad.gguf")


@pytest.mark.parametrize("arch", ["dspine", "llama"])
def test_a_file_without_a_model_is_refused(arch: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "empty.gguf", arch)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match="has no key"):
        summarize(tmp_path / "empty.gguf")
