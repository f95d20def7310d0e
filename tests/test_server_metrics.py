"""What /metrics and /props tell of drafting, with a fixed and with the automatic draft length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from audit_rig import EXACT, Pair, keep, result_of
from conftest import TargetFactory
from prometheus_client.parser import text_string_to_metric_families
from server_rig import PROMPT, RunningServer, open_engine, serving

from dspine_local import Engine

pytestmark = pytest.mark.native

LLAMA_SERVERS = (
    "prompt_tokens_total",
    "prompt_seconds_total",
    "tokens_predicted_total",
    "tokens_predicted_seconds_total",
    "prompt_tokens_seconds",
    "predicted_tokens_seconds",
    "requests_processing",
    "requests_deferred",
    "n_tokens_max",
    "n_decode_total",
    "n_busy_slots_per_decode",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
)


@pytest.fixture(params=[4, None], ids=["fixed", "automatic"])
def server(request: pytest.FixtureRequest, tiny_pair: tuple[Path, Path]) -> Iterator[RunningServer]:
    with serving(open_engine(tiny_pair, n_draft=request.param)) as running:
        yield running


def scrape(server: RunningServer) -> dict[str, dict[str, float]]:
    """Values by name and by the one label, or "" without one."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            assert len(sample.labels) <= 1
            found.setdefault(sample.name, {})["".join(sample.labels.values())] = sample.value
    return found


def test_names(server: RunningServer) -> None:
    server.post("/completion", prompt="A", n_predict=40, n_draft=3)
    assert scrape(server).keys() >= {f"llamacpp:{name}" for name in LLAMA_SERVERS}


def test_rounds_by_draft_length(server: RunningServer) -> None:
    """They add up to what the answers' timings say."""
    answers = [server.post("/completion", prompt=PROMPT, n_predict=40, ignore_eos=True) for _ in range(3)]
    answers.append(server.post("/completion", prompt=PROMPT, n_predict=40, ignore_eos=True, n_draft=0))
    found = scrape(server)
    rounds = {int(length): n for length, n in found["dspine:rounds_total"].items()}
    drafted = sum(answer["timings"].get("draft_n", 0) for answer in answers)
    accepted = sum(answer["timings"].get("draft_n_accepted", 0) for answer in answers)
    assert sum(length * n for length, n in rounds.items()) == drafted
    assert found["llamacpp:spec_decode_num_draft_tokens_total"][""] == drafted
    assert sum(rounds.values()) + accepted == 4 * 39
    assert rounds[0] >= 39
    assert found["dspine:round_seconds_total"].keys() == {"draft", "verify", "commit", "other"}
    whole = found["llamacpp:tokens_predicted_seconds_total"][""]
    assert sum(found["dspine:round_seconds_total"].values()) == pytest.approx(whole)


def test_costs_are_told_where_the_length_follows_them(server: RunningServer) -> None:
    engine, props, found = server.state.engine, server.client.get("/props").json(), scrape(server)
    assert props["default_generation_settings"]["speculative"] is True
    if engine.n_draft is not None:
        assert (props["n_draft"], props["n_draft_max"]) == (4, 4)
        assert "dspine:verify_cost_seconds" not in found
        return
    assert (props["n_draft"], props["n_draft_max"]) == (None, 15)
    assert engine.draft_costs is not None
    for name, points in (("verify", engine.draft_costs.verify), ("draft", engine.draft_costs.draft)):
        told = {int(n): s for n, s in found[f"dspine:{name}_cost_seconds"].items()}
        assert told == pytest.approx({n: us / 1e6 for n, us in points})


def test_without_a_drafter(tiny_pair: tuple[Path, Path]) -> None:
    with serving(Engine(tiny_pair[0], n_ctx=512, n_threads=1)) as running:
        running.post("/completion", prompt=PROMPT, n_predict=8, ignore_eos=True)
        found, props = scrape(running), running.client.get("/props").json()
        assert (props["n_draft"], props["n_draft_max"]) == (0, 0)
        assert found["dspine:rounds_total"] == {"0": 7}
        assert found["dspine:checkpoint_bytes"] == {"": 0}


def test_states_that_slots_go_back_to(tiny_target: TargetFactory) -> None:
    with serving(Engine(tiny_target("qwen35", "q8_0").path, n_ctx=1024, n_threads=1, checkpoint_mib=1)) as running:
        body = {"prompt": PROMPT * 6, "n_predict": 8, "temperature": 0, "ignore_eos": True}
        first, second = running.post("/completion", **body), running.post("/completion", **body)
        assert second["content"] == first["content"]
        assert second["timings"]["cache_n"] == first["timings"]["prompt_n"] - 8
        assert 0 < scrape(running)["dspine:checkpoint_bytes"][""] <= 1 << 20


@pytest.mark.parametrize(("exact", "lengths"), [({2: (0,), 3: (0, 256)}, [2, 3]), ({}, [])])
def test_strict_is_told(audited_pair: Pair, exact: dict[int, tuple[int, ...]], lengths: list[int]) -> None:
    keep(audited_pair, result_of(exact), n_parallel=2, n_ctx=1024)
    engine = Engine(*audited_pair, strict=True, **(EXACT | {"n_parallel": 2, "n_ctx": 1024}))
    with serving(engine) as running:
        for n_draft in (-1, 3):
            running.post("/completion", prompt=PROMPT, n_predict=20, n_draft=n_draft)
        props = running.client.get("/props").json()
        found = scrape(running)
    assert (props["strict"], props["exact_draft_lengths"]) == (True, lengths)
    assert found["dspine:strict"] == {"": 1}
    assert found.get("dspine:exact_draft_length", {}) == {str(n): 1 for n in lengths}
    assert {int(n) for n, rounds in found["dspine:rounds_total"].items() if rounds} <= {0, *lengths}


def test_without_strict(server: RunningServer) -> None:
    props = server.client.get("/props").json()
    assert (props["strict"], props["exact_draft_lengths"]) == (False, None)
    assert scrape(server)["dspine:strict"] == {"": 0}
