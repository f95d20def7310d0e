"""A conversation with an engine, and its commands. Knows nothing of terminals."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

from dspine_local.chat.parser import THINK, AnswerParser, Delta
from dspine_local.engine import Engine
from dspine_local.generation import Generation
from dspine_local.options import GenerationOptions

HELP = """/system [TEXT]   set the system message, or remove it; begins anew
/reset           begin anew
/save FILE       save the conversation
/load FILE       go on with a saved one
/stats           what the last answer cost
/help            this
/quit            leave (or Ctrl-D)
Esc Enter begins a new line, Ctrl-C stops the answer."""


class ChatSession:
    """Messages so far, and how to go on.

    Args:
        engine: Answers.
        options: Of every answer.
        system: System message.
    """

    def __init__(self, engine: Engine, options: GenerationOptions, system: str | None = None) -> None:
        self._engine = engine
        self._options = options
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.last: Generation | None = None

    def answer(self, text: str) -> Generator[Delta, None, None]:
        """Ask; pieces of the answer and of its reasoning. What came until it was stopped stays in the conversation.

        Raises:
            ValueError: The template refuses the conversation.
            ContextLengthError: It no longer fits the context.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = self._engine.tokenizer.render_chat([*system, *asked])
        parser = AnswerParser(thinking=prompt.rstrip().endswith(THINK))
        self.last = generation = self._engine.generate(self._engine.tokenizer.encode(prompt), self._options)
        content = ""
        try:
            with generation:
                for piece in generation:
                    for delta in parser.feed(piece):
                        content += delta.text if delta.kind == "content" else ""
                        yield delta
            for delta in parser.finish():
                content += delta.text if delta.kind == "content" else ""
                yield delta
        finally:
            generation.close()
            self.messages = [*asked, {"role": "assistant", "content": content}]

    def command(self, line: str) -> str | None:
        """Run a line that begins with a slash; what to tell, None to leave.

        Raises:
            ValueError: No such command, or it lacks something.
            OSError: A file cannot be read or written.
        """
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit"):
            return None
        if name == "/help":
            return HELP
        if name == "/system":
            self.system, self.messages = rest or None, []
            return "system message set" if rest else "no system message"
        if name == "/reset":
            self.messages = []
            return "begun anew"
        if name == "/stats":
            return str(self.last.stats) if self.last is not None and self.last.stats is not None else "no answer yet"
        if name in ("/save", "/load"):
            if not rest:
                raise ValueError(f"{name} needs a file")
            return self._save(Path(rest)) if name == "/save" else self._load(Path(rest))
        raise ValueError(f"unknown command {name}, /help lists them")

    def status(self) -> str:
        """One line about the last answer."""
        stats = self.last.stats if self.last is not None else None
        if stats is None:
            return f"context {self._engine.n_ctx} tokens"
        parts = [f"{stats.prompt_tokens + stats.generated} of {self._engine.n_ctx} tokens"]
        if stats.tokens_per_second is not None:
            parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
        if stats.drafted and stats.acceptance_length is not None:
            parts.append(f"acceptance length {stats.acceptance_length:.2f}")
        elif stats.rounds and self._engine.max_draft:
            parts.append("no drafts")
        return " | ".join(parts)

    def _save(self, path: Path) -> str:
        talk = {"system": self.system, "messages": self.messages}
        path.write_text(json.dumps(talk, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        return f"saved {len(self.messages)} messages to {path}"

    def _load(self, path: Path) -> str:
        try:
            talk = json.loads(path.read_text(encoding="utf-8"))
            system, messages = talk["system"], talk["messages"]
            good = (system is None or isinstance(system, str)) and all(
                isinstance(message["role"], str) and isinstance(message["content"], str) for message in messages
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"'{path}' is not a saved conversation") from error
        if not good:
            raise ValueError(f"'{path}' is not a saved conversation")
        self.system, self.messages = system, messages
        return f"loaded {len(messages)} messages from {path}"
