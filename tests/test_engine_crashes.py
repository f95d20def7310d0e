"""Requests that could end the whole process, each in one of its own: what is wrong with a request is its own error."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from tiny_models import write_tiny_target

pytestmark = pytest.mark.native

MEMORY = 4 << 30
PROGRAM = """
import sys
from dspine_local._native import Engine, SamplingParams, Target
engine = Engine(Target(sys.argv[1], n_ctx=256, n_threads=1))
BANNED = float("-inf")

def ask(**options):
    params = SamplingParams()
    for name, value in {"temperature": 0.0, "seed": 1, **options}.items():
        setattr(params, name, value)
    engine.submit([1, 2, 3], params, max_tokens=12)
    events = []
    while engine.has_work():
        events += engine.step()
    return events[-1].finish_reason, events[-1].error

try:
    print(*REQUEST)
except ValueError as e:
    print("refused", e)
print(*ask())
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last token ends the answer, as in some real vocabularies: a sampler takes it when nothing else is left."""
    tiny = write_tiny_target(tmp_path_factory.mktemp("crash") / "target.gguf", "llama", qtype="q8_0")
    reader = gguf.GGUFReader(tiny.path, "r+")
    field = reader.fields["tokenizer.ggml.eos_token_id"]
    field.parts[field.data[0]][0] = tiny.n_vocab - 1
    reader.data.flush()
    return tiny.path


def run(target: Path, request: str) -> list[str]:
    """The lines that one request and a healthy one after it print."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("REQUEST", request), str(target)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=limit,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.splitlines()


def test_a_healthy_request(target: Path) -> None:
    assert run(target, "ask(grammar='root ::= \"ab\"')") == ["stop ", "length "]


def test_nothing_left_that_the_grammar_allows(target: Path) -> None:
    """The grammar wants "abc", the bias bans every token that could continue it: no token is left, no end either."""
    request = (
        'ask(grammar=\'root ::= "ab" "c"\', temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, '
        "logit_bias=[(i, BANNED) for i in range(384) if i not in (64, 65)])"
    )
    first, second = run(target, request)
    assert first.startswith("error ")
    assert second == "length "


def test_a_deeply_nested_grammar(target: Path) -> None:
    first, second = run(target, "ask(grammar='root ::= ' + '(' * 50_000 + '\"a\"' + ')' * 50_000)")
    assert first.startswith("refused ")
    assert second == "length "


@pytest.mark.parametrize("setting", ["repeat_penalty=1.1, repeat_last_n", "dry_multiplier=1.0, dry_penalty_last_n"])
def test_looking_back_further_than_the_context(target: Path, setting: str) -> None:
    assert run(target, f"ask({setting}=2**31 - 1)") == ["length ", "length "]


def test_an_error_about_half_a_character(target: Path) -> None:
    request = "ask(grammar='root ::= \"ab\"', ignore_eos=True, temperature=1.0, top_k=0, typical_p=0.5)"
    first, second = run(target, request)
    assert first.startswith("error ")
    assert second == "length "
