"""The rules of JSON schemas, by llama-cpp-python's converter and what it lacks."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from llama_cpp import llama_grammar

from dspine_local.grammar.forms import simplified
from dspine_local.grammar.integers import integer_bounds, integer_rule

JSON_OBJECT = {"type": "object"}
_MAX_SCHEMA_CHARS = 1 << 18
# The converter's strings may contain line breaks; JSON's may not.
_ANY_CHARACTER, _JSON_CHARACTER = 'char ::= [^"\\\\] |', 'char ::= [^"\\\\\\x7F\\x00-\\x1F] |'


class SchemaRules:
    """Rules of one or more JSON schemas, for one grammar."""

    def __init__(self) -> None:
        make: Any = _Converter
        self._converter: _ConverterMethods = make(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)

    def add(self, schema: Any, name: str = "") -> str:
        """Add a schema's rules; the name of the one that a value follows.

        Args:
            schema: JSON schema: a dict, or True for any object.
            name: Begins the names of its rules; empty for the only schema of a grammar, whose rule is ``root``.
        Raises:
            ValueError: Not a schema, or one that cannot be converted.
        """
        if schema is True or schema == {}:
            schema = JSON_OBJECT
        if not isinstance(schema, dict):
            raise ValueError(f"the JSON schema is {type(schema).__name__}, expected an object")
        try:
            if len(json.dumps(schema)) > _MAX_SCHEMA_CHARS:
                raise ValueError(f"the JSON schema is longer than {_MAX_SCHEMA_CHARS} characters")
            own = simplified(schema, f"{name}-" if name else "")  # a copy: the converter writes into it
            return self._converter.visit(self._converter.resolve_refs(own, name or "schema"), name)
        except RecursionError as error:
            raise ValueError("the JSON schema is nested too deeply") from error
        except (AssertionError, KeyError, TypeError, AttributeError, IndexError, re.error) as error:
            raise ValueError(f"the JSON schema cannot be converted: {error or type(error).__name__}") from error

    def text(self) -> str:
        """All rules as GBNF."""
        return self._converter.format_grammar().replace(_ANY_CHARACTER, _JSON_CHARACTER)


def schema_to_gbnf(schema: Any) -> str:
    """A grammar of the JSON values that a schema describes; see ``SchemaRules.add``."""
    rules = SchemaRules()
    rules.add(schema)
    return rules.text()


def literal(text: str) -> str:
    """A GBNF literal of the text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


class _ConverterMethods(Protocol):
    """What is used of llama-cpp-python's converter, which has no types."""

    def resolve_refs(self, schema: dict[str, Any], url: str) -> dict[str, Any]: ...
    def visit(self, schema: dict[str, Any], name: str) -> str: ...
    def format_grammar(self) -> str: ...


class _Converter(llama_grammar.SchemaConverter):
    """With bounds of integers, and with constants of any characters."""

    def visit(self, schema: dict[str, Any], name: str) -> str:
        converter: Any = super()
        if schema.get("type") == "integer":
            low, high = integer_bounds(schema)
            if low is not None or high is not None:
                rule = f"({integer_rule(low, high)}) space"
                return str(converter._add_rule(f"{name}-integer" if name else "root", rule))
        return str(converter.visit(schema, name))

    def _format_literal(self, text: str) -> str:
        """Of a constant or a property's name as JSON; a model writes letters as they are, not as escapes."""
        return literal(json.dumps(json.loads(text), ensure_ascii=False))
