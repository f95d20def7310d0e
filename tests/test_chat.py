"""The terminal chat: the conversation, its commands, and being stopped."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from server_rig import open_engine, wait_for

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


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_in_a_terminal(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Ctrl-C stops the answer and not the program; lines of one message; the history; leaving."""
    import fcntl
    import pty
    import termios

    command = [sys.executable, "-m", "dspine_local", "chat", "-m", str(tiny_pair[0]), "--history", str(tmp_path / "h")]
    leader, follower = pty.openpty()
    fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    arguments = ["--ignore-eos", "-c", "8192", "--temp", "0"]
    chat = subprocess.Popen([*command, *arguments], stdin=follower, stdout=follower, stderr=follower, cwd=tmp_path)
    os.close(follower)
    seen = bytearray()

    def read() -> bytes:
        if select.select([leader], [], [], 0.1)[0]:
            with suppress(OSError):  # the other end is closed
                new = os.read(leader, 65536)
                seen.extend(new)
                if b"\x1b[6n" in new:  # where is the cursor?
                    os.write(leader, b"\x1b[5;1R")
        return bytes(seen)

    try:
        wait_for(lambda: b"\x1b[?2004h" in read())  # it waits for a line
        os.write(leader, b"Hello\x1b\rthere\r")
        wait_for(lambda: len(read().partition(b"\x1b[?2004l")[2]) > 200)  # the line was taken, the answer runs
        chat.send_signal(signal.SIGINT)
        wait_for(lambda: b"[stopped]" in read())
        wait_for(lambda: b"tokens/s" in read())
        assert chat.poll() is None
        del seen[:]
        os.write(leader, b"/stats\r")
        wait_for(lambda: b" tokens/s" in read())
        os.write(leader, b"/quit\r")
        wait_for(lambda: read() is not None and chat.poll() is not None)
        assert chat.returncode == 0
        assert "+Hello\n+there" in (tmp_path / "h").read_text()
    finally:
        chat.kill()
        chat.wait()
        os.close(leader)
