"""Versions, machine, devices, and the graphs of a target and its drafter. Nothing is loaded or computed."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from dspine_local import __version__, _native
from dspine_local.costs import cache_folder
from dspine_local.errors import BackendError
from dspine_local.loading import longest_draft
from dspine_local.machine import memory_bytes, processor
from dspine_local.native_models import open_drafter, open_target
from dspine_local.options import EngineOptions
from dspine_local.planning.devices import available_ram
from dspine_local.planning.measure import PlannedFiles
from dspine_local.planning.shapes import write_shape

# Whose drafter is looked at when there is no file: that of the smallest published target.
SHAPE = "qwen3-4b"
N_CTX = 4096
_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Device:
    """A device as ggml lists it; bytes."""

    name: str
    description: str
    is_gpu: bool
    n_free: int
    n_total: int


@dataclass(frozen=True)
class Operation:
    """An operation of the drafter's largest graphs on one type of operand.

    ``n_nodes`` by device: the CPU takes other ways than a GPU. ``unsupported``: devices that cannot run all of them.
    """

    name: str
    operand: str
    n_nodes: Mapping[str, int]
    unsupported: tuple[str, ...]


@dataclass(frozen=True)
class ModelGraphs:
    """``target``: None of a published shape. ``splits``: parts of the target's graphs of a prompt and of one token."""

    target: str | None
    drafter: str
    splits: tuple[int, int]
    drafter_device: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What was found."""

    versions: Mapping[str, str]
    wanted_llama: str | None
    processor: str
    n_cores: int
    n_memory: int
    devices: tuple[Device, ...]
    layouts_work: bool
    has_nvidia_driver: bool
    cache_folder: str
    cache_writable: bool
    graphs: ModelGraphs

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


def examine(files: PlannedFiles | None, options: EngineOptions) -> Diagnosis:
    """Look at everything.

    Args:
        files: Target and drafter; None looks at a published target's shape and its drafter.
    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: A file is not what it should be.
        PairingError: The drafter does not belong to the target.
        ValueError: A device that does not exist.
    """
    devices = tuple(
        Device(name, description, is_gpu, n_free if is_gpu else available_ram(), n_total)
        for name, description, is_gpu, n_free, n_total in _native.devices()
    )
    folder = cache_folder()
    return Diagnosis(
        versions={
            "dspine-local": __version__,
            "llama-cpp-python": version("llama-cpp-python"),
            "Python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        wanted_llama=_wanted_llama(),
        processor=processor(),
        n_cores=os.cpu_count() or 1,
        n_memory=memory_bytes(),
        devices=devices,
        layouts_work=_native.cpu_layouts_work(),
        has_nvidia_driver=_NVIDIA.exists(),
        cache_folder=str(folder),
        cache_writable=_writable(folder),
        graphs=_graphs(files, options, [device.name for device in devices]),
    )


def _graphs(files: PlannedFiles | None, options: EngineOptions, devices: list[str]) -> ModelGraphs:
    if files is None:
        with tempfile.TemporaryDirectory() as folder:
            shape = write_shape(SHAPE, "q8_0", "q8_0", Path(folder))
            found = _planned_graphs(shape, options, devices)
        return ModelGraphs(None, f"a drafter of {SHAPE}'s shape, q8_0", *found)
    if files.drafter is None:
        raise ValueError("a target without a drafter, expected both or none")
    return ModelGraphs(files.target, files.drafter, *_planned_graphs(files, options, devices))


def _planned_graphs(
    files: PlannedFiles, options: EngineOptions, devices: list[str]
) -> tuple[tuple[int, int], str, tuple[Operation, ...]]:
    assert files.drafter is not None
    n_draft = longest_draft(files.drafter, options.n_draft)
    n_ctx = N_CTX if options.n_ctx is None else options.n_ctx
    target = open_target(files.target, options, n_ctx=n_ctx, n_draft=n_draft, planned=True, n_snapshots=0)
    try:
        drafter = open_drafter(files.drafter, target, options)
    except BackendError:  # its device lacks an operation: say which
        drafter = open_drafter(files.drafter, target, replace(options, drafter_device="CPU"))
    counts: dict[tuple[str, str], dict[str, int]] = {}
    unsupported: dict[tuple[str, str], list[str]] = {}
    for device in devices:
        for name, operand, n_nodes, supported in drafter.operations(device):
            counts.setdefault((name, operand), {})[device] = n_nodes
            if not supported:
                unsupported.setdefault((name, operand), []).append(device)
    operations = tuple(
        Operation(*key, n_nodes=counts[key], unsupported=tuple(unsupported.get(key, ()))) for key in sorted(counts)
    )
    return target.graph_splits, drafter.device, operations


def _wanted_llama() -> str | None:
    """The version of llama-cpp-python that this package is made for; None where its requirements are not on record."""
    try:
        wanted = requires("dspine-local") or []
    except PackageNotFoundError:
        return None
    pinned = [text for text in wanted if text.startswith("llama-cpp-python==")]
    return pinned[0].partition("==")[2].partition(";")[0].strip() if pinned else None


def _writable(folder: Path) -> bool:
    """Whether a file can be made there; permissions do not tell of everything that is in the way."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
