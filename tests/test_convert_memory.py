"""Peak memory of a conversion does not depend on the size of the checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import wide_draft

pytestmark = pytest.mark.native

# Reads the kernel's high-water mark of resident memory before and after, in KiB.
SCRIPT = """
import sys
from pathlib import Path
from dspine_local.convert import convert_checkpoint

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

before = peak()
convert_checkpoint(sys.argv[1], sys.argv[2], outtype=sys.argv[3])
print(peak() - before)
"""
LARGEST_MIB = 80
BOUND_MIB = 48


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 drafter whose codes are by far its largest tensor."""
    vocab = LARGEST_MIB * (1 << 20) // (2 * 256)
    return wide_draft(tmp_path_factory.mktemp("memory") / "drafter", dtype="BF16", vocab=vocab)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("outtype", ["f32", "q8_0"])
def test_peak_stays_below_the_largest_tensor(outtype: str, checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, checkpoint, tmp_path / "out.gguf", outtype]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert (tmp_path / "out.gguf").stat().st_size > LARGEST_MIB // 2 << 20
    assert int(result.stdout) < BOUND_MIB << 10
