"""Local speculative decoding with DSpine block drafters on llama.cpp and GGUF."""

from __future__ import annotations

__version__ = "0.1.0"
