"""Tools in the two forms that models write: Hermes (JSON) and Qwen3.5 / Qwen3-Coder (XML-like).

Hermes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
Qwen: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``, values as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspine_local.grammar import DEFINITIONS, JSON_OBJECT, SchemaRules, literal

OPEN, CLOSE = "<tool_call>", "</tool_call>"

ToolStyle = Literal["hermes", "qwen"]

_FUNCTION = re.compile(r"^<function=([^>\n]+)>(.*?)(?:</function>)?$", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
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


def parse_call(block: str, tools: Sequence[dict[str, Any]]) -> ToolCall | None:
    """The call inside ``<tool_call>`` tags, in either form; None when it is neither."""
    block = block.strip()
    found = _FUNCTION.match(block)
    if found:
        name = found[1].strip()
        schemas = _parameters(name, tools).get("properties", {})
        arguments = {key.strip(): _value(text, schemas.get(key.strip())) for key, text in _PARAMETER.findall(found[2])}
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    given = call.get("arguments", call.get("parameters", {}))
    return ToolCall(call["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))


def calls_gbnf(tools: Sequence[dict[str, Any]], style: ToolStyle, *, parallel: bool) -> str:
    """A grammar of one call (or several) of one of the tools, and nothing else.

    Raises:
        ValueError: The parameters of a tool cannot be converted.
    """
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
    shared = {key: parameters[key] for key in DEFINITIONS if key in parameters}
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


def _parameters(name: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            parameters = tool["function"].get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


def _value(text: str, schema: Any) -> Any:
    """A parameter's text as the value that its schema wants: everything but text is JSON."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
