"""Damaged drafter files never crash or hang the process: they are refused by our exceptions, or load and then draft.

The changed files are read in a process of their own, which is this file run as a script: it names every change before
it looks at the file, so a crash shows what caused it.
"""

from __future__ import annotations

import faulthandler
import random
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from dspine_local._native import Drafter, GgufFile, TargetTensors
from dspine_local.convert import convert_checkpoint
from dspine_local.errors import DSpineError, ModelFormatError
from dspine_local.summary import summarize

pytestmark = pytest.mark.native

CASE = Path(__file__).parent / "data" / "golden" / "gqa_small"
N_CHANGES = 500
NUMBERS = [0, 1, 2, 3, 7, 31, 32, 33, 64, 65, 127, 4096, 65536, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]


class Damage:
    """Seeded changes of a file's bytes: one method for each kind of change."""

    KINDS = ("bits", "noise", "cut", "shift", "type", "value", "value", "shape", "shape", "swap")

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.whole = path.read_bytes()
        self.n_header = reader.data_offset
        self.fields = [f for f in reader.fields.values() if not f.name.startswith("GGUF.")]
        self.tensors = reader.tensors

    def make(self, seed: int) -> tuple[str, bytes]:
        self.rng = random.Random(seed)
        self.data = bytearray(self.whole)
        # Most damage goes to the header: there it does most.
        self.end = len(self.data) if self.rng.random() < 0.2 else self.n_header
        kind = self.rng.choice(self.KINDS)
        getattr(self, kind)()
        return kind, bytes(self.data)

    def bits(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            self.data[self.rng.randrange(self.end)] ^= 1 << self.rng.randrange(8)

    def noise(self) -> None:
        at, n = self.rng.randrange(self.end - 64), self.rng.randint(1, 64)
        self.data[at : at + n] = self.rng.randbytes(n)

    def cut(self) -> None:
        del self.data[self.rng.randrange(self.end) :]

    def shift(self) -> None:
        """Bytes taken out or put in."""
        at, n = self.rng.randrange(self.end - 64), self.rng.randint(1, 64)
        if self.rng.random() < 0.5:
            del self.data[at : at + n]
        else:
            self.data[at:at] = self.rng.randbytes(n)

    def type(self) -> None:
        self.put("<I", self.type_of(self.rng.choice(self.fields)), self.rng.randrange(15))

    def value(self) -> None:
        """A number; of an array its element type and length, of a string its length."""
        at = self.type_of(self.rng.choice(self.fields)) + 4
        self.put(self.rng.choice(["<I", "<Q"]), at, self.rng.choice(NUMBERS))

    def shape(self) -> None:
        """Another number of dimensions, dimension, type or offset of a tensor."""
        tensor = self.rng.choice(self.tensors)
        n_dims = tensor.field.offset + 8 + len(tensor.name)
        type_at = n_dims + 4 + 8 * len(tensor.shape)
        at = self.rng.choice([n_dims, n_dims + 4, type_at - 8, type_at, type_at + 4])
        self.put("<I", at, self.rng.choice([*NUMBERS, *range(40)]))

    def swap(self) -> None:
        """Two tensors of equally long names trade them."""
        one = self.rng.choice(self.tensors)
        two = self.rng.choice([t for t in self.tensors if len(t.name) == len(one.name)])
        for tensor, name in ((one, two.name), (two, one.name)):
            at = tensor.field.offset + 8
            self.data[at : at + len(name)] = name.encode()

    def type_of(self, field: gguf.ReaderField) -> int:
        return int(field.offset) + 8 + len(field.name)

    def put(self, layout: str, at: int, value: int) -> None:
        struct.pack_into(layout, self.data, at, value)


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
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
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
