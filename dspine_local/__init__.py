"""Local speculative decoding with DSpine block drafters on llama.cpp and GGUF.

from dspine_local import GREEDY, Engine

engine = Engine("target.gguf", "drafter.gguf", n_ctx=8192)
for piece in engine.chat([{"role": "user", "content": "Hello!"}], sampling=GREEDY):
    print(piece, end="", flush=True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspine_local import _native as _native
    from dspine_local.engine import Engine
    from dspine_local.errors import (
        BackendError,
        ContextLengthError,
        DSpineError,
        ForkError,
        ModelFormatError,
        PairingError,
    )
    from dspine_local.generation import Generation
    from dspine_local.options import GREEDY, EngineOptions, GenerationOptions, SamplingOptions
    from dspine_local.stats import GenerationStats

__version__ = "0.1.0"

__all__ = [
    "GREEDY",
    "BackendError",
    "ContextLengthError",
    "DSpineError",
    "Engine",
    "EngineOptions",
    "ForkError",
    "Generation",
    "GenerationOptions",
    "GenerationStats",
    "ModelFormatError",
    "PairingError",
    "SamplingOptions",
    "__version__",
]

# Imported when first asked for, so that the command can begin to listen to Ctrl-C before it loads anything.
_HOMES = {
    "engine": ("Engine",),
    "generation": ("Generation",),
    "errors": (
        "BackendError",
        "ContextLengthError",
        "DSpineError",
        "ForkError",
        "ModelFormatError",
        "PairingError",
    ),
    "options": ("GREEDY", "EngineOptions", "GenerationOptions", "SamplingOptions"),
    "stats": ("GenerationStats",),
}


def __getattr__(name: str) -> Any:
    if name == "_native":
        return _load_native()
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load_native() -> Any:
    try:
        return import_module(f"{__name__}._native")
    except ImportError as error:  # most often a checkout that shadows the installed package
        raise ImportError(
            f"'{__path__[0]}' has no compiled extension that loads. If it is a checkout, run from another "
            "folder, or install it in place with: pip install -e ."
        ) from error
