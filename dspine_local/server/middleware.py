"""What a request passes before its route: the host it asked for, its key, and whether the models are loaded."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dspine_local.server.errors import ApiError
from dspine_local.server.state import ServerState

PUBLIC = ("/health", "/v1/health")
PAGES = ("/", "/web/")  # the chat page, which asks for the key itself
_LOCAL_SUFFIXES = (".localhost", ".local", ".lan", ".internal")


class Gate:
    """Refuses with 403, 401 and 503, in this order."""

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
        await self._app(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        options = self._state.options
        if options.loopback and not options.api_keys and not is_local_name(headers.get("host", "")):
            return ApiError(403, "this server answers on this machine only, under its own name or address")
        if path in PUBLIC or path == PAGES[0] or path.startswith(PAGES[1]):
            return None
        if options.api_keys and not has_key(headers, options.api_keys):
            return ApiError(401, "Invalid API Key")
        if self._state.error is not None:
            return ApiError(503, f"the models could not be loaded: {self._state.error}")
        return None if self._state.is_ready else ApiError(503, "Loading model")


def has_key(headers: Headers, keys: Sequence[str]) -> bool:
    """Whether one of the keys came along; takes the same time for any wrong one."""
    given = headers.get("authorization", "") or headers.get("x-api-key", "")
    scheme, _, rest = given.partition(" ")
    key = (rest.strip() if scheme.lower() == "bearer" else given).encode("utf-8", "surrogateescape")
    return sum(hmac.compare_digest(key, known.encode()) for known in keys) > 0  # no early end


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
