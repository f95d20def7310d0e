"""What a request passes before its route: where it comes from, its key, its length, and whether there are models."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspine_local.server.errors import ApiError
from dspine_local.server.state import ServerState

PUBLIC = ("/health", "/v1/health", "/models", "/v1/models")
PAGES = ("/", "/web/")  # the chat page, which asks for the key itself
_LOCAL_SUFFIXES = (".localhost", ".local", ".lan", ".internal")


class Gate:
    """Refuses with 403, 401, 413 and 503, in this order."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http":
            error = self._refusal(str(scope["path"]), Headers(scope=scope))
            if error is not None:
                await error.response()(scope, receive, send)
                return
            receive = self._limited(receive)
            # uvicorn sends no body to a HEAD request, whatever the route made of it.
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            scope = {**scope, "method": method, "headers": [_as_json(header) for header in scope["headers"]]}
        await self._app(scope, receive, send)

    def _limited(self, receive: Receive) -> Receive:
        """Counts bodies that do not tell their length; the route that reads too much is answered with 413."""
        limit, n_read = self._state.options.max_body_bytes, 0

        async def count() -> Message:
            nonlocal n_read
            message = await receive()
            n_read += len(message.get("body", b""))
            if n_read > limit:
                raise HTTPException(413, f"the request has more than {limit} bytes")
            return message

        return count

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        options = self._state.options
        if options.loopback and not options.api_keys and not is_local_name(headers.get("host", "")):
            return ApiError(403, "this server answers on this machine only, under its own name or address")
        if not options.api_keys and is_foreign(headers):
            return ApiError(403, "requests of web pages from elsewhere are refused")
        if path in PUBLIC or path == PAGES[0] or path.startswith(PAGES[1]):
            return None
        if options.api_keys and not has_key(headers, options.api_keys):
            return ApiError(401, "Invalid API Key")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > options.max_body_bytes:
            return ApiError(413, f"the request has {length} bytes, expected at most {options.max_body_bytes}")
        if self._state.error is not None:
            return ApiError(503, f"the models could not be loaded: {self._state.error}")
        return None if self._state.is_ready else ApiError(503, "Loading model")


def has_key(headers: Headers, keys: Sequence[str]) -> bool:
    """Whether one of the keys came along; takes the same time for any wrong one."""
    given = headers.get("authorization", "") or headers.get("x-api-key", "")
    scheme, _, rest = given.partition(" ")
    key = (rest.strip() if scheme.lower() == "bearer" else given).encode("latin-1")  # the bytes that came
    return sum(hmac.compare_digest(key, known.encode()) for known in keys) > 0  # no early end


def _as_json(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """``curl -d`` calls everything a form, others plain text; llama-server does not mind, and bodies are JSON."""
    return (header[0], b"application/json") if header[0] == b"content-type" else header


def is_foreign(headers: Headers) -> bool:
    """Whether a web page of another origin sent this; browsers say so, other clients send no Origin."""
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()


def is_local_name(host: str) -> bool:
    """Whether a Host header names this machine; a web page that renamed itself to 127.0.0.1 brings its own name."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]").rstrip(".").lower()
    if name in ("", "localhost") or name.endswith(_LOCAL_SUFFIXES) or "." not in name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
