"""Answers' text into content, reasoning and tool calls, however it is cut into pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dspine_local.chat.parser import AnswerParser
from dspine_local.chat.tools import calls_gbnf, parse_call, style_of
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
    calls = [{"name": d.call.name, "arguments": json.loads(d.call.arguments)} for d in deltas if d.call]
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


def test_values_of_qwens_parameters_follow_the_schema() -> None:
    block = "<function=weather><parameter=city>\n42\n</parameter><parameter=days>\n3\n</parameter></function>"
    call = parse_call(block, [WEATHER])
    assert call is not None
    assert json.loads(call.arguments) == {"city": "42", "days": 3}
    assert parse_call("[1]", []) is None
    assert parse_call('{"name": 5}', []) is None
    assert parse_call("[" * 100_000, []) is None


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
