"""Text to tokens and back with the target's own vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from dspine_local import _native
from dspine_local.chat_template import Message, render_chat
from dspine_local.checks import check_encodable


class Tokenizer:
    """The vocabulary and chat template of a target."""

    def __init__(self, target: _native.Target) -> None:
        self._target = target
        self._pieces = _Pieces(target)

    @cached_property
    def chat_template(self) -> str | None:
        """Jinja source from the GGUF, None when it has none."""
        return self._target.chat_template

    @cached_property
    def bos_text(self) -> str:
        """Text of the beginning-of-sequence token, empty when there is none."""
        return self._special_text(self._target.bos_token)

    @cached_property
    def eos_text(self) -> str:
        """Text of the end-of-sequence token, empty when there is none."""
        return self._special_text(self._target.eos_token)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text: special tokens in it are understood, and those that the model begins with are added.

        Raises:
            ValueError: Text that UTF-8 cannot encode.
        """
        check_encodable("the prompt", text)
        # A chat template often writes the beginning-of-sequence token itself: once is enough.
        has_bos = bool(self.bos_text) and text.startswith(self.bos_text)
        return self._target.tokenize(text, add_special=not has_bos, parse_special=True)

    def encode_plain(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Tokens of a text, without those that the model begins with and with special tokens as plain text."""
        return self._target.tokenize(text, add_special=add_special, parse_special=parse_special)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, ready for the assistant's answer.

        Raises:
            ValueError: The model has no chat template, it refuses the messages, or one cannot be encoded in UTF-8.
        """
        return self.encode(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """A conversation as text, ready for the assistant's answer; ``variables`` are further ones of the template.

        Raises:
            ValueError: The model has no chat template, or it refuses the messages.
        """
        for number, message in enumerate(messages, start=1):
            _check_message(f"message {number}", message)
        if self.chat_template is None:
            raise ValueError("the model has no chat template, expected tokenizer.chat_template in its GGUF")
        return render_chat(self.chat_template, messages, bos_token=self.bos_text, eos_token=self.eos_text, **variables)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token, which may be a part of a character; control tokens are empty unless ``special``."""
        return self._target.piece(token, special=True) if special else self._pieces[token]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.piece(token) for token in tokens).decode("utf-8", errors="replace")

    def _special_text(self, token: int) -> str:
        return self.piece(token, special=True).decode("utf-8", errors="replace") if token >= 0 else ""


class _Pieces(dict[int, bytes]):
    """Bytes of the tokens seen so far: a target takes longer to tell them."""

    def __init__(self, target: _native.Target) -> None:
        self._target = target

    def __missing__(self, token: int) -> bytes:
        piece = self[token] = self._target.piece(token, special=False)
        return piece


def _check_message(what: str, value: Any) -> None:
    """Refuse text that cannot be encoded anywhere in a message, by its place."""
    if isinstance(value, str):
        check_encodable(what, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_message(f"{what}, {key!r}", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value, start=1):
            _check_message(f"{what}, item {number}", item)
