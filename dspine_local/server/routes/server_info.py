"""Is it up, what does it serve, how busy has it been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from dspine_local.options import GenerationOptions
from dspine_local.server.errors import ApiError
from dspine_local.server.payloads import settings
from dspine_local.server.routes.common import ERRORS, State, in_thread, server_state
from dspine_local.server.state import ServerState

router = APIRouter(responses=ERRORS)


@router.get("/health")
@router.get("/v1/health")
async def health(request: Request) -> Response:
    """Answers while the models are loading, too: 503 until they are ready."""
    state = server_state(request)
    if state.error is not None:
        return ApiError(503, f"the models could not be loaded: {state.error}").response()
    if not state.is_ready:
        return ApiError(503, "Loading model").response()
    return JSONResponse({"status": "ok"})


@router.get("/props")
async def props(state: State) -> dict[str, Any]:
    """The server's settings."""
    options, engine = state.options, state.engine
    defaults = settings(GenerationOptions(max_tokens=options.n_predict, sampling=options.sampling), stream=False)
    return {
        "default_generation_settings": {"params": defaults, "n_ctx": engine.n_ctx, "speculative": engine.max_draft > 0},
        "total_slots": engine.n_slots,
        "model_alias": options.model_name,
        "model_path": options.model_path,
        "drafter_path": options.drafter_path,
        "n_draft": engine.n_draft,
        "n_draft_max": engine.max_draft,
        "strict": engine.exact_lengths is not None,
        "exact_draft_lengths": engine.exact_lengths,
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": options.endpoint_slots,
        "endpoint_metrics": options.endpoint_metrics,
        "endpoint_props": False,
        "chat_template": engine.tokenizer.chat_template or "",
        "bos_token": engine.tokenizer.bos_text,
        "eos_token": engine.tokenizer.eos_text,
        "build_info": f"dspine-local {_version()}",
        "is_sleeping": False,
    }


@router.get("/v1/models")
@router.get("/models")
async def models(state: State) -> dict[str, Any]:
    """The one model, in OpenAI's form."""
    return {"object": "list", "data": [_model(state)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, state: State) -> dict[str, Any]:
    """The model, by any of its names."""
    if not state.options.knows_model(name):
        raise ApiError(404, f"unknown model {name!r}, expected {state.options.model_name!r}")
    return _model(state)


@router.get("/metrics")
async def metrics(state: State) -> Response:
    """Counters for Prometheus."""
    if not state.options.endpoint_metrics:
        raise ApiError(501, "this server was started without the metrics endpoint")
    text = await in_thread(state.metrics.exposition)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _model(state: ServerState) -> dict[str, Any]:
    options, target = state.options, state.engine.target
    return {
        "id": options.model_name,
        "aliases": [name for name in options.aliases if name != "*"],
        "object": "model",
        "created": state.created,
        "owned_by": "dspine-local",
        "meta": {
            "n_vocab": target.n_vocab,
            "n_ctx": state.engine.n_ctx,
            "n_ctx_train": target.n_ctx_train,
            "n_embd": target.n_embd,
            "size": target.n_bytes,
            "description": target.description,
            "drafter": Path(options.drafter_path).name if options.drafter_path else None,
        },
    }


def _version() -> str:
    from dspine_local import __version__

    return __version__
