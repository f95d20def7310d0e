"""The command line: exit codes, one-line errors, JSON, and no half-written file. Each command runs in this process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DrafterFactory, TargetFactory

from dspine_local import _native
from dspine_local.cli import main


@pytest.fixture(scope="module")
def pair(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    target = tiny_target("qwen3", "q8_0")
    drafter = tmp_path_factory.mktemp("cli") / "drafter.gguf"
    assert main(["convert", str(tiny_drafter(target)), "-o", str(drafter), "--target", str(target.path)]) == 0
    return str(target.path), str(drafter)


def generate(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, object]:
    """Run ``generate --json``; the printed object."""
    capsys.readouterr()
    assert main(["generate", "--json", "--temp", "0", "-n", "24", "-c", "512", *args]) == 0
    printed: dict[str, object] = json.loads(capsys.readouterr().out)
    return printed


def test_json_of_generate(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = pair
    plain = generate(capsys, "-m", target, "-p", "Hello", "--raw")
    drafted = generate(capsys, "-m", target, "-md", drafter, "-p", "Hello", "--raw", "--n-draft", "5")
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["text"] == plain["text"]
    assert drafted["prompt_tokens"] == plain["prompt_tokens"]
    stats = drafted["stats"]
    assert isinstance(stats, dict)
    assert {"rounds", "drafted", "accepted", "acceptance_length"} <= set(stats)
    assert stats["generated"] == len(plain["tokens"]) == 24  # type: ignore[arg-type]


def test_the_chat_template_is_applied_unless_raw(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    raw = generate(capsys, "-m", pair[0], "-p", "Hello", "--raw")
    chat = generate(capsys, "-m", pair[0], "-p", "Hello")
    system = generate(capsys, "-m", pair[0], "-p", "Hello", "-sys", "Be brief.")
    assert raw["prompt_tokens"] < chat["prompt_tokens"] < system["prompt_tokens"]  # type: ignore[operator]


def test_text_on_stdout_statistics_on_stderr(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    expected = generate(capsys, "-m", pair[0], "-p", "Hello")["text"]
    assert main(["generate", "-m", *pair[:1], "-md", pair[1], "-p", "Hello", "--temp", "0", "-n", "24"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{expected}\n"
    assert "acceptance length" in printed.err


def test_prompt_from_file_and_stdin(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    file = tmp_path / "prompt.txt"
    file.write_text("Hello", encoding="utf-8")
    expected = generate(capsys, "-m", pair[0], "-p", "Hello")
    assert generate(capsys, "-m", pair[0], "-f", str(file))["tokens"] == expected["tokens"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    assert generate(capsys, "-m", pair[0], "-p", "-")["tokens"] == expected["tokens"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-m", "nowhere.gguf"], "no such file: 'nowhere.gguf'"),
        (["-m", "TARGET", "-md", "nowhere.gguf"], "no such file: 'nowhere.gguf'"),
        (["-m", "TARGET", "-md", "TARGET"], "expected a drafter"),
        (["-m", "DRAFTER"], "expected a target"),
        (["-m", "TARGET", "-md", "DRAFTER", "--n-draft", "99"], "n_draft = 99, expected 0 to 15"),
        (["-m", "TARGET", "-c", "16"], "tokens, the context holds 16"),
        (["-m", "TARGET", "--temp", "-1"], "temperature = -1"),
        (["-m", "TARGET", "--raw", "-sys", "x"], "--raw"),
        (["-m", "."], "not a regular file"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    names = {"TARGET": pair[0], "DRAFTER": pair[1]}
    code = main(["generate", "-p", "some words, more than sixteen bytes", *(names.get(a, a) for a in args)])
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err


def test_wrong_usage_is_exit_code_2() -> None:
    for args in ([], ["generate"], ["nonsense"], ["convert"]):
        with pytest.raises(SystemExit) as exit_info:
            main(args)
        assert exit_info.value.code == 2


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("convert", "inspect", "parity", "generate", "demo"):
        with pytest.raises(SystemExit) as exit_info:
            main([command, "--help"])
        assert exit_info.value.code == 0
        assert f"dspine-local {command}" in capsys.readouterr().out


def test_unexpected_errors_are_exit_code_1_and_debug_shows_where(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr("dspine_local.engine.load_models", broken)
    assert main(["generate", "-m", pair[0], "-p", "x"]) == 1
    assert "internal error" in capsys.readouterr().err
    assert main(["--debug", "generate", "-m", pair[0], "-p", "x"]) == 1
    _native.set_log_verbose(False)
    assert "Traceback" in capsys.readouterr().err


def test_interrupt_is_exit_code_130(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dspine_local.engine.load_models", interrupted)
    assert main(["generate", "-m", pair[0], "-p", "x"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.slow
def test_a_real_interrupt_ends_an_answer(pair: tuple[str, str]) -> None:
    command = [
        sys.executable,
        "-m",
        "dspine_local",
        "generate",
        "-m",
        pair[0],
        "-md",
        pair[1],
        "-p",
        "x",
        "--ignore-eos",
    ]
    env = os.environ | {"OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(
        [*command, "-c", "4096"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # it is answering
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_parity_passes_and_fails(golden_case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    assert main(["parity", str(golden_case), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"]
    assert max(array["error"] for array in result["arrays"]) < 1e-5
    broken = tmp_path / "broken"
    shutil.copytree(golden_case, broken)
    with np.load(broken / "case.npz") as file:
        arrays = dict(file)
    arrays["final_hidden"] = arrays["final_hidden"] * 1.001
    arrays["selected"] = arrays["selected"][::-1].copy()
    np.savez(broken / "case.npz", **arrays)
    assert main(["parity", str(broken)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 4  # the case, the array, both drafts


def test_parity_of_a_bad_case(golden_case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", str(tmp_path)]) == 2
    assert "case.npz" in capsys.readouterr().err
    shutil.copytree(golden_case / "drafter", tmp_path / "drafter")
    (tmp_path / "case.npz").write_bytes(b"not a zip")
    assert main(["parity", str(tmp_path)]) == 2
    assert "readable" in capsys.readouterr().err


@pytest.mark.slow
def test_demo_shows_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "-n", "16"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["same_text"]
    assert len(result["answers"]) == 3
    for answer in result["answers"]:
        assert answer["plain_text"] == answer["drafted_text"] != ""
        assert answer["drafted"]["drafted"] > 0
