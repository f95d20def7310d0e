"""Errors as llama-server and OpenAI's clients know them: ``{"error": {"code", "message", "type"}}``."""

from __future__ import annotations

import json
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dspine_local.errors import ContextLengthError, DSpineError

logger = logging.getLogger("dspine_local.server")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_MAX_DETAILS = 3


class ApiError(Exception):
    """An answer that is an error; ``extra`` are further fields of the error object."""

    def __init__(self, code: int, message: str, kind: str | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.code = code
        self.kind = kind or _TYPES.get(code, "server_error")
        self.extra = extra

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {"error": {"code": self.code, "message": str(self), "type": self.kind, **self.extra}}

    def response(self) -> Response:
        """The HTTP response; plain ASCII, since messages may quote any input."""
        content = json.dumps(self.body(), ensure_ascii=True)
        headers = {"WWW-Authenticate": "Bearer"} if self.code == 401 else None
        return Response(content, status_code=self.code, media_type="application/json", headers=headers)


def invalid(message: str) -> ApiError:
    """A request that says something wrong."""
    return ApiError(400, message)


def from_exception(error: Exception, *, n_prompt_tokens: int = 0, n_ctx: int = 0) -> ApiError:
    """What the engine raised, as an answer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), "exceed_context_size_error", n_prompt_tokens=n_prompt_tokens, n_ctx=n_ctx)
    if isinstance(error, UnicodeEncodeError):
        return invalid("a text of the request is not valid Unicode: it has half of a surrogate pair")
    if isinstance(error, ValueError):
        return invalid(str(error))
    if isinstance(error, DSpineError):
        return ApiError(500, str(error))
    logger.error("internal error", exc_info=error)
    return ApiError(500, "internal error; the server's log says more")


def install_handlers(app: FastAPI) -> None:
    """Every error that leaves a route becomes such an answer."""

    @app.exception_handler(ApiError)
    async def api_error(_request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def validation(_request: Request, error: RequestValidationError) -> Response:
        return invalid(_describe(error)).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = f"no such endpoint: {request.url.path}" if error.status_code == 404 else str(error.detail)
        return ApiError(error.status_code, message).response()

    @app.exception_handler(UnicodeEncodeError)
    async def unicode(_request: Request, error: UnicodeEncodeError) -> Response:
        return from_exception(error).response()

    @app.exception_handler(Exception)
    async def other(_request: Request, error: Exception) -> Response:
        return ApiError(500, f"internal error: {type(error).__name__}").response()


def _describe(error: RequestValidationError) -> str:
    parts = []
    for detail in error.errors()[:_MAX_DETAILS]:
        where = ".".join(str(step) for step in detail["loc"][1:])
        parts.append(f"{where}: {detail['msg']}" if where and detail["type"] != "json_invalid" else detail["msg"])
    return "; ".join(parts)
