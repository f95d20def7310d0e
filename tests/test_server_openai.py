"""The openai package, unchanged, against our server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_rig import RunningServer, open_engine, serving

pytestmark = pytest.mark.native

MESSAGES = [{"role": "user", "content": "Hello there."}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "pattern": "^[a-z]{1,5}$"}},
    "required": ["answer"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look it up.", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def server(tiny_pair: tuple[Path, Path]) -> Iterator[RunningServer]:
    with serving(open_engine(tiny_pair), api_keys=("secret",), aliases=("tiny",)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    assert model == "tiny"
    answer = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_completion_tokens=20)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage == answer.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 12
    assert all(entry.logprob < 0 and len(entry.top_logprobs) == 3 for entry in content)
    old = client.completions.create(model="tiny", prompt="Hello", temperature=0, max_tokens=6, logprobs=2)
    assert old.choices[0].logprobs is not None
    assert len(old.choices[0].logprobs.token_logprobs or []) == 6
    assert (old.choices[0].logprobs.text_offset or [])[0] == 0
    echoed = client.completions.create(model="tiny", prompt="Hello", temperature=0, max_tokens=6, echo=True)
    assert echoed.choices[0].text == "Hello" + old.choices[0].text
    with pytest.raises(openai.APIStatusError, match="echo together with logprobs") as refused:  # not a part of them
        client.completions.create(model="tiny", prompt="Hello", max_tokens=1, logprobs=2, echo=True)
    assert refused.value.status_code == 501


def test_tools_and_schemas(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required", seed=1, max_tokens=200
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    call = (answer.choices[0].message.tool_calls or [])[0]
    assert call.function.name == "look"
    assert set(json.loads(call.function.arguments)) == {"answer"}
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required", seed=1, max_tokens=200
    ) as stream:
        pieces = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        streamed = (stream.get_final_completion().choices[0].message.tool_calls or [])[0]
    assert streamed.function.arguments == "".join(pieces) == call.function.arguments
    follow_up = [
        *MESSAGES,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "42"},
    ]
    client.chat.completions.create(model="tiny", messages=follow_up, tools=TOOLS, max_tokens=4)
    shaped = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        seed=1,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
    )
    assert set(json.loads(shaped.choices[0].message.content or "")) == {"answer"}


def test_errors(client: openai.OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt="word " * 5000)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.completions.create(model="tiny", prompt="x")
