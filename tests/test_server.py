"""The server's endpoints and fields, over HTTP, on a tiny model with a drafter."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from server_rig import PROMPT, RunningServer, open_engine, serving, wait_for

from dspine_local import GREEDY, Engine
from dspine_local.server import ServerOptions

pytestmark = pytest.mark.native

CHAT = [{"role": "user", "content": "Hello there."}]


@pytest.fixture(scope="module")
def engine(tiny_pair: tuple[Path, Path]) -> Engine:
    return open_engine(tiny_pair, n_draft=3)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[RunningServer]:
    with serving(engine, drafter_path="drafter.gguf", aliases=("tiny", "small")) as running:
        yield running


def reference(tiny_pair: tuple[Path, Path], prompt: str, n: int) -> tuple[str, list[int]]:
    """Plain decoding's answer."""
    generation = open_engine(tiny_pair).generate(prompt, max_tokens=n, n_draft=0, sampling=GREEDY)
    return generation.read(), generation.tokens


def test_health_and_503_while_loading(engine: Engine) -> None:
    release = threading.Event()

    def load() -> Engine:
        release.wait()
        return engine

    server = RunningServer(load, ServerOptions(model_path="tiny.gguf"))
    try:
        wait_for(lambda: server.client.get("/health").status_code == 503)
        loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        assert server.client.get("/v1/health").json() == loading
        assert server.post("/completion", expect=503, prompt="x") == loading
        assert server.client.get("/").status_code == 200
        release.set()
        server.wait()
        assert server.client.get("/v1/health").json() == {"status": "ok"}
    finally:
        release.set()
        server.stop()


def test_a_model_that_does_not_load_is_told() -> None:
    def load() -> Engine:
        raise FileNotFoundError("no such file: 'x.gguf'")

    failed = threading.Event()
    server = RunningServer(load, ServerOptions(model_path="x.gguf"))
    server.state.when_failed = failed.set
    try:
        wait_for(lambda: server.state.error is not None)
        assert "x.gguf" in server.client.get("/health").json()["error"]["message"]
        assert server.post("/tokenize", expect=503, content="x")["error"]["type"] == "unavailable_error"
    finally:
        server.stop()


def test_completion_is_plain_decodings(server: RunningServer, tiny_pair: tuple[Path, Path]) -> None:
    text, tokens = reference(tiny_pair, PROMPT, 40)
    answer = server.post("/completion", prompt=PROMPT, n_predict=40, temperature=0, return_tokens=True)
    assert answer["content"] == text
    assert answer["tokens"] == tokens
    assert answer["tokens_predicted"] == 40
    assert answer["tokens_evaluated"] == len(server.state.engine.tokenizer.encode(PROMPT))
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert answer["id_slot"] in (0, 1)
    assert answer["generation_settings"]["temperature"] == 0
    times = answer["timings"]
    assert times["prompt_n"] + times["cache_n"] == answer["tokens_evaluated"]
    assert times["predicted_n"] == 40
    assert times["draft_n"] >= times["draft_n_accepted"] >= 0
    plain = server.post("/completion", prompt=PROMPT, n_predict=40, temperature=0, n_draft=0)
    assert plain["content"] == text
    assert "draft_n" not in plain["timings"]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_streams_join_to_the_whole(server: RunningServer, path: str) -> None:
    body: dict[str, Any] = {"temperature": 1.3, "seed": 7, "max_tokens": 120, "top_k": 0, "ignore_eos": True}
    body |= {"messages": CHAT} if "chat" in path else {"prompt": PROMPT}
    whole = server.post(path, **body)
    events = server.events(path, **body, return_provenance=True)
    if path == "/completion":
        assert "".join(event["content"] for event in events) == whole["content"]
        assert events[-1]["stop"] is True
    elif "chat" in path:
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    provenance = [token for event in events for token in event.get("provenance", [])]
    assert len(provenance) == 120
    times = [event["timings"] for event in events if "timings" in event][-1]
    assert sum(token["drafted"] for token in provenance) == times["draft_n_accepted"]


def test_stop_texts_may_straddle_tokens_and_blocks(server: RunningServer) -> None:
    whole = server.post("/completion", prompt=PROMPT, n_predict=60, temperature=0)["content"]
    for at in (3, 17, 31):
        stop = whole[at : at + 4]
        expected = whole[: whole.index(stop)]
        answer = server.post("/completion", prompt=PROMPT, n_predict=60, temperature=0, stop=[stop])
        assert answer["content"] == expected
        assert (answer["stop_type"], answer["stopping_word"]) == ("word", stop)
        streamed = server.events("/completion", prompt=PROMPT, n_predict=60, temperature=0, stop=stop)
        assert "".join(event["content"] for event in streamed) == expected
    wait_for(server.is_idle)


