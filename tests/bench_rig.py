"""What the tests of the bench command share: made-up answers, and a server that answers as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dspine_local.bench.run import Measurement
from dspine_local.bench.systems import Answer, Task
from dspine_local.stats import GenerationStats

EMPTY = GenerationStats(
    **dict.fromkeys(GenerationStats.__dataclass_fields__, 0)
    | dict.fromkeys(("drafted_per_position", "accepted_per_position", "rounds_per_draft_length"), ())
)
MODELS = {"data": [{"id": "the model"}]}


def made_up(
    system: str, task: int, repetition: int, tokens_per_second: float, *, n: int = 101, **changes: Any
) -> Measurement:
    """A measurement of an answer of n tokens at this speed."""
    timed_s = (n - 1) / tokens_per_second
    stats = replace(EMPTY, generated=n, rounds=n - 1, verify_s=timed_s, rounds_per_draft_length=(n - 1,))
    answer = Answer(
        text=str(task),
        n_tokens=n,
        n_timed=n - 1,
        timed_s=timed_s,
        clock="rounds",
        prefill_s=0.5,
        n_rounds=n - 1,
        tokens=(task, *range(n - 1)),
        stats=stats,
    )
    return Measurement(system, task, repetition, replace(answer, **changes))


@dataclass
class MadeUpSystem:
    """Answers at once, and keeps a record of who was asked what."""

    name: str
    record: list[tuple[str, str]]
    is_ours: bool = True

    def answer(self, task: Task) -> Answer:
        self.record.append((self.name, task.text))
        return made_up(self.name, 0, 0, 10.0).answer


Reply = Callable[[dict[str, Any]], Any]


@contextmanager
def server(reply: Reply, *, models: Any = MODELS, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on this machine; its URL, and the requests that it has had. ``reply`` gives JSON values, or bytes."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def send(self, code: int, content: Any) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.send(200, models if self.path == "/v1/models" else {})

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(request)
            self.send(status, reply(request))

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}", requests
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def completion(text: str, **more: Any) -> dict[str, Any]:
    """A chat completion as llama-server and others give it."""
    return {"choices": [{"message": {"role": "assistant", "content": text}}], **more}
