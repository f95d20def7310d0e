"""POST /v1/chat/completions: OpenAI's chat, with reasoning and tools split off the model's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from dspine_local.chat.parser import AnswerParser, Delta
from dspine_local.options import GenerationOptions
from dspine_local.server.chat_prompt import ChatPrompt, answer_gbnf, render
from dspine_local.server.errors import invalid
from dspine_local.server.payloads import Json, Provenance, envelope, new_id, now, probabilities, timings, usage
from dspine_local.server.routes.common import ERRORS, State, check_request, collect, in_thread, start, stream
from dspine_local.server.sampling import generation_options
from dspine_local.server.scheduler import Answers, Event
from dspine_local.server.schemas import ChatRequest
from dspine_local.server.state import ServerState

router = APIRouter(responses=ERRORS)

MAX_TOP_LOGPROBS = 20


@router.post("/v1/chat/completions")
@router.post("/chat/completions")
async def chat(request: Request, body: ChatRequest, state: State) -> Response:
    """Answer a conversation."""
    check_request(body, state)
    n_probs = _n_probs(body)

    def prepare() -> tuple[ChatPrompt, list[int], GenerationOptions]:
        tokenizer = state.engine.tokenizer
        prompt = render(body, tokenizer)
        grammar = answer_gbnf(body, prompt, tokenizer)
        options = generation_options(body, state.options, tokenizer, n_probs=n_probs, grammar=grammar)
        return prompt, tokenizer.encode(prompt.text), options

    prompt, tokens, options = await in_thread(prepare)
    answers = await start(state, [tokens], body.n or 1, options)
    describe = _Describe(state, answers, body, prompt)
    if body.stream:
        return stream(state, answers, describe.event)
    collected = await collect(request, answers)
    choices = [describe.choice(i, events) for i, events in enumerate(collected)]
    return JSONResponse({**describe.head("chat.completion"), "choices": choices, **describe.sums()})


def _n_probs(body: ChatRequest) -> int | None:
    n_top = body.top_logprobs or 0
    if n_top > MAX_TOP_LOGPROBS:
        raise invalid(f"top_logprobs = {n_top}, expected 0 to {MAX_TOP_LOGPROBS}")
    if n_top and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true")
    return n_top if body.logprobs else None


class _Describe:
    """The JSON of one request's answers."""

    def __init__(self, state: ServerState, answers: Answers, body: ChatRequest, prompt: ChatPrompt) -> None:
        self._tokenizer = state.engine.tokenizer
        self._answers = answers
        self._body = body
        self._id, self._created = new_id("chatcmpl"), now()
        self._model = body.model or state.options.model_name
        self._n_open = len(answers.generations)
        self._begun: set[int] = set()
        self._provenance = [Provenance(self._tokenizer) for _ in answers.generations]
        self._parsers = [
            AnswerParser(
                reasoning=body.reasoning_format != "none",
                thinking=prompt.thinking,
                tools=prompt.tools if body.parse_tool_calls is not False else None,
            )
            for _ in answers.generations
        ]

    def head(self, kind: str) -> Json:
        return envelope(kind, self._model, self._id, self._created)

    def sums(self) -> Json:
        stats = self._answers.generations[0].stats
        return {"usage": usage(self._answers.generations), **({"timings": timings(stats)} if stats else {})}

    def choice(self, index: int, events: Sequence[Event]) -> Json:
        """A whole answer."""
        parser = self._parsers[index]
        deltas = [*parser.feed(self._answers.generations[index].text), *parser.finish()]
        message: Json = {"role": "assistant", "content": _joined(deltas, "content")}
        reasoning = _joined(deltas, "reasoning")
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = _whole_calls(deltas)
        if calls:
            message["tool_calls"] = calls
            message["content"] = message["content"] or None
        out: Json = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(events),
            "finish_reason": self._finish_reason(index, events[-1].finish_reason),
        }
        if self._body.return_provenance:
            out["provenance"] = [entry for e in events for entry in self._provenance[index].of(e.chunk)]
        return out

    def event(self, event: Event) -> list[Json]:
        """Chunks of a stream."""
        parser = self._parsers[event.index]
        deltas: list[Json] = []
        if event.index not in self._begun:
            self._begun.add(event.index)
            deltas.append({"role": "assistant", "content": None})
        n_calls = parser.n_calls
        parsed = parser.feed(event.chunk.text)
        if event.finish_reason is not None:
            parsed += parser.finish()
        for delta in parsed:
            if delta.kind == "tool_call":
                deltas.append({"tool_calls": [{"index": n_calls, **_new_call(delta.text)}]})
                n_calls += 1
            elif delta.kind == "arguments":
                deltas.append({"tool_calls": [{"index": n_calls - 1, "function": {"arguments": delta.text}}]})
            else:
                deltas.append({"content" if delta.kind == "content" else "reasoning_content": delta.text})
        chunks = [self._chunk(event.index, delta) for delta in deltas]
        self._extend(chunks, event)
        if event.finish_reason is not None:
            chunks += self._last(event)
        return chunks

    def _extend(self, chunks: list[Json], event: Event) -> None:
        """Put what belongs to the event's tokens into its last chunk."""
        extra: Json = {}
        if self._body.return_provenance:
            extra["provenance"] = self._provenance[event.index].of(event.chunk)
        stats = self._answers.generations[event.index].stats
        if self._body.timings_per_token and stats is not None:
            extra["timings"] = timings(stats)
        if not chunks and (extra or event.chunk.logprobs):
            chunks.append(self._chunk(event.index, {}))
        if chunks:
            chunks[-1].update(extra)
            if event.chunk.logprobs:
                chunks[-1]["choices"][0]["logprobs"] = self._logprobs([event])

    def _last(self, event: Event) -> list[Json]:
        self._n_open -= 1
        last = self._chunk(event.index, {}, self._finish_reason(event.index, event.finish_reason))
        sums = self.sums()
        if self._n_open == 0 and "timings" in sums:
            last["timings"] = sums["timings"]
        options = self._body.stream_options
        if self._n_open == 0 and options is not None and options.include_usage:
            return [last, {**self.head("chat.completion.chunk"), "choices": [], "usage": sums["usage"]}]
        return [last]

    def _chunk(self, index: int, delta: Json, finish_reason: str | None = None) -> Json:
        choice: Json = {"index": index, "delta": delta, "finish_reason": finish_reason}
        return {**self.head("chat.completion.chunk"), "choices": [choice]}

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._parsers[index].n_calls else reason

    def _logprobs(self, events: Sequence[Event]) -> Json | None:
        entries = [entry for e in events for entry in probabilities(e.chunk, self._tokenizer)]
        return {"content": entries, "refusal": None} if entries else None


def _joined(deltas: Sequence[Delta], kind: str) -> str:
    return "".join(delta.text for delta in deltas if delta.kind == kind)


def _new_call(name: str) -> dict[str, Any]:
    return {"id": new_id("call"), "type": "function", "function": {"name": name, "arguments": ""}}


def _whole_calls(deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.kind == "tool_call":
            calls.append(_new_call(delta.text))
        elif delta.kind == "arguments":
            calls[-1]["function"]["arguments"] += delta.text
    return calls
