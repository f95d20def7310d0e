"""The application: routes, errors, the gate, and the models' loading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from dspine_local.engine import Engine
from dspine_local.server.config import ServerOptions
from dspine_local.server.errors import install_handlers
from dspine_local.server.middleware import Gate
from dspine_local.server.routes import chat, completion, openai_completion, server_info, slots, tokens
from dspine_local.server.state import ServerState

# Nothing from elsewhere, no inline scripts, and no page may frame this one.
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
WEB = Path(__file__).parent / "web"


def create_app(load: Callable[[], Engine], options: ServerOptions) -> FastAPI:
    """The ASGI application.

    Args:
        load: Makes the engine; called in a thread once the server has started. Until then requests get 503, and
            ``/health`` says so.
        options: See ``ServerOptions``.
    """
    state = ServerState(load, options)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(state.load())
        yield
        await loading
        state.close()

    app = FastAPI(
        title="dspine-local",
        description="llama-server's and OpenAI's endpoints for a GGUF target with a DSpine drafter.",
        lifespan=lifespan,
        strict_content_type=False,  # the gate keeps other web pages out
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = state
    for routes in (server_info, completion, openai_completion, chat, tokens, slots):
        app.include_router(routes.router)
    app.add_api_route("/", _page, include_in_schema=False)
    app.mount("/web", StaticFiles(directory=WEB), name="web")
    install_handlers(app)
    app.add_middleware(Gate, state=state)
    _describe_errors(app)
    return app


async def _page() -> FileResponse:
    return FileResponse(WEB / "index.html", headers={"Content-Security-Policy": _POLICY})


def _describe_errors(app: FastAPI) -> None:
    """Our document of the endpoints: wrong requests are answered with 400, never with FastAPI's 422."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        document = original()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document.get("components", {}).get("schemas", {}).pop(name, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
