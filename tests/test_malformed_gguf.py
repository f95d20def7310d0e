"""Damaged drafter files never crash or hang the process: they are refused by our exceptions, or load and then draft.

The changed files are read in a process of their own, which is this file run as a script: it names every change before
it looks at the file, so a crash shows what caused it.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_damage import Damage

from dspine_local._native import Drafter, GgufFile, TargetTensors
from dspine_local.convert import convert_checkpoint
from dspine_local.errors import DSpineError, ModelFormatError
from dspine_local.summary import summarize

pytestmark = pytest.mark.native

CASE = Path(__file__).parent / "data" / "golden" / "gqa_small"
N_CHANGES = 500



def load_and_draft(path: Path, target: TargetTensors, n_vocab: int) -> None:
    """All that we do with a drafter file: look at it, load it, commit, draft."""
    summarize(path)
    file = GgufFile(str(path))
    for key in file.keys():  # noqa: SIM118 - not a dict
        file.get(key)
    drafter = Drafter(str(path), target, n_ctx=64, n_threads=1)
    drafter.commit(0, np.ones((9, drafter.n_taps * drafter.n_embd), np.float32))
    (draft,) = drafter.draft([(0, 3)], drafter.block_size - 1)
    assert len(draft.tokens) == drafter.block_size - 1
    assert all(0 <= token < n_vocab for token in draft.tokens)


def run_all(valid: Path, work: Path) -> None:
    case = np.load(CASE / "case.npz")
    target = TargetTensors.from_arrays(case["target_embed"], case["target_head"])
    damage = Damage(valid)
    counts = {"loaded": 0, "refused": 0}
    for seed in range(N_CHANGES):
        kind, data = damage.make(seed)
        print(f"{seed}: {kind}", flush=True)
        path = work / "damaged.gguf"
        path.write_bytes(data)
        try:
            load_and_draft(path, target, len(case["target_head"]))
            counts["loaded"] += 1
        except UnicodeError:  # a ValueError, but one that nobody meant
            raise
        except (DSpineError, ValueError) as error:
            print(f"    {error}")
            counts["refused"] += 1
    print(f"{counts['loaded']} loaded, {counts['refused']} refused")
    assert counts["loaded"] > 20
    assert counts["refused"] > 200


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("malformed") / "drafter.gguf"
    convert_checkpoint(CASE / "drafter", path)
    return path


@pytest.fixture(scope="module")
def target() -> TargetTensors:
    case = np.load(CASE / "case.npz")
    return TargetTensors.from_arrays(case["target_embed"], case["target_head"])


def test_damaged_files_are_refused_or_draft(valid: Path, tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(valid), str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "GGML_NO_BACKTRACE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


def test_the_whole_file_drafts(valid: Path, target: TargetTensors) -> None:
    load_and_draft(valid, target, 320)


def test_a_missing_file(tmp_path: Path, target: TargetTensors) -> None:
    for open_file in (lambda path: Drafter(path, target), GgufFile):
        with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
            open_file(str(tmp_path / "absent.gguf"))


def test_a_folder(tmp_path: Path, target: TargetTensors) -> None:
    with pytest.raises(ModelFormatError, match="is not a regular file"):
        Drafter(str(tmp_path), target)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00", b"<html>not found</html>" * 10])
def test_no_gguf_at_all(content: bytes, tmp_path: Path, target: TargetTensors) -> None:
    path = tmp_path / "drafter.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"drafter\.gguf' is not a readable GGUF file"):
        Drafter(str(path), target)


def test_another_architecture(tmp_path: Path, target: TargetTensors) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match="has architecture 'llama', expected a drafter of architecture 'dspine'"):
        Drafter(str(path), target)


def test_one_byte_too_short(valid: Path, tmp_path: Path, target: TargetTensors) -> None:
    reader = gguf.GGUFReader(valid)
    end = max(int(t.data_offset) + int(t.n_bytes) for t in reader.tensors)  # padding may follow
    path = tmp_path / "short.gguf"
    path.write_bytes(valid.read_bytes()[: end - 1])
    with pytest.raises(ModelFormatError, match=f"is truncated: .* ends at byte {end}, the file has {end - 1}"):
        Drafter(str(path), target)


def test_names_that_are_not_utf8(valid: Path, tmp_path: Path, target: TargetTensors) -> None:
    path = tmp_path / "names.gguf"
    for name in (b"output_norm.weight", b"dspine.block_count"):
        path.write_bytes(valid.read_bytes().replace(name, b"\xff" + name[1:], 1))
        with pytest.raises(ModelFormatError, match=r"has no (tensor|key)"):
            Drafter(str(path), target)
        header = GgufFile(str(path))
        names = [*header.keys(), *(tensor.name for tensor in header.tensors())]
        assert any(found.endswith("\ufffd" + name[1:].decode()) for found in names)


if __name__ == "__main__":
    faulthandler.enable()
    run_all(Path(sys.argv[1]), Path(sys.argv[2]))
