"""Token codes: the fixed points of the transfer space. Source: docs/training.md, token codes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

EPS = 1e-12


def token_codes(head: Array, rank: int) -> tuple[Array, Array]:
    """Whitened main directions of the output matrix's normalized rows.

    Args:
        head: Output matrix, float32 [V, D].
        rank: Width of the transfer space, at most D.
    Returns:
        Codes of unit length [V, rank] and the directions [D, rank].
    Raises:
        ValueError: A rank out of range.
    """
    if not 1 <= rank <= head.shape[1]:
        raise ValueError(f"rank = {rank}, expected 1 to {head.shape[1]} (the target's width)")
    rows = head.astype(np.float64)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), EPS)
    rows -= rows.mean(axis=0)
    eigenvalues, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    directions, scale = vectors[:, ::-1][:, :rank], eigenvalues[::-1][:rank]
    codes = rows @ directions / np.sqrt(np.maximum(scale, EPS))
    codes /= np.maximum(np.linalg.norm(codes, axis=1, keepdims=True), EPS)
    return codes.astype(np.float32), directions.astype(np.float32)
