"""Everything that dspine-local raises on purpose.

::

    DSpineError
    ├── ModelFormatError     a file (GGUF, checkpoint) is not what it should be
    ├── PairingError         a drafter that does not belong to the target
    ├── ContextLengthError   a request that does not fit the context
    ├── BackendError         the device, ggml or llama.cpp refused or failed
    └── ForkError            an engine in a process that was forked from one that uses it (also a RuntimeError)

A bad argument is a plain ``ValueError`` and a missing file stays ``FileNotFoundError``.
"""

from __future__ import annotations

from dspine_local._native import (
    BackendError,
    ContextLengthError,
    DSpineError,
    ModelFormatError,
    PairingError,
)

__all__ = ["BackendError", "ContextLengthError", "DSpineError", "ForkError", "ModelFormatError", "PairingError"]


class ForkError(DSpineError, RuntimeError):
    """OpenMP's threads do not survive a fork: computing in the child would wait for them for ever."""
