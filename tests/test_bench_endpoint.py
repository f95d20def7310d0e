"""Other servers: what is sent, how their timings are read, and what is said when they fail. Only on this machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bench_rig import completion, server

from dspine_local.bench.endpoint import Endpoint, connect, parse_completion, parse_endpoints
from dspine_local.bench.systems import Answer, Task
from dspine_local.checks import OptionError
from dspine_local.errors import BackendError

TASK = Task("chat", "Hi", (1, 2))
TIMINGS = {"prompt_n": 5, "prompt_ms": 50.0, "predicted_n": 21, "predicted_ms": 400.0}


def open_endpoint(url: str) -> Endpoint:
    return connect("other", url, max_tokens=21, temperature=0.0, seed=1)


def test_names_and_urls() -> None:
    found = parse_endpoints(["llama-server=http://127.0.0.1:8081/", "https://host:1/x/v1"])
    assert found == {"llama-server": "http://127.0.0.1:8081", "host:1": "https://host:1/x"}
    for wrong in ("llama-server", "x=ftp://h", "x=http://", "x=file:///etc/passwd", "http://h?key=1", "x=", ""):
        with pytest.raises(OptionError, match="expected NAME=URL"):
            parse_endpoints([wrong])
    for wrong_names in (["a=http://h", "a=http://i"], ["plain=http://h"], ["fixed:3=http://h"], ["auto=http://h"]):
        with pytest.raises(OptionError, match="a name that no other endpoint and no mode has"):
            parse_endpoints(wrong_names)


def test_llama_servers_timings_are_taken() -> None:
    timings = TIMINGS | {"draft_n": 30, "draft_n_accepted": 10}
    with server(lambda _: completion("Hello", timings=timings)) as (url, requests):
        answer = open_endpoint(url).answer(TASK)
    assert answer == Answer("Hello", 21, 20, 0.4, "timings", prefill_s=0.05, n_rounds=10)
    assert answer.tokens_per_second == pytest.approx(50.0)
    (request,) = requests
    assert request["messages"] == [{"role": "user", "content": "Hi"}]
    assert request | {"model": "the model", "max_tokens": 21, "temperature": 0.0, "seed": 1} == request
    assert request["cache_prompt"] is request["stream"] is False


def test_without_drafts_every_decode_gives_one_token() -> None:
    with server(lambda _: completion("Hello", timings=TIMINGS)) as (url, _):
        assert open_endpoint(url).answer(TASK).n_rounds == 20


def test_without_timings_the_wall_time_of_all_tokens_counts() -> None:
    with server(lambda _: completion("Hello", usage={"completion_tokens": 21})) as (url, _):
        answer = open_endpoint(url).answer(TASK)
    assert (answer.clock, answer.n_tokens, answer.n_timed) == ("wall", 21, 21)
    assert 0 < answer.timed_s < 60
    assert answer.prefill_s is answer.n_rounds is None


def test_reasoning_is_part_of_the_text() -> None:
    message = {"content": "4", "reasoning_content": "2 and 2: "}
    found = {"choices": [{"message": message}], "timings": TIMINGS}
    assert parse_completion("other", found, wall_s=1.0).text == "2 and 2: 4"
    message["content"] = None  # type: ignore[assignment]
    assert parse_completion("other", found, wall_s=1.0).text == "2 and 2: "


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"choices": []},
        {"choices": [{"message": None}], "timings": TIMINGS},
        completion("x"),
        completion("x", usage={}),
        completion("x", usage={"completion_tokens": -1}),
        completion("x", usage={"completion_tokens": True}),
        completion("x", timings={}),
        completion("x", timings=[1]),
        completion("x", timings=TIMINGS | {"predicted_ms": "fast"}),
        completion("x", timings=TIMINGS | {"predicted_ms": -1}),
        completion("x", timings=TIMINGS | {"predicted_n": 2.5}),
        {"choices": [{"message": {"content": 5}}], "timings": TIMINGS},
    ],
)
def test_answers_that_cannot_be_read_are_errors(found: dict[str, Any]) -> None:
    with pytest.raises(BackendError, match="the endpoint 'other' gave an answer that could not be read"):
        parse_completion("other", found, wall_s=1.0)


@pytest.mark.parametrize(
    ("reply", "status", "message"),
    [
        ({"error": "no such model"}, 400, r"refused .* with status 400: .*no such model"),
        (b"<html>", 200, "answered no JSON"),
        ([1], 200, "answered no JSON object"),
        (b"\xff", 200, "answered no JSON"),
    ],
)
def test_a_server_that_refuses_or_answers_nonsense(reply: Any, status: int, message: str) -> None:
    with server(lambda _: reply, status=status) as (url, _):
        endpoint = open_endpoint(url)
        with pytest.raises(BackendError, match=message) as error:
            endpoint.answer(TASK)
    assert "'other'" in str(error.value)


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [{"id": 5}]}, {"data": None}])
def test_a_server_without_models_is_none(models: Any) -> None:
    with server(json.dumps, models=models) as (url, _), pytest.raises(BackendError, match="names no model"):
        open_endpoint(url)


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server(json.dumps) as (url, _):
        assert open_endpoint(url).model == "the model"  # no proxy in between
    with pytest.raises(BackendError, match=r"the endpoint 'other' at .* failed: .*refused"):
        open_endpoint(url)
