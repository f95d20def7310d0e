"""Token bytes to text: whole UTF-8 characters only, and stop texts that may straddle a block."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of one answer into text pieces whose concatenation is the whole text.

    A character that is not complete yet, and text that may turn out to be the beginning of a stop text, are held back.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_whole = True  # no character is waiting for its other bytes
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        self.stop_text: str | None = None

    def feed(self, data: bytes) -> str:
        """The text that is certain after these bytes; sets ``stopped`` and ``stop_text`` at a stop text."""
        if data.isascii() and self._is_whole:  # nearly always, and much faster
            return self._advance(data.decode("ascii"), final=False)
        text = self._decoder.decode(data)
        self._is_whole = self._decoder.getstate()[0] == b""
        return self._advance(text, final=False)

    def feed_all(self, pieces: Sequence[bytes]) -> tuple[str, int]:
        """``feed`` for the tokens of a round: the text, and how many of them it took, fewer at a stop text."""
        if not self._stop:
            return self.feed(b"".join(pieces)), len(pieces)
        text = ""
        for n_used, piece in enumerate(pieces, start=1):
            text += self.feed(piece)
            if self.stopped:
                return text, n_used
        return text, len(pieces)

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        return self._advance(self._decoder.decode(b"", final=True), final=True)

    def _advance(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        if not self._stop:
            return text
        self._held += text
        found = [(at, stop) for at, stop in ((self._held.find(stop), stop) for stop in self._stop) if at >= 0]
        if found:
            first, self.stop_text = min(found)
            self.stopped = True
            out, self._held = self._held[:first], ""
            return out
        n_keep = 0 if final else max((self._overlap(stop) for stop in self._stop), default=0)
        out, self._held = self._held[: len(self._held) - n_keep], self._held[len(self._held) - n_keep :]
        return out

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
