"""Eight streaming clients on SmolLM2, some of whom hang up at random: for ten seconds, or DSPINE_SOAK_SECONDS."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SmolFactory
from server_rig import RunningServer, crowd, serving, wait_for

from dspine_local import GREEDY, Engine

pytestmark = [pytest.mark.native, pytest.mark.slow]

SECONDS = int(os.environ.get("DSPINE_SOAK_SECONDS", "10"))
WARM_UP_S = max(8, SECONDS // 3)
MAX_GROWTH_MIB = 24
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "def fibonacci(n):",
    "The sky is blue because",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
]


@pytest.fixture(scope="module")
def server(smollm2: SmolFactory, trained_drafter: Path) -> Iterator[RunningServer]:
    engine = Engine(smollm2("q8_0"), trained_drafter, n_ctx=1024, n_parallel=4)
    with serving(engine) as running:
        yield running


def resident_mib() -> float:
    """Of this process, which the server is a part of."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_many_clients(server: RunningServer, smollm2: SmolFactory) -> None:
    plain = Engine(smollm2("q8_0"), n_ctx=256)
    expected = {p: plain.generate(p, max_tokens=40, sampling=GREEDY).read() for p in PROMPTS}
    del plain
    n_warm, wrong = crowd(server, expected, n_clients=8, seconds=WARM_UP_S)
    before = resident_mib()
    n_finished, more = crowd(server, expected, n_clients=8, seconds=SECONDS)
    growth = resident_mib() - before
    assert wrong + more == []
    assert n_warm > 0
    assert n_finished > 0
    assert wait_for(server.is_idle) < 1
    assert server.state.engine._events == {}
    assert server.state.engine._left == set()
    assert growth < MAX_GROWTH_MIB, f"{growth:.1f} MiB more after {n_finished} answers"
    print(f"{n_finished} answers in {SECONDS} s, {growth:+.1f} MiB")
