"""POST /completion: llama-server's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from dspine_local.generation import Generation
from dspine_local.options import GenerationOptions
from dspine_local.server.payloads import Provenance, probabilities, settings, stop_type, timings
from dspine_local.server.routes.common import (
    ERRORS,
    State,
    check_request,
    collect,
    in_thread,
    prompt_tokens,
    start,
    stream,
)
from dspine_local.server.sampling import generation_options
from dspine_local.server.scheduler import Answers, Event
from dspine_local.server.schemas import CompletionRequest
from dspine_local.server.state import ServerState

router = APIRouter(responses=ERRORS)


@router.post("/completion")
@router.post("/completions")
async def completion(request: Request, body: CompletionRequest, state: State) -> Response:
    """Continue a prompt: text, tokens, both mixed, or a list of such prompts."""
    check_request(body, state)
    tokenizer = state.engine.tokenizer
    prompts = await in_thread(lambda: prompt_tokens(body.prompt, tokenizer))
    n_probs = body.n_probs or None
    options = await in_thread(lambda: generation_options(body, state.options, tokenizer, n_probs=n_probs))
    options = replace(options, post_sampling_probs=body.post_sampling_probs is True)
    answers = await start(state, prompts, body.n_cmpl or body.n or 1, options)
    if body.stream:
        return stream(state, answers, _Stream(state, answers, body, options).describe, done=False)
    collected = await collect(request, answers)
    results = [
        _final(state, generation, i, events, body, options)
        for i, (generation, events) in enumerate(zip(answers.generations, collected, strict=True))
    ]
    return JSONResponse(results[0] if len(results) == 1 else results)


class _Stream:
    """An object per event, and a last one with all that is known."""

    def __init__(
        self, state: ServerState, answers: Answers, body: CompletionRequest, options: GenerationOptions
    ) -> None:
        self._state = state
        self._answers = answers
        self._body = body
        self._options = options
        self._provenance = [Provenance(state.engine.tokenizer) for _ in answers.generations]

    def describe(self, event: Event) -> list[dict[str, Any]]:
        generation = self._answers.generations[event.index]
        out: dict[str, Any] = {
            "index": event.index,
            "content": event.chunk.text,
            "tokens": list(event.chunk.tokens),
            "stop": False,
            "id_slot": generation.slot,
            "tokens_predicted": len(generation.tokens),
            "tokens_evaluated": len(generation.prompt_tokens),
        }
        if event.chunk.logprobs:
            out["completion_probabilities"] = probabilities(
                event.chunk, self._state.engine.tokenizer, post_sampling=self._options.post_sampling_probs
            )
        if self._body.return_provenance:
            out["provenance"] = self._provenance[event.index].of(event.chunk)
        if self._body.timings_per_token and generation.stats is not None:
            out["timings"] = timings(generation.stats)
        pieces = [out] if event.chunk.text or event.chunk.tokens else []
        if event.finish_reason is not None:
            last = _final(self._state, generation, event.index, [], self._body, self._options)
            pieces.append({**last, "content": "", "tokens": []})
        return pieces


def _final(
    state: ServerState,
    generation: Generation,
    index: int,
    events: Sequence[Event],
    body: CompletionRequest,
    options: GenerationOptions,
) -> dict[str, Any]:
    tokenizer = state.engine.tokenizer
    n_prompt, n_predicted = len(generation.prompt_tokens), len(generation.tokens)
    out: dict[str, Any] = {
        "index": index,
        "content": generation.text,
        "tokens": generation.tokens if body.return_tokens else [],
        "id_slot": generation.slot,
        "stop": True,
        "model": body.model or state.options.model_name,
        "tokens_predicted": n_predicted,
        "tokens_evaluated": n_prompt,
        "generation_settings": settings(options, stream=body.stream is True),
        "prompt": tokenizer.decode(generation.prompt_tokens),
        "has_new_line": "\n" in generation.text,
        "truncated": False,
        "stop_type": stop_type(generation),
        "stopping_word": generation.stop_text or "",
        "tokens_cached": n_prompt + max(0, n_predicted - 1),
    }
    if generation.stats is not None:
        out["timings"] = timings(generation.stats)
    if any(event.chunk.logprobs for event in events):
        out["completion_probabilities"] = [
            entry
            for e in events
            for entry in probabilities(e.chunk, tokenizer, post_sampling=options.post_sampling_probs)
        ]
    if body.return_provenance and events:
        provenance = Provenance(tokenizer)
        out["provenance"] = [entry for e in events for entry in provenance.of(e.chunk)]
    return out
