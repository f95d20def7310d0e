"""Tools in the two forms that models write: Hermes (JSON) and Qwen3.5 / Qwen3-Coder (XML-like).

Hermes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
Qwen: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``, values as plain text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspine_local.grammar import JSON_OBJECT, SchemaRules, literal

OPEN, CLOSE = "<tool_call>", "</tool_call>"

ToolStyle = Literal["hermes", "qwen"]

_SYSTEM = """You may call functions to help with the user's request. These are the functions, one JSON object per line:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as a JSON object inside these tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote; ``arguments`` is JSON text."""

    name: str
    arguments: str


def style_of(template: str) -> ToolStyle:
    """How a model with this chat template writes its calls."""
    return "qwen" if "<function=" in template else "hermes"


def system_text(tools: Sequence[dict[str, Any]]) -> str:
    """Tells a model whose template knows no tools about them, in Hermes' form."""
    return _SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def parse_json_call(block: str) -> ToolCall | None:
    """The call of a whole block in Hermes' form, whatever the order of its keys; None when it is none."""
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    given = call.get("arguments", call.get("parameters", {}))
    return ToolCall(call["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))


def properties(name: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Schemas of a tool's parameters, by name; empty where it does not tell."""
    for tool in tools:
        if tool["function"]["name"] == name:
            parameters = tool["function"].get("parameters")
            found = parameters.get("properties") if isinstance(parameters, dict) else None
            return found if isinstance(found, dict) else {}
    return {}


def parameter_value(text: str, schema: Any) -> Any:
    """A parameter's text in Qwen's form as the value that its schema wants: everything but text is JSON."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def calls_gbnf(tools: Sequence[dict[str, Any]], style: ToolStyle, *, parallel: bool) -> str:
    """A grammar of one call (or several) of one of the tools, and nothing else.

    Raises:
        ValueError: The parameters of a tool cannot be converted.
    """
    for function in (tool["function"] for tool in tools):
        if (function.get("parameters") or JSON_OBJECT).get("type", "object") != "object":
            raise ValueError(f"the parameters of the function {function['name']!r} are not a JSON schema of an object")
    rules = SchemaRules()
    make = _qwen_rules if style == "qwen" else _hermes_rules
    lines = [make(rules, f"tool{i}", tool["function"]) for i, tool in enumerate(tools)]
    alternatives = " | ".join(f"tool{i}-call" for i in range(len(tools)))
    call = f'call ::= {literal(OPEN)} "\\n"? ({alternatives}) "\\n"? {literal(CLOSE)}'
    root = 'root ::= call ("\\n"? call)*' if parallel else "root ::= call"
    return "\n".join([root, call, *lines, rules.text()])


def _hermes_rules(rules: SchemaRules, rule: str, function: dict[str, Any]) -> str:
    head = literal('{"name": ' + json.dumps(function["name"]) + ', "arguments": ')
    value = rules.add(function.get("parameters") or JSON_OBJECT, rule)
    return f"{rule}-call ::= {head} {value} {literal('}')}"


def _qwen_rules(rules: SchemaRules, rule: str, function: dict[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ValueError(f"the parameters of the function {function['name']!r} are not a JSON schema of an object")
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    lines = [f'{rule}-text ::= ([^<] | "<" [^/])*']
    parts = [literal(f"<function={function['name']}>\n")]
    for i, (key, schema) in enumerate(properties.items()):
        plain = isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema
        value = f"{rule}-text" if plain else rules.add(_with(schema, shared), f"{rule}-value{i}")
        parts.append(f"{rule}-part{i}" if key in required else f"{rule}-part{i}?")
        head, tail = literal(f"<parameter={key}>\n"), literal("\n</parameter>\n")
        lines.append(f"{rule}-part{i} ::= {head} {value} {tail}")
    return "\n".join([f"{rule}-call ::= {' '.join(parts)} {literal('</function>')}", *lines])


def _with(schema: Any, shared: dict[str, Any]) -> Any:
    return {**schema, **shared} if isinstance(schema, dict) else schema


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
