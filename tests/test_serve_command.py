"""``dspine-local serve`` as a process: what it says, how it ends, and what it refuses to begin with."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from conftest import CHECKOUT
from server_rig import wait_for

from dspine_local.cli import main

pytestmark = pytest.mark.native

README_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def launch(pair: tuple[Path, Path], log: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start it on a free port; the process and its address."""
    command = [sys.executable, "-m", "dspine_local", "serve", "-m", str(pair[0]), "-md", str(pair[1]), "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "-c", "2048", *arguments], stderr=file, stdout=file, cwd=log.parent)
    wait_for(lambda: "listening on" in log.read_text() or process.poll() is not None)
    found = re.search(r"listening on (\S+)", log.read_text())
    assert found, log.read_text()
    return process, found[1]


@pytest.fixture(scope="module")
def running(
    tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    log = tmp_path_factory.mktemp("serve") / "log"
    process, url = launch(tiny_pair, log, "-np", "2", "--temp", "0", "--alias", "*", "--slot-save-path", ".")
    try:
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
        yield process, url, log
    finally:
        process.kill()
        process.wait()


def test_effective_settings_are_printed(running: tuple[subprocess.Popen[bytes], str, Path]) -> None:
    _, url, log = running
    assert "slots: 2 of 1024 tokens, up to 15 tokens drafted per round, chosen by measurement" in log.read_text()
    assert httpx.get(f"{url}/props").json()["default_generation_settings"]["params"]["temperature"] == 0


def test_the_readmes_commands(running: tuple[subprocess.Popen[bytes], str, Path]) -> None:
    """Every curl command of README.md and docs/server.md, as it stands there."""
    _, url, log = running
    n = 0
    for file in ("README.md", "docs/server.md"):
        for block in README_BLOCK.findall((CHECKOUT / file).read_text()):
            if not block.startswith("curl"):
                continue
            for line in re.split(r"\n(?=curl )", block.replace("\\\n", " ").strip()):
                command = shlex.split(line.replace("http://localhost:8080", url).replace("curl ", "curl -sSf ", 1))
                done = subprocess.run(command, capture_output=True, timeout=60, cwd=log.parent, check=False)
                assert done.returncode == 0, (line, done.stderr, done.stdout)
                assert b"error" not in done.stdout
                n += 1
    assert n >= 6


def test_interrupting_ends_it_at_once(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    process, url = launch(tiny_pair, tmp_path / "log")
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
    with httpx.stream(
        "POST", f"{url}/completion", json={"prompt": "A", "stream": True, "ignore_eos": True}
    ) as response:
        lines = response.iter_lines()
        next(lines)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(30)
        assert time.monotonic() - begin < 10
    assert process.returncode in (0, 130)
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_grammar_that_takes_for_ever_does_not_keep_it(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """llama.cpp follows every reading of an ambiguous grammar, and cannot be interrupted."""
    process, url = launch(tiny_pair, tmp_path / "log")
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
    grammar = f"root ::= ({'|'.join(['[a-z]*'] * 400)})*"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/completion", json={"prompt": "A", "grammar": grammar}, timeout=2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 1
    assert "a round did not end in time" in (tmp_path / "log").read_text()


def test_a_model_that_does_not_load_ends_it(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + os.urandom(100))
    command = [
        sys.executable,
        "-m",
        "dspine_local",
        "serve",
        "-m",
        str(broken),
        "-md",
        str(tiny_pair[1]),
        "--port",
        "0",
    ]
    done = subprocess.run(command, capture_output=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert b"broken.gguf" in done.stderr
    assert b"Traceback" not in done.stderr


def test_wrong_arguments(tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, expected in (
            (["--port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["--port", "70000"], "port = 70000"),
            (["--host", "no such host"], "no such host"),
            (["--slot-save-path", str(tmp_path / "missing")], "slot_save_path"),
            (["--api-key", ""], "API key is empty"),
            (["-m", "missing.gguf"], "missing.gguf"),
            (["--checkpoint-mib", "-1"], "--checkpoint-mib"),
        ):
            assert main(["serve", "-m", str(tiny_pair[0]), *arguments]) == 2
            assert expected in capsys.readouterr().err


def test_a_wider_address_without_a_key_is_warned_of(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    process, url = launch(tiny_pair, tmp_path / "log", "--host", "0.0.0.0")  # noqa: S104 - what is tested
    try:
        assert url.startswith("http://0.0.0.0:")
        wait_for(lambda: "give an --api-key" in (tmp_path / "log").read_text())
    finally:
        process.kill()
        process.wait()
