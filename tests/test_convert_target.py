"""Conversion with --target: the pairing is checked, both sides are named, and the vocabulary is remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import GOLDEN, files_in, read_gguf
from conftest import DrafterFactory, TargetFactory

from dspine_local._native import vocab_sha256
from dspine_local.convert import convert_checkpoint
from dspine_local.errors import DSpineError, ModelFormatError, PairingError

pytestmark = pytest.mark.native


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen35"])
def test_matching_target_is_remembered(
    arch: str, tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path: Path
) -> None:
    target = tiny_target(arch)
    report = convert_checkpoint(tiny_drafter(target), tmp_path / "out.gguf", target=target.path)
    metadata, _ = read_gguf(tmp_path / "out.gguf")
    assert report.target == target.path
    assert metadata["dspine.target.architecture"] == arch
    assert metadata["dspine.target.vocab_sha256"] == vocab_sha256(str(target.path))
    assert metadata["dspine.target.block_count"] == target.n_layer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 96}, r"width \(hidden_size\): 96 in the drafter, 64 in the target"),
        ({"num_target_layers": 5}, r"layers \(num_target_layers\): 5 in the drafter, 4 in the target"),
        ({"vocab": 400}, r"vocabulary \(vocab_size\): 400 in the drafter, 384 in the target"),
    ],
)
def test_other_targets_are_refused(
    options: dict[str, Any], message: str, tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path: Path
) -> None:
    target = tiny_target("qwen3")
    with pytest.raises(PairingError, match=message) as error:
        convert_checkpoint(tiny_drafter(target, **options), tmp_path / "out.gguf", target=target.path)
    assert str(target.path) in str(error.value)
    assert files_in(tmp_path) == set()


def test_all_differences_are_named_at_once(tiny_target: TargetFactory, tmp_path: Path) -> None:
    with pytest.raises(PairingError, match=r"layers .*; vocabulary "):
        convert_checkpoint(GOLDEN / "gqa_small" / "drafter", tmp_path / "out.gguf", target=tiny_target("llama").path)


def test_a_drafter_is_no_target(tmp_path: Path) -> None:
    folder = GOLDEN / "gqa_small" / "drafter"
    convert_checkpoint(folder, tmp_path / "drafter.gguf")
    with pytest.raises(PairingError, match="is a drafter"):
        convert_checkpoint(folder, tmp_path / "out.gguf", target=tmp_path / "drafter.gguf")


def write_header(path: Path, n_layers: int, n_mtp: int = 0, n_tokens: int = 320, n_rows: int = 320) -> Path:
    """Only what the pairing looks at."""
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_block_count(n_layers)
    writer.add_embedding_length(64)
    if n_mtp:
        writer.add_uint32("qwen35.nextn_predict_layers", n_mtp)
    writer.add_token_list([f"t{i}" for i in range(n_tokens)])
    writer.add_tensor("token_embd.weight", np.zeros((n_rows, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_layers_for_multi_token_prediction_do_not_count(tmp_path: Path) -> None:
    target = write_header(tmp_path / "target.gguf", n_layers=9, n_mtp=1)
    convert_checkpoint(GOLDEN / "gqa_small" / "drafter", tmp_path / "out.gguf", target=target)
    target = write_header(tmp_path / "target.gguf", n_layers=9)
    with pytest.raises(PairingError, match="8 in the drafter, 9 in the target"):
        convert_checkpoint(GOLDEN / "gqa_small" / "drafter", tmp_path / "out.gguf", target=target, overwrite=True)


def test_vocabulary_is_compared_with_the_rows_of_the_embedding(tmp_path: Path) -> None:
    target = write_header(tmp_path / "target.gguf", n_layers=8, n_tokens=310)
    with pytest.raises(ModelFormatError, match=r"token_embd.weight of shape \[64, 320\], expected 310 rows"):
        convert_checkpoint(GOLDEN / "gqa_small" / "drafter", tmp_path / "out.gguf", target=target)


def test_damaged_and_missing_targets(tiny_target: TargetFactory, tmp_path: Path) -> None:
    folder = GOLDEN / "gqa_small" / "drafter"
    with pytest.raises(FileNotFoundError, match=r"nothing\.gguf"):
        convert_checkpoint(folder, tmp_path / "out.gguf", target=tmp_path / "nothing.gguf")
    whole = tiny_target("llama").path.read_bytes()
    for content in (b"", b"GGUF", whole[:1000], whole[:-1000]):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(DSpineError, match=r"bad\.gguf"):
            convert_checkpoint(folder, tmp_path / "out.gguf", target=tmp_path / "bad.gguf")
    assert files_in(tmp_path) == {"bad.gguf"}
