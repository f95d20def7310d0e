"""JSON schemas in the few forms that llama-cpp-python's converter knows; the meaning stays."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from dspine_local.grammar.patterns import supported_pattern

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_ANY = {"type": "value"}  # the converter's own name for any JSON value
_MAX_REPETITIONS = 2000  # llama.cpp's own bound
# Everything else says nothing that a grammar could hold.
_KEPT = (
    *("type", "format", "const", "enum", "anyOf", "oneOf", "allOf", "pattern", "minLength", "maxLength"),
    *("properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
)


def simplified(schema: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The same schema for the converter: references named ``prefix`` and a number, none at the root.

    Raises:
        ValueError: Not a schema, or one that has what no grammar can hold.
    """
    return _Simplifier(schema, prefix).root()


class _Simplifier:
    def __init__(self, schema: dict[str, Any], prefix: str) -> None:
        self._whole = schema
        self._prefix = prefix
        self._names: dict[str, str] = {}
        self._definitions: dict[str, dict[str, Any]] = {}

    def root(self) -> dict[str, Any]:
        root = self._schema(self._whole)
        seen: set[str] = set()
        while "$ref" in root:
            name = root["$ref"].rsplit("/", 1)[1]
            if name in seen:
                raise ValueError("the JSON schema is a reference to itself")
            seen.add(name)
            root = self._definitions[name]
        return {**root, "$defs": self._definitions} if self._definitions else root

    def _schema(self, node: Any) -> dict[str, Any]:
        if node is True:
            return dict(_ANY)
        if not isinstance(node, dict):
            raise ValueError(f"the JSON schema has {node!r:.40} where a schema of possible values belongs")
        if "$ref" in node:
            return self._reference(node["$ref"])
        out = {key: value for key, value in node.items() if key in _KEPT}
        all_of = out.get("allOf")
        if isinstance(all_of, list) and len(all_of) == 1 and isinstance(all_of[0], dict):
            del out["allOf"]
            return self._schema({**out, **all_of[0]})
        for key in ("anyOf", "oneOf"):
            if key in out:
                return {key: self._list(key, out[key])}
        if "const" in out or "enum" in out:
            return {key: out[key] for key in ("const", "enum") if key in out}
        if isinstance(out.get("type"), list):
            return {"anyOf": [self._schema({**out, "type": kind}) for kind in out["type"]]}
        if "type" in out and out["type"] not in _TYPES:
            raise ValueError(f"the JSON schema has type = {out['type']!r}, expected one of {', '.join(_TYPES)}")
        self._object(out)
        array = self._array(out)
        if "pattern" in out and out.get("type", "string") == "string":
            out["pattern"] = supported_pattern(_need(out["pattern"], str, "pattern"))
        for low, high in (("minItems", "maxItems"), ("minLength", "maxLength")):
            _check_counts(out, low, high)
        return array or out or dict(_ANY)

    def _object(self, out: dict[str, Any]) -> None:
        properties = _need(out.get("properties", {}), dict, "properties")
        for name in properties:
            if name in ("", "*"):
                raise ValueError(f"the JSON schema has a property named {name!r}, which cannot be converted")
        if "properties" in out:
            out["properties"] = {name: self._schema(value) for name, value in properties.items()}
        if "required" in out:
            out["required"] = [_need(name, str, "required") for name in _need(out["required"], list, "required")]
        others = out.get("additionalProperties")
        if isinstance(others, dict) or (others is True and properties):
            out["additionalProperties"] = self._schema(others)
        if "allOf" in out:
            out["allOf"] = self._list("allOf", out["allOf"])
            if properties:
                out["allOf"].append({"properties": out.pop("properties"), "required": out.pop("required", [])})

    def _array(self, out: dict[str, Any]) -> dict[str, Any] | None:
        """Another schema in place of this one, if it needs one."""
        if isinstance(out.get("items"), list):
            out["prefixItems"] = out.pop("items")
        if "prefixItems" in out:
            out["prefixItems"] = self._list("prefixItems", out["prefixItems"])
            out.pop("items", None)
        elif out.get("items") is False:
            return {"const": []}
        elif "items" in out or (out.get("type") == "array" and ("minItems" in out or "maxItems" in out)):
            out["items"] = self._schema(out.get("items", True))
        return None

    def _list(self, key: str, nodes: Any) -> list[dict[str, Any]]:
        found = [self._schema(node) for node in _need(nodes, list, key)]
        if not found:
            raise ValueError(f"the JSON schema has an empty {key}")
        return found

    def _reference(self, pointer: Any) -> dict[str, Any]:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise ValueError(
                f"the JSON schema has $ref = {pointer!r}, expected a place inside it such as '#/$defs/name'"
            )
        name = self._names.get(pointer)
        if name is None:
            name = self._names[pointer] = f"{self._prefix}ref-{len(self._names)}"
            self._definitions[name] = self._schema(self._find(pointer))
        return {"$ref": f"#/$defs/{name}"}

    def _find(self, pointer: str) -> Any:
        found: Any = self._whole
        for step in unquote(pointer).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise ValueError(f"the JSON schema has $ref = {pointer!r}, but no such place")
        return found


def _need(value: Any, kind: type, key: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"the JSON schema has {key} = {value!r:.40}, expected {kind.__name__}")
    return value


def _check_counts(out: dict[str, Any], low: str, high: str) -> None:
    """The converter writes some repetitions out: refuse what would make a giant of a small schema."""
    for key in (low, high):
        count = out.get(key, 0)
        if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count <= _MAX_REPETITIONS:
            raise ValueError(f"the JSON schema has {key} = {count!r}, expected 0 to {_MAX_REPETITIONS}")
        if key in out:
            out[key] = int(count)
    if out.get(low, 0) > out.get(high, _MAX_REPETITIONS):
        raise ValueError(f"the JSON schema has {low} = {out[low]}, but {high} = {out[high]}")