def test_probabilities_are_plain_decodings(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "n_predict": 30, "temperature": 0, "n_probs": 3, "cache_prompt": False}
    drafted = server.post("/completion", **body)["completion_probabilities"]
    plain = server.post("/completion", **body, n_draft=0)["completion_probabilities"]
    assert len(drafted) == len(plain) == 30
    for a, b in zip(drafted, plain, strict=True):
        assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-4)
        assert [top["id"] for top in a["top_logprobs"]] == [top["id"] for top in b["top_logprobs"]]
        assert bytes(a["bytes"]).decode("utf-8", "replace") == a["token"]
        assert a["top_logprobs"][0]["id"] == a["id"]
    streamed = [e for event in server.events("/completion", **body) for e in event.get("completion_probabilities", [])]
    assert [entry["id"] for entry in streamed] == [entry["id"] for entry in drafted]


def test_probabilities_behind_the_samplers(server: RunningServer) -> None:
    """As llama-server gives them: probabilities, of the tokens that are left."""
    body = {"prompt": PROMPT, "n_predict": 30, "temperature": 0.9, "top_k": 4, "seed": 6, "n_probs": 10}
    answer = server.post("/completion", **body, post_sampling_probs=True)
    assert answer["generation_settings"]["post_sampling_probs"] is True
    entries = answer["completion_probabilities"]
    streamed = server.events("/completion", **body, post_sampling_probs=True)
    assert [e["prob"] for event in streamed for e in event.get("completion_probabilities", [])] == [
        entry["prob"] for entry in entries
    ]
    assert len(entries) == 30
    for entry in entries:
        assert entry.keys() == {"id", "token", "bytes", "prob", "top_probs"}
        assert sum(top["prob"] for top in entry["top_probs"]) == pytest.approx(1, abs=1e-4)
        assert 1 <= len(entry["top_probs"]) <= 4


def test_several_prompts_and_choices(server: RunningServer) -> None:
    tokens = server.post("/tokenize", content="Hello")["tokens"]
    alone = [server.post("/completion", prompt=p, n_predict=12, temperature=0)["content"] for p in ("A b", tokens)]
    together = server.post("/completion", prompt=["A b", tokens], n_predict=12, temperature=0, n=2)
    assert [answer["content"] for answer in together] == [alone[0], alone[0], alone[1], alone[1]]
    assert [answer["index"] for answer in together] == [0, 1, 2, 3]
    chat = server.post("/v1/chat/completions", messages=CHAT, n=3, seed=5, temperature=1.5, max_tokens=16)
    contents = [choice["message"]["content"] for choice in chat["choices"]]
    assert len(set(contents)) == 3
    assert chat["usage"]["completion_tokens"] <= 48
    assert chat["usage"]["total_tokens"] == chat["usage"]["completion_tokens"] + chat["usage"]["prompt_tokens"]
    assert (
        len({e["choices"][0]["index"] for e in server.events("/v1/chat/completions", messages=CHAT, n=3, max_tokens=4)})
        == 3
    )


def test_the_next_turn_reads_nothing_again(server: RunningServer) -> None:
    """The same number of reused tokens with and without a drafter, all of the answer included."""
    for n_draft in (-1, 0):
        first = server.post(
            "/completion", prompt=f"{PROMPT} {n_draft}", n_predict=30, temperature=0, return_tokens=True
        )
        prompt = server.post("/tokenize", content=f"{PROMPT} {n_draft}", add_special=True)["tokens"]
        second = [*prompt, *first["tokens"], *server.post("/tokenize", content=" More.")["tokens"]]
        answer = server.post("/completion", prompt=second, n_predict=8, temperature=0, n_draft=n_draft)
        assert answer["timings"]["cache_n"] == len(prompt) + 29
        fresh = server.post("/completion", prompt=second, n_predict=8, temperature=0, cache_prompt=False)
        assert fresh["timings"]["cache_n"] == 0
        assert fresh["content"] == answer["content"]


