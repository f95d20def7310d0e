"""Faults that users of such servers have met, over HTTP: state that leaks, answers that drafting changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server_rig import PROMPT, RunningServer, open_engine, serving

from dspine_local import Engine
from dspine_local.server.metrics import Metrics

pytestmark = pytest.mark.native

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalties": {"temperature": 0, "repeat_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    "dry": {"temperature": 0.7, "dry_multiplier": 2.0, "dry_allowed_length": 1, "seed": 4},
    "hot": {"temperature": 1.6, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 9},
    "order": {"temperature": 1.1, "samplers": ["temperature", "min_p", "top_k"], "min_p": 0.1, "seed": 2},
    "bias": {"temperature": 0, "logit_bias": [[65, 3.5], [66, False]]},
    "grammar": {"temperature": 1.0, "grammar": 'root ::= ("ab" | "cd ")+', "seed": 3},
}


@pytest.fixture(scope="module")
def server(tiny_pair: tuple[Path, Path]) -> Iterator[RunningServer]:
    with serving(open_engine(tiny_pair, n_parallel=1, n_draft=15, n_ctx=1024)) as running:
        yield running


def ask(server: RunningServer, prompt: str, **body: Any) -> tuple[list[int], tuple[int, int]]:
    """Tokens, and how many were drafted and accepted."""
    body = {"n_predict": 48, "temperature": 0, "return_tokens": True, **body}
    answer = server.post("/completion", prompt=prompt, **body)
    times = answer["timings"]
    return answer["tokens"], (times.get("draft_n", 0), times.get("draft_n_accepted", 0))


@pytest.mark.parametrize("before", ["B", PROMPT * 12])
def test_a_request_does_not_depend_on_those_before(
    server: RunningServer, tiny_pair: tuple[Path, Path], before: str
) -> None:
    """Nor do its drafts: after something else, and after something long."""
    with serving(open_engine(tiny_pair, n_parallel=1, n_draft=15, n_ctx=1024)) as fresh:
        expected = ask(fresh, PROMPT)
    ask(server, before)
    assert ask(server, PROMPT) == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_drafting_changes_no_answer(server: RunningServer, name: str) -> None:
    plain, counts = ask(server, PROMPT, n_draft=0, **SETTINGS[name])
    assert counts == (0, 0)
    lengths = range(1, 16) if name == "greedy" else (1, 7, 15)
    for n_draft in lengths:
        tokens, counts = ask(server, PROMPT, n_draft=n_draft, **SETTINGS[name])
        assert tokens == plain, n_draft
        assert counts[0] > 0


def test_the_automatic_length_changes_no_answer(tiny_pair: tuple[Path, Path]) -> None:
    """Whatever it chooses; alone, and beside a request of fixed length."""
    with serving(open_engine(tiny_pair, n_draft=None, n_ctx=1024)) as automatic:
        for settings in SETTINGS.values():
            plain, _ = ask(automatic, PROMPT, n_draft=0, **settings)
            assert ask(automatic, PROMPT, **settings)[0] == plain
            body = {"prompt": [PROMPT, "B"], "n_predict": 48, "temperature": 0, "return_tokens": True, **settings}
            assert automatic.post("/completion", **body)[0]["tokens"] == plain


def test_usage_counts_what_was_emitted(server: RunningServer) -> None:
    """The end token is the last that counts, even when it comes inside a draft."""
    body = {"prompt": PROMPT, "grammar": 'root ::= "abcdefgh"', "max_tokens": 100, "temperature": 0}
    answer = server.post("/v1/completions", **body, return_provenance=True)
    assert answer["choices"][0]["text"] == "abcdefgh"
    assert answer["choices"][0]["finish_reason"] == "stop"
    native = server.post("/completion", **body, return_tokens=True)
    assert answer["usage"]["completion_tokens"] == len(native["tokens"]) == native["tokens_predicted"]


def test_whole_characters_in_every_event(server: RunningServer) -> None:
    """Characters of several tokens, at the edges of blocks: nothing is lost, nothing joined wrongly."""
    grammar = 'root ::= ("🙂" | "世" | "é" | "a ")+'
    for seed in range(3):
        body = {"prompt": PROMPT, "grammar": grammar, "n_predict": 60, "temperature": 1.5, "seed": seed}
        events = server.events("/completion", **body)
        answer = server.post("/completion", **body, return_tokens=True)
        whole = server.state.engine.tokenizer.decode(answer["tokens"])
        assert "".join(event["content"] for event in events) == answer["content"] == whole


def test_drafts_that_are_all_rejected_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    stats = dict.fromkeys(("prompt_tokens", "reused_tokens", "generated", "rounds", "accepted"), 0)
    times = dict.fromkeys(("prefill_s", "draft_s", "verify_s", "commit_s", "other_s"), 0.0)
    positions = {"accepted_per_position": (0,), "rounds_per_draft_length": (0, 150)}
    useless = SimpleNamespace(stats=SimpleNamespace(**stats, **times, drafted=150, **positions))
    with caplog.at_level(logging.WARNING, logger="dspine_local.server"):
        for _ in range(5):
            metrics.count_request(useless)  # type: ignore[arg-type]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "none of 300 drafted tokens was accepted" in caplog.text


def test_a_full_cache_ends_only_its_own_request(tiny_pair: tuple[Path, Path]) -> None:
    """Several long chats: each has its own share, and the one that outgrows it ends with its own length."""
    engine: Engine = open_engine(tiny_pair, n_parallel=2, n_ctx=512)
    with serving(engine) as running:
        answers = running.post("/completion", prompt=["A", "B", "C"], temperature=0, ignore_eos=True)
        assert [answer["stop_type"] for answer in answers] == ["limit"] * 3
        assert [answer["tokens_evaluated"] + answer["tokens_predicted"] for answer in answers] == [257 - 1] * 3
        assert running.post("/completion", prompt="A", n_predict=3)["tokens_predicted"] == 3
