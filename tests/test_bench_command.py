"""``dspine-local bench`` as a whole, on a tiny pair: its JSON, exit codes, and what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from bench_rig import completion, server

from dspine_local.bench import run as bench_run
from dspine_local.bench.run import Measurement
from dspine_local.cli import bench, main

SPREAD = {
    "type": ["object", "null"],
    "required": ["n", "q1", "median", "q3"],
    "properties": {name: {"type": "number", "minimum": 0} for name in ("n", "q1", "median", "q3")},
    "additionalProperties": False,
}
COUNTS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
SHARES = {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}}
RESULT = {
    "type": "object",
    "properties": {
        "system": {"type": "string"},
        "category": {"type": "string"},
        "n_answers": {"type": "integer"},
        "n_short": {"type": "integer"},
        "tokens_per_second": SPREAD,
        "speedup": SPREAD,
        "acceptance_length": {"type": ["number", "null"], "minimum": 1},
        "prefill_s": {"type": ["number", "null"]},
        "shares": {"type": ["object", "null"], "required": ["draft", "verify", "rest"]},
        "accepted_per_position": SHARES,
        "rounds_per_draft_length": COUNTS,
    },
    "additionalProperties": False,
}
RESULT["required"] = list(RESULT["properties"])  # type: ignore[call-overload]
POINTS = {"type": "array", "items": {"type": "array", "minItems": 2, "maxItems": 2}}
SCHEMA = {
    "type": "object",
    "properties": {
        "format": {"const": 1},
        "identical": {"type": "boolean"},
        "simulated": {"type": "boolean"},
        "n_replaced": {"type": "integer", "minimum": 0},
        "setting": {
            "type": "object",
            "required": [
                *("date", "machine", "versions", "target", "drafter", "device", "max_draft", "n_threads"),
                *("engine_options", "endpoints", "run"),
            ],
            "properties": {
                "machine": {"required": ["processor", "cores", "memory_bytes", "system", "load_average"]},
                "versions": {"required": ["dspine-local", "llama-cpp-python", "python", "commit"]},
                "target": {"required": ["file", "architecture", "name", "parameters", "bytes", "types"]},
                "run": {"required": ["prompts", "n_prompts", "limit", "max_tokens", "repetitions", "seed"]},
            },
        },
        "profile": {"type": ["object", "null"], "required": ["name", "source", "acceptance"]},
        "results": {"type": "array", "items": RESULT, "minItems": 1},
        "differences": {"type": "array", "items": {"required": ["system", "category", "prompt", "position"]}},
        "endpoints": {"type": "array", "items": {"required": ["system", "clock", "n_answers", "n_same_text"]}},
        "costs": {"type": ["object", "null"], "properties": {"verify": POINTS, "draft": POINTS}},
        "answers": {
            "type": "array",
            "items": {
                "required": [
                    *("system", "prompt", "repetition", "n_tokens", "n_timed", "timed_s", "prefill_s", "n_rounds")
                ]
            },
        },
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]


@pytest.fixture
def command(tiny_pair: tuple[Path, Path]) -> list[str]:
    """The command with a tiny pair, short enough for a test."""
    target, drafter = map(str, tiny_pair)
    # Settings under which a tiny target's logits do not depend on the batch (tiny_models.py).
    exact = ["-t", "1", "-fa", "on", "-ub", "32"]
    return ["bench", "-m", target, "-md", drafter, "--limit", "1", "-n", "12", "--repetitions", "2", *exact]


def run_json(capsys: pytest.CaptureFixture[str], args: Sequence[str], code: int = 0) -> dict[str, Any]:
    """The printed object, checked against the schema."""
    capsys.readouterr()
    assert main([*args, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, SCHEMA)
    return found


def test_all_modes(command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = run_json(capsys, [*command, "--plot", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["acceptance.png", "costs.png", "speedup.png"]
    assert found["identical"]
    assert not found["simulated"]
    assert len(found["answers"]) == 4 * 4 * 2
    over_all = {r["system"]: r for r in found["results"] if r["category"] == "all"}
    assert list(over_all) == ["plain", "fixed:3", "fixed:7", "auto"]
    assert {r["category"] for r in found["results"]} == {"chat", "code", "math", "writing", "all"}
    assert over_all["plain"]["acceptance_length"] == 1
    assert over_all["plain"]["speedup"]["median"] == 1
    assert len(over_all["fixed:7"]["accepted_per_position"]) == 7
    assert sum(over_all["fixed:3"]["shares"].values()) == pytest.approx(1)
    assert found["setting"]["target"]["types"]["q8_0"] > 0
    assert found["setting"]["n_threads"] == 1
    assert found["setting"]["run"]["n_prompts"] == 4


def test_table(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--compare", "plain,fixed:2", "--temp", "0.8"]) == 0
    printed = capsys.readouterr().out
    assert "All modes gave the same answers." in printed
    assert re.search(r"it pays: [0-9.]+ with drafts of 1, [0-9.]+ with drafts of 3", " ".join(printed.split()))
    assert "fixed:2" in printed
    assert "auto" not in printed
    assert "SIMULATED" not in printed


def test_without_a_drafter(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, command[:3] + command[5:])
    assert {r["system"] for r in found["results"]} == {"plain"}
    assert found["costs"] is found["setting"]["drafter"] is None


def test_simulated_acceptance(command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "sure.json"
    file.write_text(json.dumps({"acceptance": [1.0] * 15}))
    args = [*command, "--compare", "plain,fixed:3", "--acceptance-profile"]
    found = run_json(capsys, [*args, str(file)])
    assert found["simulated"]
    assert found["identical"]
    over_all = {r["system"]: r for r in found["results"] if r["category"] == "all"}
    assert over_all["plain"]["acceptance_length"] == 1
    assert over_all["fixed:3"]["acceptance_length"] > 3.5
    assert over_all["fixed:3"]["accepted_per_position"] == [1, 1, 1]
    assert main([*args, "qwen3-8b"]) == 0
    assert "ACCEPTANCE IS SIMULATED, by the profile 'qwen3-8b'" in capsys.readouterr().out


def test_modes_that_differ_are_exit_code_1_and_loud(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def differing(*args: Any, **options: Any) -> list[Measurement]:
        found = bench_run.run_systems(*args, **options)
        last = found[-1]
        return [*found[:-1], replace(last, answer=replace(last.answer, tokens=(0,)))]

    monkeypatch.setattr(bench, "run_systems", differing)
    assert main([*command, "--compare", "plain,fixed:2"]) == 1
    printed = capsys.readouterr()
    assert "THE MODES DID NOT GIVE THE SAME ANSWERS: 1 differ" in printed.err
    assert "gave the same answers" not in printed.out
    assert not run_json(capsys, [*command, "--compare", "plain,fixed:2"], code=1)["identical"]


def test_a_server_beside_our_modes(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    timings = {"predicted_n": 12, "predicted_ms": 1000.0, "draft_n": 9, "draft_n_accepted": 6}
    args = [*command, "--compare", "plain,fixed:3"]
    with server(lambda _: completion("x", timings=timings)) as (url, requests):
        found = run_json(capsys, [*args, "--endpoint", f"llama-server={url}"])
    assert [a["system"] for a in found["answers"][:6]] == [
        *("plain", "fixed:3", "llama-server"),
        *("fixed:3", "llama-server", "plain"),
    ]
    assert len(requests) == 1 + 8
    result = next(r for r in found["results"] if r["system"] == "llama-server" and r["category"] == "all")
    assert result["tokens_per_second"]["median"] == pytest.approx(11.0)
    assert result["acceptance_length"] == pytest.approx(11 / 5)
    assert found["endpoints"] == [{"system": "llama-server", "clock": "timings", "n_answers": 8, "n_same_text": 0}]
    assert found["setting"]["endpoints"] == [{"name": "llama-server", "url": url, "model": "the model"}]
    with server(lambda _: completion("x", usage={"completion_tokens": 12})) as (url, _):
        assert main([*args, "--endpoint", f"other={url}"]) == 0
    assert "other: it tells no timings: WALL TIME" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_exit_code_1(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with server(json.dumps) as (url, _):
        pass
    assert main([*command, "--endpoint", f"gone={url}"]) == 1
    printed = capsys.readouterr().err
    assert "the endpoint 'gone'" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0"], "--predict 0, expected an integer from 1"),
        (["--limit", "0"], "--limit 0, expected an integer from 1"),
        (["--repetitions", "0"], "--repetitions 0, expected an integer from 1"),
        (["--seed", "-1"], "--seed -1, expected an integer from 0 to 4294967295"),
        (["--temp", "-1"], "--temp -1.0, expected a finite number of at least 0"),
        (["--compare", "fast"], "--compare 'fast', expected different modes of plain, fixed:K and auto"),
        (["--compare", "fixed:16"], "--compare 'fixed:16', expected drafts of 15 tokens at most"),
        (["--endpoint", "localhost"], "--endpoint 'localhost', expected NAME=URL"),
        (["--endpoint", "auto=http://h"], "--endpoint 'auto', expected a name that no other endpoint and no mode has"),
        (["--acceptance-profile", "nowhere"], "no such file: 'nowhere'"),
        (["--acceptance-profile", "qwen3-8b", "--temp", "1"], "needs a drafter (-md) and temperature 0"),
        (["--prompts", "nowhere.jsonl"], "no prompts in 'nowhere.jsonl'"),
        (["-c", "64", "-n", "60"], "more than the context of"),
        (["--plot", "nowhere/x"], "no such folder: 'nowhere'"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    command: list[str], capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert main([*command, *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_modes_that_draft_need_a_drafter(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--compare", "plain,auto"], ["--acceptance-profile", "qwen3-8b"]):
        assert main([*command[:3], *args]) == 2
        assert "needs a drafter" in capsys.readouterr().err


def test_repeated_prompts_are_refused(command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "twice.jsonl"
    file.write_text('{"prompt": "x"}\n{"prompt": "y"}\n{"prompt": "x"}\n')
    command[command.index("--limit") + 1] = "3"
    assert main([*command, "--prompts", str(file)]) == 2
    printed = capsys.readouterr().err
    assert "prompts 1 and 3 are the same ('x'), expected different ones" in printed
    assert printed.count("\n") == 1


def test_an_interrupt_leaves_nothing(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")

    def answer(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dspine_local.bench.endpoint.Endpoint.answer", answer)
    with server(json.dumps) as (url, _):
        assert main([*command, "--endpoint", url, "--plot", str(tmp_path), "--json"]) == 130
    assert capsys.readouterr() == ("", "\ninterrupted\n")
    assert list(tmp_path.iterdir()) == []
