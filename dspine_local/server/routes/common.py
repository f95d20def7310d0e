"""What the routes share: the server's state, starting answers, waiting for them, and streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import product
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dspine_local.generation import Generation
from dspine_local.options import GenerationOptions
from dspine_local.server.errors import ApiError, from_exception, invalid
from dspine_local.server.payloads import DONE, PING, event
from dspine_local.server.sampling import for_choice
from dspine_local.server.scheduler import Answers, Event
from dspine_local.server.schemas import MAX_PROMPTS, ErrorResponse, GenerationFields
from dspine_local.server.state import ServerState
from dspine_local.tokenizer import Tokenizer

ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in (400, 401, 403, 404, 405, 413, 500, 501, 503)
}

T = TypeVar("T")


def server_state(request: Request) -> ServerState:
    """The server's state, for ``Depends``."""
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(server_state)]


async def in_thread(work: Callable[[], T]) -> T:
    """Run work that takes long for the event loop: tokens, templates, grammars.

    Raises:
        ApiError: It failed.
    """
    try:
        return await run_in_threadpool(work)
    except Exception as error:
        raise from_exception(error) from error


def check_request(request: GenerationFields, state: ServerState) -> None:
    """What concerns no single endpoint. Raises ApiError."""
    if request.model and not state.options.knows_model(request.model):
        raise ApiError(
            404, f"unknown model {request.model!r}, expected {state.options.model_name!r} (or start with --alias)"
        )
    if request.id_slot is not None and not -1 <= request.id_slot < state.engine.n_slots:
        raise invalid(f"id_slot = {request.id_slot}, expected -1 to {state.engine.n_slots - 1}")


def prompt_tokens(prompt: str | dict[str, Any] | list[Any], tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts of a completion request: text, tokens, both mixed, or a list of such.

    Raises:
        ApiError: Something else.
    """
    if not isinstance(prompt, list):
        return [_one_prompt(prompt, tokenizer)]
    if not prompt:
        raise invalid("the prompt is empty")
    single = any(isinstance(part, int) for part in prompt)
    prompts = [prompt] if single else prompt
    if len(prompts) > MAX_PROMPTS:
        raise invalid(f"{len(prompts)} prompts, expected at most {MAX_PROMPTS}")
    return [_one_prompt(one, tokenizer) for one in prompts]


def _one_prompt(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt_string"), str):
        if prompt.get("multimodal_data"):
            raise invalid("the prompt has multimodal_data, but the model reads text only")
        return tokenizer.encode(prompt["prompt_string"])
    if not isinstance(prompt, list):
        raise invalid(f"a prompt is {type(prompt).__name__}, expected text or a list of tokens and texts")
    tokens: list[int] = []
    for i, part in enumerate(prompt):
        if isinstance(part, str):
            tokens += tokenizer.encode(part) if i == 0 else tokenizer.encode_plain(part, parse_special=True)
        elif isinstance(part, int) and not isinstance(part, bool) and abs(part) < 2**31:
            tokens.append(part)
        else:
            raise invalid(f"a prompt has {part!r}, expected tokens and texts")
    return tokens


async def start(
    state: ServerState, prompts: Sequence[list[int]], n_choices: int, options: GenerationOptions
) -> Answers:
    """Queue ``n_choices`` answers to each prompt. Raises ApiError; then none is queued."""

    def submit() -> list[Generation]:
        generations: list[Generation] = []
        try:
            for prompt, choice in product(prompts, range(n_choices)):
                generations.append(state.engine.generate(prompt, for_choice(options, choice)))
        except Exception as error:
            for generation in generations:
                generation.close()
            n_prompt = max(map(len, prompts))
            raise from_exception(error, n_prompt_tokens=n_prompt, n_ctx=state.engine.n_ctx) from error
        return generations

    # Shielded: a client that leaves now must not leave its requests behind.
    submitting = asyncio.ensure_future(run_in_threadpool(submit))
    try:
        return state.scheduler.watch(await asyncio.shield(submitting))
    except asyncio.CancelledError:
        submitting.add_done_callback(lambda task: _close_all(task, state))
        raise


def _close_all(task: asyncio.Future[list[Generation]], state: ServerState) -> None:
    if not task.cancelled() and task.exception() is None:
        state.scheduler.watch(task.result()).cancel()


async def collect(request: Request, answers: Answers) -> list[list[Event]]:
    """All events of each answer; ends them all when the client leaves. Raises ApiError."""
    collected: list[list[Event]] = [[] for _ in answers.generations]

    async def read() -> None:
        async for item in answers.events():
            if item is not None:
                collected[item.index].append(item)

    with answers:
        reading = asyncio.ensure_future(read())
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ApiError(499, "the client has left")
            await reading
        except ApiError:
            raise
        except Exception as error:
            raise from_exception(error) from error
        finally:
            for task in (reading, leaving):
                task.cancel()
    return collected


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def stream(
    state: ServerState, answers: Answers, describe: Callable[[Event], list[dict[str, Any]]], *, done: bool = True
) -> StreamingResponse:
    """Server-sent events of running answers.

    Args:
        describe: The JSON objects to send for an event; stateful, called in order.
        done: End with ``data: [DONE]``.
    """
    ping_s = state.options.ping_interval_s if state.options.ping_interval_s > 0 else None

    async def body() -> AsyncIterator[bytes]:
        try:
            async for item in answers.events(ping_s):
                if item is None:
                    yield PING
                    continue
                for data in describe(item):
                    yield event(data)
            if done:
                yield DONE
        except Exception as error:
            yield event(from_exception(error).body())

    return _AnswerStream(answers, body())


class _AnswerStream(StreamingResponse):
    """Ends the answers however the response ends, even before its body has begun."""

    def __init__(self, answers: Answers, body: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(body, media_type="text/event-stream", headers=headers)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._answers:
            await super().__call__(scope, receive, send)
