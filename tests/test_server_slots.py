"""Clients that leave, queues, saved slots, and many clients at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_rig import PROMPT, TIMEOUT_S, RunningServer, crowd, open_engine, parse_events, serving, wait_for

from dspine_local import GREEDY

pytestmark = pytest.mark.native

ENDLESS = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("saved")
    with serving(open_engine(tiny_pair, n_ctx=8192, n_batch=32), slot_save_path=folder) as running:
        yield running


def leave_after(server: RunningServer, path: str, n_lines: int, body: dict[str, Any]) -> None:
    """Read so many lines of a stream, then hang up; without a stream hang up at once."""
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        if n_lines < 0:
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body, timeout=0.3)
            return
        with client.stream("POST", path, json=body | {"stream": True}) as response:
            lines = response.iter_lines()
            for _ in range(n_lines):
                next(lines)


@pytest.mark.parametrize("n_lines", [-1, 0, 1, 8])
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_leaving_frees_the_slot_within_a_second(server: RunningServer, path: str, n_lines: int) -> None:
    """While it answers: streaming or not."""
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    leave_after(server, path, n_lines, {**prompt, **ENDLESS})
    assert wait_for(server.is_idle) < 1


@pytest.mark.parametrize("n_lines", [-1, 0])
def test_leaving_while_the_prompt_is_read(server: RunningServer, n_lines: int) -> None:
    """A batch is 32 tokens here: more than a hundred rounds."""
    body = {"prompt": f"{random.random()} " + "word " * 700, "n_predict": 1, "cache_prompt": False}
    leave_after(server, "/completion", n_lines, body)
    assert wait_for(server.is_idle) < 1


def test_leaving_the_queue(server: RunningServer) -> None:
    """Two slots are busy: those who wait can leave, and those who stay get their turn."""
    stay: list[str] = []
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as busy:
        streams = [busy.stream("POST", "/completion", json={"prompt": p, "stream": True, **ENDLESS}) for p in "AB"]
        answers = [stream.__enter__().iter_lines() for stream in streams]  # kept: closing them hangs up
        for lines in answers:
            next(lines)
        waiter = threading.Thread(
            target=lambda: stay.append(server.post("/completion", prompt="C", n_predict=3)["stop_type"])
        )
        waiter.start()
        wait_for(lambda: server.state.scheduler.n_unfinished == 3)
        for n_lines in (-1, 0):
            leave_after(server, "/completion", n_lines, {"prompt": "D", **ENDLESS})
            assert wait_for(lambda: server.state.scheduler.n_unfinished == 3) < 1
        wait_for(lambda: "llamacpp:requests_deferred 1.0" in server.client.get("/metrics").text)
        assert server.client.get("/slots", params={"fail_on_no_slot": 1}).status_code == 503
        for stream in streams:
            stream.__exit__(None, None, None)
    waiter.join(TIMEOUT_S)
    assert stay == ["limit"]
    assert wait_for(server.is_idle) < 1


def test_one_that_does_not_fit_disturbs_nobody(server: RunningServer) -> None:
    alone = server.post("/completion", prompt=PROMPT, n_predict=60, **ENDLESS)["content"]
    events: list[str] = []
    with server.client.stream(
        "POST", "/completion", json={"prompt": PROMPT, "n_predict": 60, "stream": True, **ENDLESS}
    ) as r:
        for i, event in enumerate(parse_events(r.iter_lines())):
            events.append(event["content"])
            if i == 2:
                with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as other:
                    assert other.post("/completion", json={"prompt": "word " * 9000}).status_code == 400
    assert "".join(events) == alone


def test_a_saved_slot_continues_after_a_restart(server: RunningServer, tiny_pair: tuple[Path, Path]) -> None:
    """The same tokens are reused, the same drafts accepted, and the same answer given."""
    first = server.post(
        "/completion", prompt=PROMPT * 3, n_predict=20, return_tokens=True, cache_prompt=False, **ENDLESS
    )
    slot = first["id_slot"]
    saved = server.post(f"/slots/{slot}?action=save", filename="talk.bin")
    assert saved["n_saved"] == first["tokens_cached"]
    folder = server.state.options.slot_save_path
    assert folder is not None
    assert saved["n_written"] == (folder / "talk.bin").stat().st_size
    prompt = server.post("/tokenize", content=PROMPT * 3, add_special=True)["tokens"] + first["tokens"]
    body = {"prompt": prompt, "n_predict": 30, "return_tokens": True, **ENDLESS}
    expected = server.post("/completion", **body)
    with serving(open_engine(tiny_pair, n_ctx=8192), slot_save_path=folder) as other:
        assert other.post("/slots/1?action=restore", filename="missing.bin", expect=400)
        restored = other.post("/slots/1?action=restore", filename="talk.bin")
        assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
        answer = other.post("/completion", **body)
        assert answer["tokens"] == expected["tokens"]
        for name in ("cache_n", "draft_n", "draft_n_accepted"):
            assert answer["timings"][name] == expected["timings"][name]
        assert other.post(f"/slots/{answer['id_slot']}?action=erase")["n_erased"] == answer["tokens_cached"]
        assert other.post("/completion", **body)["timings"]["cache_n"] == 0


def test_saving_waits_for_a_busy_slot(server: RunningServer) -> None:
    with server.client.stream("POST", "/completion", json={"prompt": "A", "stream": True, **ENDLESS}) as response:
        lines = response.iter_lines()
        next(lines)
        (busy,) = [slot["id"] for slot in server.slots() if slot["is_processing"]]
        with httpx.Client(base_url=server.url) as other, pytest.raises(httpx.ReadTimeout):
            other.post(f"/slots/{busy}?action=save", json={"filename": "busy.bin"}, timeout=0.3)
    wait_for(server.is_idle)
    assert server.post(f"/slots/{busy}?action=save", filename="busy.bin")["n_saved"] > 0


def test_a_request_may_wait_for_its_slot(server: RunningServer) -> None:
    """Others pass it meanwhile."""
    for slot in (1, 0, 1):
        assert server.post("/completion", prompt="A", n_predict=2, id_slot=slot)["id_slot"] == slot
    got: list[int] = []
    body = {"prompt": "B", "stream": True, "id_slot": 0, **ENDLESS}
    with server.client.stream("POST", "/completion", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        waiter = threading.Thread(
            target=lambda: got.append(server.post("/completion", prompt="C", n_predict=2, id_slot=0)["id_slot"])
        )
        waiter.start()
        wait_for(lambda: server.state.scheduler.n_unfinished == 2)
        with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as other:
            assert other.post("/completion", json={"prompt": "D", "n_predict": 2}).json()["id_slot"] == 1
        assert got == []
    waiter.join(TIMEOUT_S)
    assert got == [0]


def test_a_crowd_with_random_disconnects(server: RunningServer, tiny_pair: tuple[Path, Path]) -> None:
    """Every finished answer is that of plain decoding; nothing is left behind."""
    plain = open_engine(tiny_pair, n_ctx=4096)
    prompts = [PROMPT, "Once upon a time", "1 + 1 =", PROMPT * 3, "def f(x):", "🙂 世界"]
    expected = {p: plain.generate(p, max_tokens=40, n_draft=0, sampling=GREEDY).read() for p in prompts}
    n_finished, wrong = crowd(server, expected, n_clients=8, seconds=4)
    assert wrong == []
    assert n_finished > 8
    assert wait_for(server.is_idle) < 1
    engine = server.state.engine
    assert engine._events == {}
    assert engine._left == set()
    for slot in range(2):  # a plain request leaves the drafter behind, and nothing lets it run ahead
        target, drafter = engine.cache_lengths(slot)
        assert 0 <= drafter <= target
        server.post("/completion", prompt=PROMPT, n_predict=4, id_slot=slot)
        assert engine.cache_lengths(slot)[0] == engine.cache_lengths(slot)[1] > 0
