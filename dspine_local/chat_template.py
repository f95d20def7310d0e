"""Chat messages to a prompt by the model's own Jinja template, in a sandbox: templates come with downloaded files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's filter, which unlike Jinja's leaves HTML's characters alone and takes these arguments."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """``{% generation %}`` marks what a model is trained to write; in a prompt it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - as its base has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def render_chat(
    template: str,
    messages: Sequence[Message],
    /,
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Render messages as Hugging Face's ``apply_chat_template`` would.

    Args:
        template: Jinja source, as in the GGUF key ``tokenizer.chat_template``.
        messages: Dicts with ``role`` and ``content``, oldest first.
        bos_token: Text of the model's beginning-of-sequence token.
        eos_token: Text of its end-of-sequence token.
        add_generation_prompt: End with the beginning of the assistant's answer.
        variables: Further values for the template, such as ``tools``.
    Raises:
        ValueError: The template is not valid, or refuses the messages.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    values = {
        **variables,
        "messages": messages,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return environment.from_string(template).render(values)  # a dict: a keyword could be jinja2's own, as self
    except (TemplateError, TypeError, ArithmeticError, LookupError) as error:
        raise ValueError(f"the model's chat template failed: {error}") from error
