"""The rig of the server's tests: a real server on a free port, in a thread of this process."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from dspine_local import Engine
from dspine_local.server import ServerOptions, create_app
from dspine_local.server.state import ServerState

PROMPT = "The quick brown fox jumps over the lazy dog."
TIMEOUT_S = 60


class RunningServer:
    """A server; ``client`` talks to it."""

    def __init__(self, load: Callable[[], Engine], options: ServerOptions) -> None:
        app = create_app(load, options)
        self.state: ServerState = app.state.server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1, lifespan="on")
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def wait(self) -> None:
        """Until the models are loaded."""
        wait_for(lambda: self.client.get("/health").status_code == 200)

    def stop(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(TIMEOUT_S)
        self._listener.close()
        assert not self._thread.is_alive()

    def post(self, path: str, expect: int = 200, **body: Any) -> Any:
        """A JSON request; the JSON answer, which must have this code."""
        response = self.client.post(path, json=body)
        assert response.status_code == expect, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All events of a stream."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            return list(parse_events(response.iter_lines()))

    def slots(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.get("/slots").json()
        return found

    def is_idle(self) -> bool:
        return self.state.scheduler.n_unfinished == 0 and not any(slot["is_processing"] for slot in self.slots())


def parse_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events; ``[DONE]`` must be the last."""
    done = False
    for line in lines:
        if line.startswith("data: "):
            assert not done, "an event after [DONE]"
            if line == "data: [DONE]":
                done = True
            else:
                yield json.loads(line[len("data: ") :])
        else:
            assert line == "" or line.startswith(":")


def wait_for(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> float:
    """Seconds until it holds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s, "it never came true"
        time.sleep(0.02)
    return time.monotonic() - begin


def open_engine(pair: tuple[Path, Path], **options: Any) -> Engine:
    """Settings under which a batch gives each token the logits it has alone. Drafts are always made, 7 tokens long."""
    settings: dict[str, Any] = {"n_ctx": 2048, "n_parallel": 2, "n_ubatch": 32, "flash_attn": "on", "n_threads": 1}
    settings["n_draft"] = 7
    return Engine(*pair, **(settings | options))


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[RunningServer]:
    """A server over an engine that is loaded already."""
    server = RunningServer(lambda: engine, ServerOptions(**({"model_path": "tiny.gguf"} | options)))
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def crowd(server: RunningServer, expected: dict[str, str], n_clients: int, seconds: float) -> tuple[int, list[str]]:
    """Streaming clients, some of whom hang up and some of whom set the draft length.

    How many answers were finished, and what was wrong with them.
    """
    wrong: list[str] = []
    n_finished = [0] * n_clients
    stop = threading.Event()

    def client_loop(index: int) -> None:
        rng = random.Random(index)
        with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
            while not stop.is_set():
                prompt = rng.choice(list(expected))
                limit = rng.choice([None, None, rng.randint(0, 6)])
                body = {"prompt": prompt, "n_predict": 40, "temperature": 0, "stream": True}
                body["n_draft"] = rng.choice([-1, -1, 0, 3])
                text = ""
                with client.stream("POST", "/completion", json=body) as response:
                    if response.status_code != 200:
                        wrong.append(f"status {response.status_code}")
                        return
                    for n, event in enumerate(parse_events(response.iter_lines())):
                        if "error" in event:
                            wrong.append(str(event))
                            return
                        text += event["content"]
                        if n == limit:
                            break
                    else:
                        n_finished[index] += 1
                        if text != expected[prompt]:
                            wrong.append(f"{prompt!r} got {text!r}")

    threads = [threading.Thread(target=client_loop, args=(i,)) for i in range(n_clients)]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return sum(n_finished), wrong