def test_near_the_end_of_the_context(server: RunningServer) -> None:
    n_ctx = server.state.engine.n_ctx
    token = server.post("/tokenize", content="a")["tokens"][0]
    for left in (1, 9):
        answer = server.post("/completion", prompt=[token] * (n_ctx - left), temperature=0, ignore_eos=True)
        assert answer["stop_type"] == "limit"
        assert answer["tokens_predicted"] == left
    error = server.post("/completion", expect=400, prompt=[token] * n_ctx)["error"]
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (n_ctx, n_ctx)


def test_grammar_and_schema_hold(server: RunningServer) -> None:
    """A random model writes what the schema allows and nothing else, with drafts and at any temperature."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "tags", "ok"],
        "additionalProperties": False,
    }
    for seed in range(3):
        sampled = {"temperature": 1.2, "seed": seed, "max_tokens": 400}
        answer = server.post("/completion", prompt=PROMPT, json_schema=schema, **sampled)
        jsonschema.validate(json.loads(answer["content"]), schema)
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        chat = server.post("/v1/chat/completions", messages=CHAT, response_format=wanted, **sampled)
        jsonschema.validate(json.loads(chat["choices"][0]["message"]["content"]), schema)
    answer = server.post("/completion", prompt=PROMPT, grammar='root ::= "yes" | "no"', temperature=0)
    assert answer["content"] in ("yes", "no")
    assert answer["stop_type"] == "eos"


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ['q"\\\n', "é", {"z": [1]}, None]},
        {"type": "object", "properties": {'x"y': {"const": 1}, "a\\b": {"const": "\0"}}, "required": ['x"y', "a\\b"]},
        {"type": "integer", "minimum": 3, "maximum": 15},
        {"type": "integer", "exclusiveMinimum": -12, "exclusiveMaximum": 105.5},
        {"type": ["integer", "null"], "maximum": -7},
        {"type": "array", "items": {"minimum": 100, "type": "integer"}, "minItems": 2, "maxItems": 3},
        {"type": "array", "items": False},
        {"type": "array", "minItems": 1, "maxItems": 1},
        {"prefixItems": [{"enum": [1]}, {"enum": ["b"]}], "items": False},
        {"type": "object", "properties": {"a": True, "b": {}}, "required": ["a", "b"], "additionalProperties": False},
        {"type": "string", "pattern": r"^\d{3}-\w{1,4}\.(?:a|b)[^,]?\S{0,3}.{0,3}$"},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"allOf": [{"$ref": "#/$defs/kind of"}], "$defs": {"kind of": {"enum": ["a", "b"]}}},
        {
            "type": "array",
            "items": {"$ref": "#/definitions/a~1b%25"},
            "maxItems": 2,
            "definitions": {"a/b%": {"const": 7}},
        },
        {"title": "anything"},
    ],
)
def test_schemas_hold(server: RunningServer, schema: dict[str, Any]) -> None:
    """Kinds that converters get wrong; a random model tries to."""
    n_whole = 0
    for seed in range(6):
        asked = {"temperature": 1.3, "seed": seed, "max_tokens": 120}
        answer = server.post("/completion", prompt=PROMPT, json_schema=schema, **asked)
        if answer["stop_type"] != "limit":
            jsonschema.validate(json.loads(answer["content"]), schema)
            n_whole += 1
    assert n_whole


@pytest.mark.parametrize("at", ["$defs", "root"])
def test_recursive_schemas_hold(server: RunningServer, at: str) -> None:
    """As pydantic writes a recursive model, and as OpenAI's documentation does."""
    place = "#" if at == "root" else "#/$defs/Node"
    node = {
        "type": "object",
        "properties": {"name": {"enum": ["a", "b"]}, "child": {"anyOf": [{"$ref": place}, {"type": "null"}]}},
        "required": ["name", "child"],
        "additionalProperties": False,
    }
    schema = node if at == "root" else {"$defs": {"Node": node}, "$ref": place}
    depths = set()
    for seed in range(8):
        asked = {"temperature": 1.5, "seed": seed, "max_tokens": 600, "logit_bias": [["{", 2]]}
        answer = server.post("/completion", prompt=PROMPT, json_schema=schema, **asked)
        if answer["stop_type"] == "limit":
            continue
        value = json.loads(answer["content"])
        jsonschema.validate(value, schema)
        depths.add(answer["content"].count("name"))
    assert max(depths) > 1


