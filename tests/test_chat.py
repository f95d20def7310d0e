"""The terminal chat: the conversation, its commands, and being stopped."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from server_rig import open_engine

from dspine_local import GREEDY, Engine, GenerationOptions
from dspine_local.chat.session import ChatSession
from dspine_local.cli import main

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def engine(tiny_pair: tuple[Path, Path]) -> Engine:
    return open_engine(tiny_pair)


@pytest.fixture
def session(engine: Engine) -> ChatSession:
    return ChatSession(engine, GenerationOptions(max_tokens=20, sampling=GREEDY))


def ask(session: ChatSession, text: str) -> str:
    return "".join(delta.text for delta in session.answer(text) if delta.kind == "content")


def test_turns_follow_each_other(session: ChatSession, engine: Engine) -> None:
    first = ask(session, "Hello")
    second = ask(session, "And?")
    asked = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first}]
    assert session.messages[:2] == asked
    expected = engine.chat([*asked, {"role": "user", "content": "And?"}], max_tokens=20, sampling=GREEDY)
    assert second == expected.read().lstrip()
    assert session.last is not None
    assert session.last.stats is not None
    assert "tokens/s" in session.status()


def test_a_stopped_answer_stays_and_frees_its_slot(session: ChatSession, engine: Engine) -> None:
    answer = session.answer("Hello")
    first = next(answer)
    answer.close()
    assert session.messages[-1] == {"role": "assistant", "content": first.text}
    engine.step()
    assert not engine.has_work


def test_commands(session: ChatSession, tmp_path: Path) -> None:
    assert session.command("/stats") == "no answer yet"
    session.command("/system Be kind.")
    ask(session, "Hello")
    assert "20 tokens" in str(session.command("/stats"))
    file = tmp_path / "talk.json"
    session.command(f"/save {file}")
    assert json.loads(file.read_text())["system"] == "Be kind."
    before = session.messages
    session.command("/reset")
    assert session.messages == []
    session.command("/system")
    assert session.system is None
    session.command(f"/load {file}")
    assert (session.system, session.messages) == ("Be kind.", before)
    assert session.command("/quit") is None
    for wrong in ("/save", "/mystery"):
        with pytest.raises(ValueError, match="/"):
            session.command(wrong)
    for text in ("[]", '{"system": 1, "messages": []}', '{"system": null, "messages": [{}]}', "nonsense"):
        file.write_text(text)
        with pytest.raises(ValueError, match="not a saved"):
            session.command(f"/load {file}")


def test_through_a_pipe(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = ["Hello", "/load missing.json", "/mystery", "/stats", "Bye", "/quit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    arguments = ["-m", str(tiny_pair[0]), "-md", str(tiny_pair[1]), "-n", "12", "--temp", "0", "-c", "512"]
    assert main(["chat", *arguments, "--history", str(tmp_path / "h")]) == 0
    printed = capsys.readouterr()
    assert "12 tokens" in printed.out
    assert "missing.json" in printed.err
    assert "/mystery" in printed.err
    assert printed.err.count("tokens/s") == 2
