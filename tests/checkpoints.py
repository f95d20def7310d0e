"""Drafter checkpoints held in memory, so that a test can change one thing and write the folder."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from random_drafters import random_checkpoint, write_safetensors, write_shards
from safetensors.numpy import load_file

Array = npt.NDArray[Any]

GOLDEN = Path(__file__).parent / "data" / "golden"
ABSENT = object()


@dataclass
class Draft:
    """A checkpoint's config and tensors; a tensor is its safetensors dtype and the stored array."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, Array]]

    @classmethod
    def golden(cls, case: str = "gqa_small") -> Draft:
        """A golden case's drafter; codes of a second file are merged in."""
        folder = GOLDEN / case / "drafter"
        tensors = {}
        for file in folder.glob("*.safetensors"):
            for name, array in load_file(file).items():
                tensors[name] = ("BOOL" if array.dtype == np.bool_ else "F32", array)
        return cls(json.loads((folder / "config.json").read_text()), tensors)

    def set(self, path: str, value: Any) -> None:
        """Change a config entry, given as ``"section.key"``; ABSENT removes it."""
        *sections, key = path.split(".")
        place = self.config
        for section in sections:
            place = place[section]
        if value is ABSENT:
            del place[key]
        else:
            place[key] = value

    def write(self, folder: Path, n_shards: int = 1) -> Path:
        """Write the checkpoint folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        write_shards(folder, self.tensors, n_shards)
        return folder

    def copy(self) -> Draft:
        return copy.deepcopy(self)


def reference_layout(draft: Draft, folder: Path, codes_file: str = "transfer.safetensors") -> Path:
    """Write a layout-1 checkpoint as layout 2: nested config without dspine_config, codes in a second file."""
    config = {key: value for key, value in draft.config.items() if key != "dspine_config"}
    tensors = {name: value for name, value in draft.tensors.items() if not name.startswith("transfer_")}
    Draft({"config": config}, tensors).write(folder)
    write_safetensors(folder / codes_file, {"codes": draft.tensors["transfer_codes"]})
    return folder


def wide_draft(folder: Path, **options: Any) -> Path:
    """A random checkpoint whose every row divides into blocks of 256, so that K-quants need no fallback."""
    sizes: dict[str, Any] = {"hidden_size": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "ffn": 256, "rank": 256}
    return random_checkpoint(folder, **(sizes | {"message": 256, "n_layers": 1, "n_taps": 1} | options))


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, tuple[str, Array]]]:
    """Metadata, and each tensor's type and float32 values [rows, columns], through gguf-py."""
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    tensors = {}
    for t in reader.tensors:
        values = gguf.quants.dequantize(t.data, t.tensor_type)
        tensors[t.name] = (t.tensor_type.name.lower(), values.reshape([int(n) for n in reversed(t.shape)]).copy())
    return metadata, tensors


def files_in(folder: Path) -> set[str]:
    """Names of everything in a folder, hidden files included."""
    return {path.name for path in folder.iterdir()}
