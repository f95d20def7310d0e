"""POST /v1/completions: OpenAI's old completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from dspine_local.server.errors import ApiError
from dspine_local.server.payloads import (
    Json,
    Provenance,
    envelope,
    legacy_logprobs,
    new_id,
    now,
    probabilities,
    timings,
    usage,
)
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
from dspine_local.server.schemas import OpenAICompletionRequest
from dspine_local.server.state import ServerState

router = APIRouter(responses=ERRORS)


@router.post("/v1/completions")
async def completion(request: Request, body: OpenAICompletionRequest, state: State) -> Response:
    """Continue a prompt, or several."""
    check_request(body, state)
    if body.suffix:
        raise ApiError(501, "suffix is not supported")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(501, "best_of is not supported beyond n")
    if body.echo and body.logprobs is not None:
        raise ApiError(501, "echo together with logprobs is not supported: the prompt's tokens have none")
    tokenizer = state.engine.tokenizer
    prompts = await in_thread(lambda: prompt_tokens(body.prompt, tokenizer))
    n_probs = body.logprobs if body.logprobs is not None else body.n_probs or None
    options = await in_thread(lambda: generation_options(body, state.options, tokenizer, n_probs=n_probs))
    answers = await start(state, prompts, body.n or 1, options)
    describe = _Describe(state, answers, body, len(prompts))
    if body.stream:
        return stream(state, answers, describe.event)
    collected = await collect(request, answers)
    choices = [
        describe.choice(i, events, (tokenizer.decode(generation.prompt_tokens) if body.echo else "") + generation.text)
        for i, (generation, events) in enumerate(zip(answers.generations, collected, strict=True))
    ]
    return JSONResponse({**describe.head, "choices": choices, "usage": describe.usage(), **describe.timings(0)})


class _Describe:
    """The JSON of one request's answers."""

    def __init__(self, state: ServerState, answers: Answers, body: OpenAICompletionRequest, n_prompts: int) -> None:
        self._tokenizer = state.engine.tokenizer
        self._answers = answers
        self._body = body
        self._n_prompts = n_prompts
        self._n_open = len(answers.generations)
        self._offsets = [0] * len(answers.generations)
        self._provenance = [Provenance(self._tokenizer) for _ in answers.generations]
        self._echoed: set[int] = set()
        self.head = envelope("text_completion", body.model or state.options.model_name, new_id("cmpl"), now())

    def usage(self) -> Json:
        return usage(self._answers.generations, self._n_prompts)

    def timings(self, index: int) -> Json:
        stats = self._answers.generations[index].stats
        return {"timings": timings(stats)} if stats is not None else {}

    def choice(self, index: int, events: list[Event], text: str) -> Json:
        entries = [entry for e in events for entry in probabilities(e.chunk, self._tokenizer)]
        logprobs = legacy_logprobs(entries, self._offsets[index]) if entries else None
        self._offsets[index] += len(text)
        return {
            "text": text,
            "index": index,
            "logprobs": logprobs,
            "finish_reason": events[-1].finish_reason if events else None,
        }

    def event(self, event: Event) -> list[dict[str, Any]]:
        text = event.chunk.text
        generation = self._answers.generations[event.index]
        if self._body.echo and event.index not in self._echoed:
            self._echoed.add(event.index)
            text = self._tokenizer.decode(generation.prompt_tokens) + text
        out = {**self.head, "choices": [self.choice(event.index, [event], text)]}
        if self._body.return_provenance:
            out["provenance"] = self._provenance[event.index].of(event.chunk)
        last = event.finish_reason is not None
        self._n_open -= last
        if last or self._body.timings_per_token:
            out |= self.timings(event.index)
        pieces = [out] if text or last or event.chunk.logprobs or self._body.return_provenance else []
        options = self._body.stream_options
        if self._n_open == 0 and options is not None and options.include_usage:
            pieces.append({**self.head, "choices": [], "usage": self.usage()})
        return pieces
