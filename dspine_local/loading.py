"""Loads a target and its drafter, in the order in which a mistake shows soonest."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import version
from os import fspath

from dspine_local import _native
from dspine_local.audit.result import Range
from dspine_local.audit.strict import exact_ranges
from dspine_local.audit.words import lengths_in_words
from dspine_local.checks import OptionError
from dspine_local.convert.schema import ARCHITECTURE, Key
from dspine_local.costs import DraftCosts, draft_costs
from dspine_local.errors import ModelFormatError, PairingError
from dspine_local.files import StrPath, checked_path
from dspine_local.native_models import open_drafter, open_target
from dspine_local.options import EngineOptions
from dspine_local.planning.load import fitting_context
from dspine_local.planning.measure import PlannedFiles
from dspine_local.slot_files import SlotIdentity, file_fingerprint

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModels:
    """Native target and drafter, the longest draft that both were made for, and what drafts cost if that matters.

    ``exact`` is None unless the options are strict: for each draft length from 1 on, the positions where it is exact.
    """

    target: _native.Target
    drafter: _native.Drafter | None
    max_draft: int
    costs: DraftCosts | None
    exact: list[list[Range]] | None


def load_models(target: StrPath, drafter: StrPath | None, options: EngineOptions) -> LoadedModels:
    """Load both models; see ``Engine`` for the errors."""
    target_path = str(checked_path(target))
    drafter_path = None if drafter is None else str(checked_path(drafter))
    if not _native.cpu_layouts_work():
        _log.info(
            "this build of llama.cpp crashes with Intel AMX, which is therefore not used: it was compiled by GCC 12 or "
            "older; a newer compiler makes the CPU faster (docs/troubleshooting.md)"
        )
    max_draft = 0 if drafter_path is None else longest_draft(drafter_path, options.n_draft)
    loaded = load_target(target_path, drafter_path, options, max_draft)
    if drafter_path is None:
        return LoadedModels(loaded, None, 0, None, exact=[] if options.strict else None)
    loaded_drafter = open_drafter(drafter_path, loaded, options)
    _check_vocabulary(drafter_path, loaded_drafter, target_path)
    exact = None
    if options.strict:
        exact = exact_ranges(loaded, options, max_draft) if max_draft > 0 else []
    _check_exact(options, exact)
    automatic = options.n_draft is None and (exact is None or any(exact))
    costs = draft_costs(loaded, loaded_drafter, (target_path, drafter_path), options) if automatic else None
    return LoadedModels(loaded, loaded_drafter, max_draft, costs, exact)


def load_target(path: str, drafter: str | None, options: EngineOptions, n_draft: int) -> _native.Target:
    """The target, with the context that fits beside its drafter.

    Args:
        n_draft: Longest draft that it will verify.
    Raises:
        BackendError: It does not fit. See ``Engine`` for the others.
    """
    n_ctx = fitting_context(PlannedFiles(path, drafter), options, n_draft)
    target = open_target(path, options, n_ctx=n_ctx, n_draft=n_draft)
    if target.n_ctx_seq > target.n_ctx_train:
        _log.warning(
            "a context of %d positions, but the target was trained for %d: behind these it may write nonsense",
            target.n_ctx_seq,
            target.n_ctx_train,
        )
    return target


def longest_draft(path: str, wanted: int | None) -> int:
    """Tokens of the longest draft: those wanted, or all of the drafter's block.

    The target's context must know it before the drafter can be loaded, so its header is read.

    Raises:
        ModelFormatError: Not a drafter.
        OptionError: More are wanted than a block has.
    """
    header = _native.GgufFile(path)
    keys = set(header.keys())
    architecture = header.get(Key.ARCHITECTURE) if Key.ARCHITECTURE in keys else None
    block_size = header.get(Key.BLOCK_SIZE) if Key.BLOCK_SIZE in keys else None
    if architecture != ARCHITECTURE or not isinstance(block_size, int):
        raise ModelFormatError(
            f"'{path}' has architecture {architecture!r} and block size {block_size!r}, expected a drafter of "
            f"architecture '{ARCHITECTURE}' (made by `dspine-local convert`)"
        )
    longest = block_size - 1
    if wanted is None:
        return longest
    if not 0 <= wanted <= longest:
        raise OptionError("n_draft", wanted, f"0 to {longest} (the drafter's block has {block_size} slots)")
    return wanted


def _check_exact(options: EngineOptions, exact: list[list[Range]] | None) -> None:
    """A draft length that was asked for by number is not silently another one."""
    wanted = options.n_draft
    if exact is None or not wanted or exact[wanted - 1]:
        return
    lengths = [k for k, where in enumerate(exact, start=1) if where]
    exact_ones = f"0, or one that is exact here: {lengths_in_words(lengths)}" if lengths else "0: none is exact here"
    raise OptionError("n_draft", wanted, f"{exact_ones} (strict, docs/lossless.md)")


def _check_vocabulary(drafter_path: str, drafter: _native.Drafter, target_path: str) -> None:
    """Two models of one size may number their tokens differently: then every draft would be nonsense."""
    expected = drafter.target_vocab_sha256
    found = _native.vocab_sha256(target_path) if expected else ""
    if found != expected:
        raise PairingError(
            f"drafter '{drafter_path}' was made for a target with another vocabulary (SHA-256 {expected[:12]}...), "
            f"'{target_path}' has {found[:12]}..."
        )


def slot_identity(target: StrPath, drafter: StrPath | None, options: EngineOptions) -> SlotIdentity:
    """What slots of an engine depend on, for the files that they are saved to."""
    return SlotIdentity(
        target=file_fingerprint(fspath(target)),
        drafter="" if drafter is None else file_fingerprint(fspath(drafter)),
        cache=f"K {options.cache_type_k}, V {options.cache_type_v}, drafter {options.cache_type_drafter}, "
        f"flash attention {options.flash_attn}",
        versions=f"llama-cpp-python {version('llama-cpp-python')}",
    )
