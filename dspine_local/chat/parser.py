"""An answer's text, as it comes, into content, reasoning and tool calls. Tags may be split over any pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspine_local.chat.call_stream import CallStream
from dspine_local.chat.tools import CLOSE, OPEN

THINK, END_THINK = "<think>", "</think>"

Kind = Literal["content", "reasoning", "tool_call", "arguments"]


@dataclass(frozen=True)
class Delta:
    """A piece of an answer. A call is its name, as ``tool_call``, and then its ``arguments`` (JSON text) in pieces."""

    kind: Kind
    text: str


class AnswerParser:
    """Feed it text, get deltas.

    Args:
        reasoning: Split ``<think>`` blocks at the beginning off.
        thinking: The prompt has opened such a block already.
        tools: The request's; None leaves calls in the text.
    """

    def __init__(
        self, *, reasoning: bool = True, thinking: bool = False, tools: Sequence[dict[str, Any]] | None = None
    ) -> None:
        self._tools = tools
        self._held = ""
        self._state: Literal["start", "reasoning", "content", "call"] = "start" if reasoning else "content"
        if reasoning and thinking:
            self._state = "reasoning"
        self._begun = False  # the present state has given text already: blank space in front of it is dropped
        self._open_call = CallStream(tools or [])
        self._call_told = False
        self.n_calls = 0  # that have begun

    def feed(self, text: str) -> list[Delta]:
        """What is certain after this text."""
        self._held += text
        return self._run(final=False)

    def finish(self) -> list[Delta]:
        """What was held back, at the end of the answer."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Delta]:
        out: list[Delta] = []
        while self._step(out, final=final):
            pass
        return out

    def _step(self, out: list[Delta], *, final: bool) -> bool:
        """One change of state; False when more text is needed."""
        if self._state == "start":
            text = self._held.lstrip()
            if text.startswith(THINK):
                self._held = text[len(THINK) :]
                self._enter("reasoning")
                return True
            if not final and THINK.startswith(text):
                return False
            self._enter("content", begun=True)
            return True
        if self._state == "reasoning":
            return self._until(END_THINK, "reasoning", "content", out, final=final)
        if self._state == "content":
            if self._tools is None:
                self._give(self._held, "content", out)
                self._held = ""
                return False
            return self._until(OPEN, "content", "call", out, final=final)
        return self._call(out, final=final)

    def _enter(self, state: Literal["reasoning", "content", "call"], *, begun: bool = False) -> None:
        self._state = state
        self._begun = begun

    def _until(
        self, tag: str, kind: Kind, following: Literal["content", "call"], out: list[Delta], *, final: bool
    ) -> bool:
        before, found, after = self._held.partition(tag)
        if found:
            self._give(before.rstrip() if following == "call" or kind == "reasoning" else before, kind, out)
            self._held = after
            self._enter(following)
            return True
        n_keep = 0 if final else _overlap(self._held, tag)
        certain = self._held[: len(self._held) - n_keep]
        if not final:  # blank space in front of a tag is not part of the text
            certain = certain.rstrip()
        self._held = self._held[len(certain) :]
        self._give(certain, kind, out)
        return False

    def _call(self, out: list[Delta], *, final: bool) -> bool:
        block, found, after = self._held.partition(CLOSE)
        n_keep = 0 if found or final else _overlap(block, CLOSE)
        certain = block[: len(block) - n_keep]
        call = self._open_call
        self._tell_call(call, call.feed(certain), out)
        if not found and not final:
            self._held = block[len(certain) :]
            return False
        self._tell_call(call, call.end(closed=bool(found)), out)
        if call.name is None and (call.text.strip() or found):
            self._give(f"{OPEN}{call.text}{CLOSE if found else ''}", "content", out)
        self._held = after
        self._open_call = CallStream(self._tools or [])
        self._call_told = False
        self._enter("content", begun=call.name is None)
        return bool(found)

    def _tell_call(self, call: CallStream, arguments: str, out: list[Delta]) -> None:
        if call.name is not None and not self._call_told:
            self._call_told = True
            self.n_calls += 1
            out.append(Delta("tool_call", call.name))
        if arguments:
            out.append(Delta("arguments", arguments))

    def _give(self, text: str, kind: Kind, out: list[Delta]) -> None:
        if not self._begun:
            text = text.lstrip()
        if text:
            self._begun = True
            out.append(Delta(kind, text))


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of the text that begins the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
