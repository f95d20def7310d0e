"""Shared fixtures: golden cases, tiny targets and drafters that fit them. Everything is made here, offline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
from random_drafters import random_checkpoint
from tiny_models import TinyTarget, write_tiny_target

GOLDEN = Path(__file__).parent / "data" / "golden"
GOLDEN_CASES = ("gqa_small", "reference_layout", "sliding_window", "wide_head_dim")


class TargetFactory(Protocol):
    """Makes a tiny target, or returns the one made before with the same arguments."""

    def __call__(self, arch: str, qtype: str = "f32", **options: Any) -> TinyTarget: ...


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


def cache_files(folder: Path, suffix: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``make`` with a new path in ``folder`` once for each set of arguments."""
    made: dict[str, Any] = {}

    def cached(*args: Any, **options: Any) -> Any:
        key = repr((args, sorted(options.items())))
        if key not in made:
            made[key] = make(folder / f"{len(made)}{suffix}", *args, **options)
        return made[key]

    return cached
