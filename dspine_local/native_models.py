"""Opens native targets and drafters with the engine's options: the one place where their names meet."""

from __future__ import annotations

from dspine_local import _native
from dspine_local.options import EngineOptions


def open_target(
    path: str, options: EngineOptions, *, n_ctx: int, n_draft: int, planned: bool = False, n_snapshots: int = -1
) -> _native.Target:
    """The target, or, planned, one that has no weights and only knows how much memory it would take.

    Args:
        n_ctx: In place of the options': positions of all slots together; 0 is as many as the target was trained for.
        n_draft: Longest draft.
        n_snapshots: Of a planned target's recurrent state; -1 is as many as drafting needs.
    """
    return _native.Target(
        path,
        n_ctx=n_ctx,
        n_seq=options.n_parallel,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        n_rollback=n_draft,
        n_gpu_layers=options.n_gpu_layers,
        n_threads=options.n_threads,
        n_threads_batch=options.n_threads_batch,
        flash_attn=options.flash_attn,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        use_mmap=options.use_mmap,
        planned=planned,
        n_snapshots=n_snapshots,
        devices=None if options.devices is None else list(options.devices),
        split_mode=options.split_mode,
        tensor_split=list(options.tensor_split),
    )


def open_drafter(path: str, target: _native.Target, options: EngineOptions) -> _native.Drafter:
    """The drafter for this target; planned if the target is."""
    return _native.Drafter(
        path,
        target.tensors(),
        n_seq=options.n_parallel,
        n_ctx=target.n_ctx_seq,
        n_threads=options.n_threads,
        cache_type=options.cache_type_drafter,
        order=options.transition_order,
        device=options.drafter_device or "",
    )
