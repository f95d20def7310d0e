"""Damaged target files never end the process: they are refused by our exceptions, or load and then decode.

llama.cpp asserts some of what a header says. As with drafters, the changed files are read in a process of their own,
which is this file run as a script.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from conftest import TargetFactory
from gguf_damage import Damage

from dspine_local._native import Target
from dspine_local.errors import DSpineError, ModelFormatError

pytestmark = pytest.mark.native

N_CHANGES = 200
MEMORY = 6 << 30


def run_all(valid: Path, work: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    damage = Damage(valid)
    counts = {"loaded": 0, "refused": 0}
    for seed in range(N_CHANGES):
        kind, data = damage.make(seed)
        print(f"{seed}: {kind}", flush=True)
        path = work / "damaged.gguf"
        path.write_bytes(data)
        try:
            target = Target(str(path), n_ctx=64, n_threads=1)
            target.decode(0, [1, 2, 3])
            counts["loaded"] += 1
        except (DSpineError, ValueError, MemoryError) as error:
            print(f"    {error}")
            counts["refused"] += 1
    print(f"{counts['loaded']} loaded, {counts['refused']} refused")
    assert min(counts.values()) > 10


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_damaged_files_are_refused_or_decode(arch: str, tiny_target: TargetFactory, tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tiny_target(arch, "q8_0").path), str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "GGML_NO_BACKTRACE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 100_000, "n_layer"),  # llama.cpp asserts that it has room for so many
        ("rope.dimension_count", 4096, r"llama\.rope\.dimension_count = 4096, expected at most"),
    ],
)
def test_a_value_that_llama_cpp_asserts(
    key: str, value: int, message: str, tiny_target: TargetFactory, tmp_path: Path
) -> None:
    path = tmp_path / "target.gguf"
    path.write_bytes(tiny_target("llama", "q8_0").path.read_bytes())
    reader = gguf.GGUFReader(path, "r+")
    field = reader.fields[f"llama.{key}"]
    field.parts[field.data[0]][0] = value
    reader.data.flush()
    with pytest.raises(ModelFormatError, match=rf"target\.gguf.*{message}"):
        Target(str(path))


def test_a_norm_of_whole_numbers(tiny_target: TargetFactory, tmp_path: Path) -> None:
    path = tmp_path / "target.gguf"
    data = bytearray(tiny_target("llama", "q8_0").path.read_bytes())
    (norm,) = [t for t in gguf.GGUFReader(tiny_target("llama", "q8_0").path).tensors if t.name == "output_norm.weight"]
    type_at = norm.field.offset + 8 + len(norm.name) + 4 + 8 * len(norm.shape)
    data[type_at : type_at + 4] = int(gguf.GGMLQuantizationType.I32).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"output_norm\.weight' of type i32, expected f32, f16 or bf16"):
        Target(str(path))


if __name__ == "__main__":
    faulthandler.enable()
    run_all(Path(sys.argv[1]), Path(sys.argv[2]))
