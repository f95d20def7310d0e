"""JSON schemas as GBNF, by llama-cpp-python's converter; nothing is fetched."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from llama_cpp import llama_grammar

JSON_OBJECT = {"type": "object"}
_MAX_SCHEMA_CHARS = 1 << 18
_MAX_REPETITIONS = 2000  # llama.cpp's own bound
# The converter's strings may contain line breaks; JSON's may not.
_ANY_CHARACTER, _JSON_CHARACTER = 'char ::= [^"\\\\] |', 'char ::= [^"\\\\\\x7F\\x00-\\x1F] |'
_ROOT = "whole-schema"
DEFINITIONS = ("$defs", "definitions")


class _Converter(Protocol):
    """What is used of llama-cpp-python's converter, which has no types."""

    def resolve_refs(self, schema: dict[str, Any], url: str) -> dict[str, Any]: ...
    def visit(self, schema: dict[str, Any], name: str) -> str: ...
    def format_grammar(self) -> str: ...


class SchemaRules:
    """Rules of one or more JSON schemas, for one grammar."""

    def __init__(self) -> None:
        make: Any = llama_grammar.SchemaConverter
        self._converter: _Converter = make(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)

    def add(self, schema: Any, name: str = "") -> str:
        """Add a schema's rules; the name of the one that a value follows.

        Args:
            schema: JSON schema: a dict, or True for any object.
            name: Begins the names of its rules; empty for the only schema of a grammar, whose rule is ``root``.
        Raises:
            ValueError: Not a schema, or one that cannot be converted.
        """
        if schema is True:
            schema = JSON_OBJECT
        if not isinstance(schema, dict):
            raise ValueError(f"the JSON schema is {type(schema).__name__}, expected an object")
        try:
            text = json.dumps(schema)
            if len(text) > _MAX_SCHEMA_CHARS:
                raise ValueError(f"the JSON schema is longer than {_MAX_SCHEMA_CHARS} characters")
            _check_counts(schema)
            own = _without_root_reference(json.loads(text))  # a copy: the converter writes into it
            resolved = self._converter.resolve_refs(_name_definitions(own, name) if name else own, name or "schema")
            return self._converter.visit(resolved, name)
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


def _check_counts(node: Any) -> None:
    """The converter writes some repetitions out: refuse what would make a giant of a small schema."""
    if isinstance(node, dict):
        for key in ("minItems", "maxItems", "minLength", "maxLength"):
            count = node.get(key)
            if isinstance(count, int | float) and not 0 <= count <= _MAX_REPETITIONS:
                raise ValueError(f"the JSON schema has {key} = {count}, expected 0 to {_MAX_REPETITIONS}")
        for value in node.values():
            _check_counts(value)
    elif isinstance(node, list):
        for value in node:
            _check_counts(value)


def _without_root_reference(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema for a converter that neither knows ``#`` nor looks behind a reference at the root."""
    if _replace_reference(schema, "#", f"#/$defs/{_ROOT}"):
        inner = {key: value for key, value in schema.items() if key not in DEFINITIONS}
        schema.setdefault("$defs", {})[_ROOT] = inner
    seen = set()
    while isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        found: Any = schema
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
        schema = {**{key: schema[key] for key in DEFINITIONS if key in schema}, **found}
    return schema


def _replace_reference(node: Any, old: str, new: str) -> int:
    """How many there were, at any depth."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    count = sum(_replace_reference(value, old, new) for value in inner)
    if isinstance(node, dict) and node.get("$ref") == old:
        node["$ref"] = new
        count += 1
    return count


def _name_definitions(node: Any, prefix: str) -> Any:
    """The converter names rules by the last part of a reference: two schemas must not share one."""
    if isinstance(node, list):
        return [_name_definitions(value, prefix) for value in node]
    if not isinstance(node, dict):
        return node
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key in DEFINITIONS and isinstance(value, dict):
            out[key] = {f"{prefix}-{name}": _name_definitions(inner, prefix) for name, inner in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith(tuple(f"#/{d}/" for d in DEFINITIONS)):
            _, place, name = value.split("/", 2)
            out[key] = f"#/{place}/{prefix}-{name}"
        else:
            out[key] = _name_definitions(value, prefix)
    return out
