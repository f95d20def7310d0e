"""Bad checkpoints and failed conversions: one clear error, and no file left or changed."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Draft, files_in, reference_layout
from random_drafters import encode, write_safetensors

from dspine_local.convert import convert_checkpoint
from dspine_local.errors import ModelFormatError

pytestmark = pytest.mark.native


@pytest.fixture
def draft() -> Draft:
    return Draft.golden()


def refused(folder: Path, tmp_path: Path, error: type[Exception] = ModelFormatError, **options: Any) -> str:
    """The message of a conversion that fails and leaves the output's folder as it was."""
    before = files_in(tmp_path)
    with pytest.raises(error) as caught:
        convert_checkpoint(folder, tmp_path / "out.gguf", **options)
    assert files_in(tmp_path) == before
    return str(caught.value)


class TestTensors:
    def test_missing(self, draft: Draft, tmp_path: Path) -> None:
        for name in ("layers.1.mlp.up_proj.weight", "injection.writes.2.weight"):
            del draft.tensors[name]
        message = refused(draft.write(tmp_path / "drafter"), tmp_path)
        assert "has no tensor 'injection.writes.2.weight' (and 1 more)" in message

    @pytest.mark.parametrize(
        "name", ["embed_tokens.weight", "layers.3.mlp.up_proj.weight", "layers.0.self_attn.q_proj.bias"]
    )
    def test_extra(self, name: str, draft: Draft, tmp_path: Path) -> None:
        draft.tensors[name] = encode(np.ones(4), "F32")
        message = refused(draft.write(tmp_path / "drafter"), tmp_path)
        assert f"has tensor '{name}', which no part of this drafter uses" in message

    def test_wrong_shape(self, draft: Draft, tmp_path: Path) -> None:
        dtype, values = draft.tensors["fc.weight"]
        draft.tensors["fc.weight"] = dtype, np.ascontiguousarray(values.T)
        message = refused(draft.write(tmp_path / "drafter"), tmp_path)
        assert "'fc.weight' of shape [192, 64], expected [64, 192]" in message

    def test_wrong_rank(self, draft: Draft, tmp_path: Path) -> None:
        dtype, values = draft.tensors["norm.weight"]
        draft.tensors["norm.weight"] = dtype, values.reshape(1, -1)
        assert "'norm.weight' of shape [1, 64], expected [64]" in refused(draft.write(tmp_path / "drafter"), tmp_path)

    @pytest.mark.parametrize(("dtype", "numpy_dtype"), [("F64", np.float64), ("I8", np.int8), ("F8_E4M3", np.uint8)])
    def test_wrong_dtype(self, dtype: str, numpy_dtype: type[np.generic], draft: Draft, tmp_path: Path) -> None:
        draft.tensors["norm.weight"] = dtype, np.ones(64, numpy_dtype)
        message = refused(draft.write(tmp_path / "drafter"), tmp_path)
        assert f"'norm.weight' of type {dtype}, expected F32, F16, BF16" in message

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
    def test_not_finite(self, value: float, dtype: str, draft: Draft, tmp_path: Path) -> None:
        values = draft.tensors["layers.2.mlp.down_proj.weight"][1].copy()
        values[37, 5] = value
        # bfloat16 by truncation: rounding could carry a NaN's payload into the exponent.
        stored = (dtype, (values.view(np.uint32) >> 16).astype(np.uint16)) if dtype == "BF16" else encode(values, dtype)
        draft.tensors["layers.2.mlp.down_proj.weight"] = stored
        message = refused(draft.write(tmp_path / "drafter"), tmp_path)
        assert f"'layers.2.mlp.down_proj.weight' with {value} at row 37, column 5, expected a finite number" in message

    def test_not_finite_in_a_vector(self, draft: Draft, tmp_path: Path) -> None:
        draft.tensors["injection.bias"][1][3] = np.nan
        message = refused(draft.write(tmp_path / "drafter"), tmp_path)
        assert "'injection.bias' with nan at position 3" in message

    def test_too_large_for_the_type(self, draft: Draft, tmp_path: Path) -> None:
        draft.tensors["fc.weight"][1][1, 2] = -70000.0
        folder = draft.write(tmp_path / "drafter")
        for outtype in ("f16", "q8_0", "q4_k"):
            message = refused(folder, tmp_path, outtype=outtype)
            assert "'fc.weight' with -70000.0 at row 1, column 2, expected at most 65504" in message
        convert_checkpoint(folder, tmp_path / "out.gguf", outtype="bf16")

    def test_codes_that_are_not_ready(self, draft: Draft, tmp_path: Path) -> None:
        draft.tensors["transfer_ready"] = encode(np.array(False), "BOOL")
        assert "transfer_ready = false" in refused(draft.write(tmp_path / "drafter"), tmp_path)

    def test_codes_without_a_word_whether_they_are_ready(self, draft: Draft, tmp_path: Path) -> None:
        del draft.tensors["transfer_ready"]
        assert "has no tensor 'transfer_ready'" in refused(draft.write(tmp_path / "drafter"), tmp_path)

    def test_ready_flag_of_another_type(self, draft: Draft, tmp_path: Path) -> None:
        draft.tensors["transfer_ready"] = encode(np.array(1.0), "F32")
        assert "'transfer_ready' of type F32" in refused(draft.write(tmp_path / "drafter"), tmp_path)

    def test_no_codes(self, draft: Draft, tmp_path: Path) -> None:
        for name in ("transfer_codes", "transfer_ready"):
            del draft.tensors[name]
        message = refused(draft.write(tmp_path / "drafter"), tmp_path)
        assert "has no tensor 'transfer_codes'" in message

    def test_two_tables_of_codes(self, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        write_safetensors(folder / "transfer.safetensors", {"codes": draft.tensors["transfer_codes"]})
        assert "'transfer_codes'" in refused(folder, tmp_path)

    def test_codes_of_another_vocabulary(self, draft: Draft, tmp_path: Path) -> None:
        dtype, values = draft.tensors["transfer_codes"]
        draft.tensors["transfer_codes"] = dtype, values[:-1].copy()
        message = refused(reference_layout(draft, tmp_path / "drafter"), tmp_path)
        assert "'codes' of shape [319, 32], expected [320, 32]" in message


class TestFiles:
    def test_no_folder(self, tmp_path: Path) -> None:
        assert "no such checkpoint folder" in refused(tmp_path / "nowhere", tmp_path, FileNotFoundError)

    def test_a_file_instead_of_a_folder(self, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        assert "expected the checkpoint's folder" in refused(folder / "model.safetensors", tmp_path)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_missing_file(self, name: str, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        (folder / name).unlink()
        assert name in refused(folder, tmp_path, FileNotFoundError)

    @pytest.mark.parametrize("kind", ["folder", "fifo"])
    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
    def test_something_else_instead_of_a_file(self, name: str, kind: str, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir() if kind == "folder" else os.mkfifo(folder / name)
        message = refused(folder, tmp_path)
        assert f"{name}' is a " in message
        assert "expected a regular file" in message

    def test_a_shard_that_leads_nowhere(self, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to("gone")
        assert "model.safetensors'" in refused(folder, tmp_path, FileNotFoundError)

    def test_nul_in_a_path(self, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        for arguments in (
            {"checkpoint_dir": f"{folder}\0x"},
            {"checkpoint_dir": folder, "out_path": f"{tmp_path}/x\0.gguf"},
            {"checkpoint_dir": folder, "target": f"{tmp_path}/x\0.gguf"},
        ):
            with pytest.raises(ValueError, match="has a NUL character"):
                convert_checkpoint(**({"out_path": tmp_path / "out.gguf"} | arguments))
        assert files_in(tmp_path) == {"drafter"}

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "not valid JSON"),
            (b"{", "not valid JSON"),
            (b'{"a": 1,}', "not valid JSON"),
            (b"\xff\xfe{}", "not valid JSON"),
            (b"[" * 100_000, "not valid JSON"),
            (b"[1]", "holds a JSON list"),
            (b"null", "holds a JSON NoneType"),
            (b'{"a": 1, "b": 2, "a": 3}', "gives the key 'a' twice"),
            (b'{"config": 5}', "config = 5"),
            (b'{"config": {}, "step": 5}', "'step' beside"),
            (b"{}", "has no architectures"),
        ],
    )
    def test_malformed_config(self, content: bytes, reason: str, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        (folder / "config.json").write_bytes(content)
        message = refused(folder, tmp_path)
        assert reason in message
        assert "config.json" in message

    @pytest.mark.parametrize("size", [0, 5, 100, -1, -4000])
    def test_truncated_safetensors(self, size: int, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:size])
        message = refused(folder, tmp_path)
        assert "model.safetensors' is not a whole safetensors file" in message

    @pytest.mark.parametrize(
        ("old", "new"),
        [(b"[64, 192]", b"[64, 193]"), (b'"F32"', b'"X99"'), (b'{"__', b'["__'), (b"\x00\x00", b"\xff\xff")],
    )
    def test_damaged_safetensors(self, old: bytes, new: bytes, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data.replace(old, new, 1))
        assert "is not a whole safetensors file" in refused(folder, tmp_path)

    def test_mask_embedding(self, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        (folder / "mask_embedding.pt").touch()
        assert "mask_embedding.pt" in refused(folder, tmp_path)


class TestShards:
    @pytest.fixture
    def folder(self, draft: Draft, tmp_path: Path) -> Path:
        return draft.write(tmp_path / "drafter", n_shards=3)

    def edit(self, folder: Path, name: str, shard: str | None) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
        path.write_text(json.dumps(index))

    def test_missing_shard(self, folder: Path, tmp_path: Path) -> None:
        (folder / "model-00002-of-00003.safetensors").unlink()
        assert "model-00002-of-00003.safetensors" in refused(folder, tmp_path, FileNotFoundError)

    def test_tensor_that_its_shard_lacks(self, folder: Path, tmp_path: Path) -> None:
        self.edit(folder, "lost.weight", "model-00001-of-00003.safetensors")
        assert "holds tensor 'lost.weight', which is not there" in refused(folder, tmp_path)

    def test_tensor_in_another_shard(self, folder: Path, tmp_path: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        other = next(shard for shard in index.values() if shard != index["fc.weight"])
        self.edit(folder, "fc.weight", other)
        assert f"'{other}' holds tensor 'fc.weight', which is not there" in refused(folder, tmp_path)

    def test_tensor_that_the_index_lacks(self, folder: Path, tmp_path: Path) -> None:
        self.edit(folder, "fc.weight", None)
        assert "'fc.weight', which" in refused(folder, tmp_path)

    def test_shard_outside_the_folder(self, folder: Path, tmp_path: Path) -> None:
        self.edit(folder, "fc.weight", "../model-00001-of-00003.safetensors")
        assert "expected a file of the same folder" in refused(folder, tmp_path)

    def test_shard_with_a_nul(self, folder: Path, tmp_path: Path) -> None:
        self.edit(folder, "fc.weight", "model-00001-of-00003\0.safetensors")
        assert "expected a file of the same folder" in refused(folder, tmp_path)

    def test_index_without_a_map(self, folder: Path, tmp_path: Path) -> None:
        (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
        assert "has no 'weight_map'" in refused(folder, tmp_path)

    def test_whole_file_beside_the_shards(self, folder: Path, draft: Draft, tmp_path: Path) -> None:
        write_safetensors(folder / "model.safetensors", draft.tensors)
        assert "is both in" in refused(folder, tmp_path)


class TestOutput:
    def test_unknown_type(self, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        assert "'q3_x', expected one of f32, f16" in refused(folder, tmp_path, ValueError, outtype="q3_x")

    def test_existing_file_is_kept(self, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        (tmp_path / "out.gguf").write_text("precious")
        refused(folder, tmp_path, FileExistsError)
        assert (tmp_path / "out.gguf").read_text() == "precious"
        convert_checkpoint(folder, tmp_path / "out.gguf", overwrite=True)
        assert (tmp_path / "out.gguf").read_bytes()[:4] == b"GGUF"

    def test_missing_output_folder(self, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        with pytest.raises(FileNotFoundError, match=r"no such folder: .*nowhere"):
            convert_checkpoint(folder, tmp_path / "nowhere" / "out.gguf")

    def test_folder_as_output(self, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        with pytest.raises(ValueError, match="is a folder"):
            convert_checkpoint(folder, tmp_path, overwrite=True)

    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("kind", ["fifo", "socket", "link to nothing", "link in a circle", "link to a fifo"])
    def test_only_regular_files_are_replaced(
        self, kind: str, overwrite: bool, draft: Draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = draft.write(tmp_path / "drafter")
        out = tmp_path / "out.gguf"
        if kind == "fifo":
            os.mkfifo(out)
        elif kind == "socket":
            monkeypatch.chdir(tmp_path)  # a socket's path is short
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(out.name)
        elif kind == "link to nothing":
            out.symlink_to("nothing")
        elif kind == "link in a circle":
            out.symlink_to(out)
        else:
            os.mkfifo(tmp_path / "fifo")
            out.symlink_to("fifo")
        before = out.lstat()
        message = refused(folder, tmp_path, ValueError, overwrite=overwrite)
        assert "out.gguf' is a" in message
        assert os.path.samestat(before, out.lstat())

    def test_a_link_stays_and_its_file_is_written(self, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        (tmp_path / "elsewhere").mkdir()
        file, out = tmp_path / "elsewhere" / "real.gguf", tmp_path / "out.gguf"
        file.write_text("old")
        out.symlink_to(file)
        refused(folder, tmp_path, FileExistsError)
        assert file.read_text() == "old"
        convert_checkpoint(folder, out, overwrite=True)
        assert out.is_symlink()
        assert file.read_bytes()[:4] == b"GGUF"
        assert files_in(tmp_path / "elsewhere") == {"real.gguf"}

    def test_input_as_output(self, draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        before = (folder / "model.safetensors").read_bytes()
        with pytest.raises(ValueError, match="would replace an input"):
            convert_checkpoint(folder, folder / ".." / "drafter" / "model.safetensors", overwrite=True)
        assert (folder / "model.safetensors").read_bytes() == before

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
    def test_interrupted_halfway(self, error: type[BaseException], draft: Draft, tmp_path: Path) -> None:
        folder = draft.write(tmp_path / "drafter")
        (tmp_path / "out.gguf").write_text("old")
        seen: set[str] = set()

        def interrupt(done: int, total: int, _tensor: str) -> None:
            if done > total // 2:
                seen.update(files_in(tmp_path))
                raise error

        with pytest.raises(error):
            convert_checkpoint(folder, tmp_path / "out.gguf", overwrite=True, progress=interrupt)
        assert f".out.gguf.{os.getpid()}.tmp" in seen
        assert files_in(tmp_path) == {"drafter", "out.gguf"}
        assert (tmp_path / "out.gguf").read_text() == "old"
