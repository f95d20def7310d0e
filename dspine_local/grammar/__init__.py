"""JSON schemas as GBNF, by llama-cpp-python's converter; nothing is fetched."""

from dspine_local.grammar.rules import JSON_OBJECT, SchemaRules, literal, schema_to_gbnf

__all__ = ["JSON_OBJECT", "SchemaRules", "literal", "schema_to_gbnf"]
