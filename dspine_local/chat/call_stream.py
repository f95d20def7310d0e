"""A tool call's text as it comes: its name once that is known, then its arguments in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from dspine_local.chat.tools import parameter_value, parse_json_call, properties

_HERMES_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_QWEN_HEAD = re.compile(r"\s*<function=([^>\n]+)>")
_QWEN_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_QWEN_END = "</function>"


class CallStream:
    """Feed it the text between the tags; what ``feed`` and ``end`` give joins to the arguments, JSON text.

    ``name`` is None until it is known. A call in another order than the two forms' own is only known at its end.
    """

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self.name: str | None = None
        self.text = ""  # all of it
        self._tools = tools
        self._held = ""
        self._object: _ObjectEnd | None = None  # Hermes' form
        self._n_parameters = 0  # of Qwen's form
        self._ended = False

    def feed(self, text: str) -> str:
        """Arguments that are certain after this text."""
        self.text += text
        self._held += text
        if self.name is None:
            self._begin()
        if self.name is None or self._ended:
            return ""
        return self._hermes(self._object) if self._object is not None else self._qwen()

    def end(self, *, closed: bool) -> str:
        """What is left of them; ``closed``: the closing tag has come, and the text does not just break off."""
        if self.name is None:
            call = parse_json_call(self.text)
            if call is None:
                return ""
            self.name = call.name
            return call.arguments
        return self._qwen_end() if closed and self._object is None and not self._ended else ""

    def _begin(self) -> None:
        hermes, qwen = _HERMES_HEAD.match(self._held), _QWEN_HEAD.match(self._held)
        if hermes:
            try:
                self.name = json.loads(hermes[1], strict=False)
            except ValueError:  # an escape that is none: no call
                return
            self._object = _ObjectEnd()
            self._held = self._held[hermes.end() :]
        elif qwen:
            self.name = qwen[1].strip()
            self._held = self._held[qwen.end() :]

    def _hermes(self, end: _ObjectEnd) -> str:
        n = end.find(self._held)
        out, self._held = self._held[:n], ""
        self._ended = n is not None
        return out

    def _qwen(self) -> str:
        out = ""
        while found := _QWEN_PARAMETER.match(self._held):
            key = found[1].strip()
            value = parameter_value(found[2], properties(self.name or "", self._tools).get(key))
            out += ("{" if self._n_parameters == 0 else ", ") + f"{json.dumps(key)}: {_json(value)}"
            self._n_parameters += 1
            self._held = self._held[found.end() :]
        if self._held.lstrip().startswith(_QWEN_END):
            out += self._qwen_end()
        return out

    def _qwen_end(self) -> str:
        self._ended = True
        return "}" if self._n_parameters else "{}"


class _ObjectEnd:
    """Looks for the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._escaped = False

    def find(self, text: str) -> int | None:
        """Characters of this piece up to and with its end; None when that is still to come."""
        for i, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_text:
                self._escaped = character == "\\"
                self._in_text = character != '"'
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
