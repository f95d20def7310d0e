"""Answers' text into content, reasoning and tool calls, however it is cut into pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dspine_local.chat.call_stream import CallStream
from dspine_local.chat.parser import AnswerParser
from dspine_local.chat.tools import calls_gbnf, style_of
from dspine_local.grammar import schema_to_gbnf
from dspine_local.server.middleware import is_local_name

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)


def parse(text: str, cuts: int, **options: Any) -> tuple[str, str, list[dict[str, Any]]]:
    """Content, reasoning and calls of a text that comes in pieces."""
    rng = random.Random(cuts)
    ends = sorted(rng.randint(0, len(text)) for _ in range(cuts))
    parser = AnswerParser(**options)
    deltas = []
    for begin, end in zip([0, *ends], [*ends, len(text)], strict=True):
        deltas += parser.feed(text[begin:end])
    deltas += parser.finish()
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.kind == "tool_call":
            calls.append({"name": delta.text, "arguments": ""})
        elif delta.kind == "arguments":
            calls[-1]["arguments"] += delta.text
    for call in calls:
        call["arguments"] = json.loads(call["arguments"])
    joined = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("content", "reasoning")}
    return joined["content"], joined["reasoning"], calls


CALL = {"name": "weather", "arguments": {"city": "Paris", "days": 2}}


@pytest.mark.parametrize("cuts", [0, 1, 2, 7, 40, 200])
@pytest.mark.parametrize("call", [HERMES, QWEN])
def test_all_parts_in_any_pieces(call: str, cuts: int) -> None:
    tools = [WEATHER]
    text = f"<think>\nHm, a < b.\n</think>\n\nLet me see.\n{call}\n{call}"
    assert parse(text, cuts, tools=tools) == ("Let me see.", "Hm, a < b.", [CALL, CALL])
    assert parse(call, cuts, tools=tools) == ("", "", [CALL])
    opened = f"\nHm.\n</think>\n\nYes {call}"
    assert parse(opened, cuts, tools=tools, thinking=True) == ("Yes", "Hm.", [CALL])


@pytest.mark.parametrize("cuts", [0, 3, 60])
def test_text_that_only_looks_like_it(cuts: int) -> None:
    for text in (
        "a <tool_cal b",
        "x < y <think> z",
        "<thinking about it",
        "<tool_call>no json</tool_call> and on",
        "<",
    ):
        assert parse(text, cuts, tools=[WEATHER]) == (text, "", [])
    assert parse(f"Use {HERMES}", cuts) == (f"Use {HERMES}", "", [])
    text = "<think>a</think>b"
    assert parse(text, cuts, reasoning=False) == (text, "", [])
    assert parse("<think>never ends", cuts) == ("", "never ends", [])
    assert parse('<tool_call>{"name": "weather", "arg', cuts, tools=[WEATHER])[2] == []


def whole_call(block: str) -> tuple[str | None, Any]:
    call = CallStream([WEATHER])
    arguments = call.feed(block) + call.end(closed=True)
    return call.name, json.loads(arguments) if arguments else None


def test_values_of_qwens_parameters_follow_the_schema() -> None:
    block = "<function=weather><parameter=city>\n42\n</parameter><parameter=days>\n3\n</parameter></function>"
    assert whole_call(block) == ("weather", {"city": "42", "days": 3})
    assert whole_call("<function=weather>\n</function>") == ("weather", {})
    assert whole_call("<function=other><parameter=x>NaN</parameter>") == ("other", {"x": "NaN"})


def test_calls_in_another_order_and_no_calls() -> None:
    assert whole_call('{"arguments": {"city": "}"}, "name": "weather"}') == ("weather", {"city": "}"})
    assert whole_call('{"name": "weather", "arguments": "{\\"days\\": 1}"}') == ("weather", {"days": 1})
    for block in ("[1]", '{"name": 5}', "[" * 100_000, '{"name": "\\x", "arguments": {}}', ""):
        assert whole_call(block) == (None, None)


@pytest.mark.parametrize("call", [HERMES, QWEN])
def test_arguments_come_as_they_are_written(call: str) -> None:
    """Name first, then pieces: never more than was written, and something before the end."""
    parser = AnswerParser(tools=[WEATHER])
    kinds = [[delta.kind for delta in parser.feed(character)] for character in call]
    told = [kind for piece in kinds for kind in piece]
    assert told[0] == "tool_call"
    assert told.count("arguments") >= 2
    n_before_the_end = len(call) - len("</tool_call>")
    assert ["arguments"] in kinds[: n_before_the_end - 10]


def test_braces_and_quotes_in_arguments() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "}\\"]{", "b": [{"c": {}}]}}</tool_call> and on'
    for cuts in (0, 5, 80):
        content, _, calls = parse(call, cuts, tools=[WEATHER])
        assert calls == [{"name": "f", "arguments": {"a": '}"]{', "b": [{"c": {}}]}}]
        assert content == "and on"


def test_style_comes_from_the_template() -> None:
    assert style_of("... <tool_call>\n<function=example> ...") == "qwen"
    assert style_of('... <tool_call>\n{"name": ...') == "hermes"


@pytest.mark.parametrize("style", ["hermes", "qwen"])
def test_definitions_of_two_tools_do_not_mix(style: Any) -> None:
    def tool(name: str, inner: dict[str, Any]) -> dict[str, Any]:
        parameters = {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/A"}},
            "required": ["a"],
            "$defs": {"A": inner},
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    grammar = calls_gbnf([tool("f", {"const": "one"}), tool("g", {"const": "two"})], style, parallel=False)
    assert grammar.count("one") == grammar.count("two") == 1
    assert sum(line.startswith("root ::= ") for line in grammar.split("\n")) == 1


def test_schemas_are_left_as_they_are() -> None:
    schema = {"$defs": {"A": {"type": "string"}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}
    before = json.dumps(schema)
    schema_to_gbnf(schema)
    assert json.dumps(schema) == before


def test_names_of_this_machine() -> None:
    for host in ("localhost:8080", "127.0.0.1", "[::1]:80", "192.168.1.5:8080", "myhost", "box.local:1", ""):
        assert is_local_name(host), host
    for host in ("evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example:80"):
        assert not is_local_name(host), host
