"""The two lists of GGUF names, Python's and C++'s, say the same."""

from __future__ import annotations

import re
from pathlib import Path

from dspine_local.convert.schema import ARCHITECTURE, Key, Tensor

HEADER = Path(__file__).parents[1] / "native" / "core" / "gguf" / "schema.h"
# Written for other programs; the drafter itself does not read them.
NOT_READ = {"NAME", "FILE_TYPE", "QUANTIZATION_VERSION"}


def names(holder: type, prefix: str) -> dict[str, str]:
    return {f"{prefix}_{name}": value for name, value in vars(holder).items() if name.isupper()}


def test_python_and_cpp_agree() -> None:
    cpp = dict(re.findall(r'constexpr char (\w+)\[\] = "([^"]*)";', HEADER.read_text()))
    python = names(Key, "KEY") | names(Tensor, "TENSOR") | {"ARCHITECTURE": ARCHITECTURE}
    assert cpp == {name: value for name, value in python.items() if name.removeprefix("KEY_") not in NOT_READ}
