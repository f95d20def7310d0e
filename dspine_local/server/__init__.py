"""The HTTP server: llama-server's and OpenAI's endpoints over one ``Engine`` (docs/server.md).

::

    app ── routes ── prompts, sampling (a request's fields -> engine options)
                 └── scheduler ── Engine
                 └── payloads (results -> JSON)
"""

from dspine_local.server.app import create_app
from dspine_local.server.config import ServerOptions

__all__ = ["ServerOptions", "create_app"]