def test_texts_of_digits_in_logit_bias(server: RunningServer) -> None:
    """A list has ids as numbers; its texts are texts. Keys of an object are texts either way: digits are ids."""

    def biased(bias: object) -> list[tuple[int, float]]:
        answer = server.post("/completion", prompt=PROMPT, n_predict=1, logit_bias=bias)
        return [(entry["token"], entry["bias"]) for entry in answer["generation_settings"]["logit_bias"]]

    digit = server.post("/tokenize", content="5")["tokens"]
    assert biased([["5", 1.5]]) == [(token, 1.5) for token in digit]
    assert biased({"5": 1.5}) == biased([[5, 1.5]]) == [(5, 1.5)]
    assert biased({"1_0": 1.5}) == [(token, 1.5) for token in server.post("/tokenize", content="1_0")["tokens"]]
    assert biased([[5, False]]) == [(5, -1e9)]


def test_forced_tool_calls(server: RunningServer) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,6}$"}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("weather", "sun")]
    only_sun = {"type": "function", "function": {"name": "sun"}}
    for choice, seed, names in (("required", 0, ("weather", "sun")), (only_sun, 1, ("sun",))):
        body = {"messages": CHAT, "tools": tools, "tool_choice": choice, "seed": seed, "max_tokens": 400}
        answer = server.post("/v1/chat/completions", **body)["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)
        chunks = server.events("/v1/chat/completions", **body)
        first, *pieces = [c for e in chunks for c in e["choices"][0]["delta"].get("tool_calls", [])]
        assert first["function"] == {"name": call["function"]["name"], "arguments": ""}
        assert {piece["index"] for piece in (first, *pieces)} == {0}
        assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
        assert len(pieces) > 1
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_usage_in_streams_only_when_asked_for(server: RunningServer) -> None:
    for path, body in (("/v1/chat/completions", {"messages": CHAT}), ("/v1/completions", {"prompt": "A"})):
        plain = server.events(path, max_tokens=5, **body)
        assert all(event["choices"] and "usage" not in event for event in plain)
        last = server.events(path, max_tokens=5, stream_options={"include_usage": True}, **body)[-1]
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 5


def test_tokens_and_templates(server: RunningServer) -> None:
    text = "Grüße, 世界! 🙂"
    tokens = server.post("/tokenize", content=text)["tokens"]
    assert server.post("/detokenize", tokens=tokens)["content"] == text
    assert server.post("/tokenize", content=[text, 5, "a"])["tokens"] == [
        *(*tokens, 5),
        *server.post("/tokenize", content="a")["tokens"],
    ]
    assert server.post("/tokenize") == {"tokens": []}
    assert server.post("/detokenize") == {"content": ""}
    pieces = server.post("/tokenize", content=text, with_pieces=True)["tokens"]
    joined = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert joined.decode() == text
    prompt = server.post("/apply-template", messages=[{"role": "system", "content": "S"}, *CHAT])["prompt"]
    assert prompt.index("S") < prompt.index("Hello there.")
    assert prompt.endswith("<|im_start|>assistant\n")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello there."}]}]
    assert server.post("/apply-template", messages=parts) == server.post("/apply-template", messages=CHAT)
    continued = server.post("/apply-template", messages=[*CHAT, {"role": "assistant", "content": "Once"}])["prompt"]
    assert continued.endswith("assistant\nOnce")
    same = {"messages": [*CHAT, {"role": "assistant", "content": "Once"}], "add_generation_prompt": False}
    assert server.post("/apply-template", **same)["prompt"] == continued


def test_information(server: RunningServer) -> None:
    props = server.client.get("/props").json()
    assert (props["total_slots"], props["n_draft"], props["n_draft_max"]) == (2, 3, 3)
    assert props["default_generation_settings"]["n_ctx"] == 1024
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert server.client.get("/v1/models/small").json() == model
    assert server.client.get("/v1/models/gpt-9").json()["error"]["type"] == "not_found_error"


def test_model_names(server: RunningServer) -> None:
    for name in ("tiny", "small", "tiny.gguf", None, ""):
        server.post("/v1/completions", prompt="A", max_tokens=1, model=name)
    error = server.post("/v1/chat/completions", expect=404, messages=CHAT, model="gpt-9")["error"]
    assert error["type"] == "not_found_error"
    assert "gpt-9" in error["message"]


def test_closed_endpoints(engine: Engine) -> None:
    with serving(engine, endpoint_slots=False, endpoint_metrics=False, aliases=("*",)) as running:
        for path in ("/slots", "/metrics"):
            response = running.client.get(path)
            assert response.status_code == 501
            assert response.json()["error"]["type"] == "not_supported_error"
        assert running.post("/v1/completions", prompt="A", max_tokens=1, model="any")["model"] == "any"
