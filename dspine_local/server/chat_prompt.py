"""A chat request's messages and tools as a prompt, and the grammar that its answer must follow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dspine_local.chat.parser import END_THINK, THINK
from dspine_local.chat.tools import calls_gbnf, style_of, system_text
from dspine_local.grammar import JSON_OBJECT, schema_to_gbnf
from dspine_local.server.errors import ApiError, invalid
from dspine_local.server.schemas import ChatFields, ChatMessage, ChatRequest
from dspine_local.tokenizer import Tokenizer

_OWN_VARIABLES = ("messages", "bos_token", "eos_token", "add_generation_prompt", "tools")
# Text of the thinking, then its end: what precedes a constrained answer when the prompt has opened a block.
_THINKING_RULE = f'thinking ::= ([^<] | "<" [^/] | "</" [^t])* "{END_THINK}" [\\n]*'


@dataclass(frozen=True)
class ChatPrompt:
    """``thinking``: the prompt ends inside a reasoning block. ``tools``: those that may be called, else None."""

    text: str
    thinking: bool
    tools: list[dict[str, Any]] | None


def render(request: ChatFields, tokenizer: Tokenizer) -> ChatPrompt:
    """The prompt.

    Raises:
        ApiError: A message has content that a text model cannot read, or a field is wrong.
        ValueError: The template refuses the messages.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ApiError(501, "the model has no chat template: use /completion, or a GGUF with tokenizer.chat_template")
    messages = [_plain(message) for message in request.messages]
    tools = _allowed_tools(request)
    variables = dict(request.chat_template_kwargs or {})
    taken = [name for name in _OWN_VARIABLES if name in variables]
    if taken:
        raise invalid(f"chat_template_kwargs has {taken[0]!r}, which is the server's own")
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    if tools:
        if "tools" in template:
            variables["tools"] = tools
        else:
            messages = _with_system(messages, system_text(tools))
    prefill, opens = "", request.add_generation_prompt is not False
    if messages[-1]["role"] == "assistant" and len(messages) > 1:
        # It is continued, not answered: as in llama-server, behind the opening of an assistant's message.
        prefill, opens = messages.pop()["content"], True
    text = tokenizer.render_chat(messages, add_generation_prompt=opens, **variables)
    return ChatPrompt(text + prefill, (text + prefill).rstrip().endswith(THINK), tools)


def answer_gbnf(request: ChatRequest, prompt: ChatPrompt, tokenizer: Tokenizer) -> str:
    """The grammar that ``response_format`` or ``tool_choice`` ask for; empty without.

    Raises:
        ApiError: A field is wrong.
        ValueError: A schema cannot be converted.
    """
    schema = _response_schema(request.response_format)
    forced = prompt.tools if _forces_call(request.tool_choice) else None
    if schema is not None and forced:
        raise invalid("response_format and a tool_choice that forces a call contradict each other")
    if forced:
        parallel = request.parallel_tool_calls is True
        grammar = calls_gbnf(forced, style_of(tokenizer.chat_template or ""), parallel=parallel)
    elif schema is not None:
        grammar = schema_to_gbnf(schema)
    else:
        return ""
    if not prompt.thinking:
        return grammar
    lines = grammar.split("\n")
    renamed = [f"answer ::= {line[len('root ::= ') :]}" if line.startswith("root ::= ") else line for line in lines]
    return "\n".join(["root ::= thinking answer", _THINKING_RULE, *renamed])


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as templates want it: text content, arguments of calls as objects."""
    out = message.model_dump(exclude_none=True)
    out["content"] = _text(message.content)
    calls = []
    for call in message.tool_calls or []:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid("a message has a tool call without a function's name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {"arguments": arguments}
        calls.append({**call, "function": {**function, "arguments": arguments}})
    if calls:
        out["tool_calls"] = calls
    else:
        out.pop("tool_calls", None)
    return out


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        kind = part.get("type")
        if kind in ("text", "input_text", "refusal") and isinstance(part.get(kind.removeprefix("input_")), str):
            texts.append(part[kind.removeprefix("input_")])
        elif kind in ("image_url", "input_image", "image", "input_audio", "input_video", "video_url", "file"):
            raise invalid(f"a message has content of type {kind!r}, but the model reads text only")
        else:
            raise invalid(f"a message has content of type {kind!r}, expected 'text' with a text")
    return "\n".join(texts)


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _allowed_tools(request: ChatFields) -> list[dict[str, Any]] | None:
    choice = request.tool_choice
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise invalid(f"tool_choice = {choice!r}, expected none, auto, required or a function")
    if choice == "none" or not tools:
        if _forces_call(choice):
            raise invalid("tool_choice asks for a call, but there are no tools")
        return None
    if not isinstance(choice, dict):
        return tools
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if choice.get("type") != "function" or not chosen:
        raise invalid(f"tool_choice names the function {name!r}, which is not among the tools")
    return chosen


def _forces_call(choice: str | dict[str, Any] | None) -> bool:
    return choice == "required" or isinstance(choice, dict)


def _response_schema(response_format: dict[str, Any] | None) -> Any:
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        schema = response_format.get("schema")
        return JSON_OBJECT if schema is None else schema
    if kind == "json_schema":
        inner = response_format.get("json_schema") or response_format
        if not isinstance(inner, dict) or inner.get("schema") is None:
            raise invalid("response_format has type json_schema, but no schema")
        return inner["schema"]
    raise invalid(f"response_format has type {kind!r}, expected text, json_object or json_schema")
