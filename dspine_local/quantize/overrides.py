"""Types of single tensors, by patterns of their names: llama-quantize's ``--tensor-type``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TypeOverride:
    """Tensors whose name contains a match of ``pattern`` get this type."""

    pattern: str
    type: str

    def applies(self, name: str) -> bool:
        """Whether it is meant for a tensor of this name."""
        return re.search(self.pattern, name) is not None


def parse_override(text: str) -> TypeOverride:
    """``PATTERN=TYPE``, such as ``ffn_down=q6_k``.

    Raises:
        ValueError: No ``=``, an empty part, or a pattern that is no regular expression.
    """
    pattern, _, type_name = text.rpartition("=")
    if not pattern or not type_name:
        raise ValueError(f"'{text}' is no PATTERN=TYPE, such as ffn_down=q6_k")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern '{pattern}' is no regular expression: {error}") from error
    return TypeOverride(pattern, type_name.lower())


def check_all_used(overrides: Sequence[TypeOverride], names: Sequence[str]) -> None:
    """Refuse an override that no tensor has: a misspelled one would otherwise pass unnoticed.

    Raises:
        ValueError: It matches nothing.
    """
    for override in overrides:
        if not any(override.applies(name) for name in names):
            raise ValueError(
                f"no tensor's name matches '{override.pattern}', expected a part of one, such as '{names[0]}'"
            )
