"""The command line: exit codes, one-line errors, JSON, and no half-written file. Each command runs in this process."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DrafterFactory, TargetFactory

from dspine_local import _native
from dspine_local.cli import COMMANDS, build_parser, main
from dspine_local.cli.arguments import sampling_options
from dspine_local.options import SamplingOptions


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
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello")))
    assert generate(capsys, "-m", pair[0], "-p", "-")["tokens"] == expected["tokens"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-m", "nowhere.gguf"], "no such file: 'nowhere.gguf'"),
        (["-m", "TARGET", "-md", "nowhere.gguf"], "no such file: 'nowhere.gguf'"),
        (["-m", "TARGET", "-md", "TARGET"], "expected a drafter"),
        (["-m", "DRAFTER"], "expected a target"),
        (["-m", "TARGET", "-md", "DRAFTER", "--n-draft", "99"], "--n-draft 99, expected 0 to 15"),
        (["-m", "TARGET", "-c", "16"], "tokens, the context holds 16"),
        (["-m", "TARGET", "--temp", "-1"], "--temp -1.0, expected a finite number of at least 0"),
        (["-m", "TARGET", "-c", "99999999999"], "--ctx-size 99999999999, expected an integer from 0 to 2147483647"),
        (["-m", "TARGET", "-ngl", "-7"], "--gpu-layers -7, expected an integer from -1 to"),
        (["-m", "TARGET", "-n", "99999999999"], "--predict 99999999999, expected an integer from -1 to"),
        (["-m", "TARGET", "-t", "513"], "--threads 513, expected an integer from 0 to 512"),
        (["-m", "TARGET", "-tb", "-2"], "--threads-batch -2, expected an integer from 0 to 512"),
        (["-m", "TARGET", "-b", "0"], "--batch-size 0, expected an integer from 1 to"),
        (["-m", "TARGET", "-md", "DRAFTER", "--n-draft", "-1"], "--n-draft -1, expected an integer from 0 to"),
        (["-m", "TARGET", "-s", "-2"], "--seed -2, expected an integer from -1 to 4294967295"),
        (["-m", "TARGET", "-s", "99999999999"], "--seed 99999999999, expected"),
        (["-m", "TARGET", "--top-p", "95"], "--top-p 95.0, expected a number from 0 to 1"),
        (["-m", "TARGET", "--xtc-probability", "5"], "--xtc-probability 5.0, expected a number from 0 to 1"),
        (["-m", "TARGET", "--temp", "1e39"], "--temp 1e+39, expected a finite number"),
        (["-m", "TARGET", "--repeat-penalty", "0"], "--repeat-penalty 0.0, expected a number above 0"),
        (["-m", "TARGET", "--dry-allowed-length", "-1"], "--dry-allowed-length -1, expected an integer from 0"),
        (["-m", "TARGET", "-l", "5+nan"], "--logit-bias nan, expected a finite number"),
        (["-m", "TARGET", "--stop", ""], "--stop '', expected at least one character"),
        (["-m", "TARGET", "-ctkd", "q8_0"], "--cache-type-v-draft f16, expected the same"),
        (["-m", "TARGET", "--grammar-file", "nowhere.gbnf"], "No such file or directory: 'nowhere.gbnf'"),
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


def test_what_llama_cpp_takes_is_taken(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    plain = generate(capsys, "-m", pair[0], "-p", "Hello")["tokens"]
    for args in ("-ngl all", "-ngl 99", "-t -1", "-tb 1", "-s -1", "--top-k 0", "--top-k -5", "--temperature 0"):
        assert generate(capsys, "-m", pair[0], "-p", "Hello", *args.split())["tokens"] == plain
    banned = generate(capsys, "-m", pair[0], "-p", "Hello", "-l", f"{plain[0]}-inf")["tokens"]  # type: ignore[index]
    assert plain[0] not in banned  # type: ignore[index, operator]
    types = ("-ctkd", "f32", "--spec-draft-type-v", "f32")
    assert generate(capsys, "-m", pair[0], "-md", pair[1], "-p", "Hello", *types)["tokens"] == plain


def test_every_sampling_option_has_an_argument() -> None:
    """And each argument reaches its option."""
    values = {
        "--seed": 7, "--temp": 0.5, "--top-k": 11, "--top-p": 0.25, "--min-p": 0.125, "--typical": 0.75,
        "--top-nsigma": 1.5, "--xtc-probability": 0.5, "--xtc-threshold": 0.25, "--dynatemp-range": 0.25,
        "--dynatemp-exp": 2.0, "--repeat-last-n": 5, "--repeat-penalty": 1.5, "--presence-penalty": 0.5,
        "--frequency-penalty": 0.75, "--dry-multiplier": 0.5, "--dry-base": 1.25, "--dry-allowed-length": 3,
        "--dry-penalty-last-n": 9, "--min-keep": 2,
        "--samplers": "top_k;temperature", "--dry-sequence-breaker": "x",
        "--logit-bias": "5-2", "--grammar": 'root ::= "a"',
    }  # fmt: skip
    words = [word for flag, value in values.items() for word in (flag, str(value))]
    chosen = sampling_options(build_parser().parse_args(["generate", "-m", "x", "-p", "y", "--ignore-eos", *words]))
    expected = SamplingOptions(
        seed=7, temperature=0.5, top_k=11, top_p=0.25, min_p=0.125, typical_p=0.75, top_n_sigma=1.5,
        xtc_probability=0.5, xtc_threshold=0.25, dynatemp_range=0.25, dynatemp_exponent=2.0, repeat_last_n=5,
        repeat_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.75, dry_multiplier=0.5, dry_base=1.25,
        dry_allowed_length=3, dry_penalty_last_n=9, min_keep=2, samplers=("top_k", "temperature"),
        dry_sequence_breakers=("x",), logit_bias=((5, -2.0),), ignore_eos=True,
        grammar='root ::= "a"',
    )  # fmt: skip
    assert chosen == expected
    default = SamplingOptions()
    assert all(getattr(chosen, f.name) != getattr(default, f.name) for f in dataclasses.fields(default))


def test_options_are_those_that_the_documents_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag in README.md and docs/options.md exists, unless it is said to be llama.cpp's alone."""
    known = {"--spec-draft-n-max", "--ctx-checkpoints", "--main-gpu"}  # llama.cpp's
    known |= {"--help", "--no-cache-dir", "-d"}  # argparse's, pip's, curl's
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known |= set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", capsys.readouterr().out))
    for name in ("README.md", "docs/options.md"):
        text = (Path(__file__).parents[1] / name).read_text(encoding="utf-8")
        flags = set(re.findall(r"(?<=[` ])--?[a-z][a-z-]*(?=[`\s\]])", text))
        assert len(flags) > 10
        assert sorted(flags - known) == []


def test_grammar_from_a_file(pair: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "answer.gbnf"
    file.write_text('root ::= "yes"')
    assert generate(capsys, "-m", pair[0], "-p", "Hello", "--grammar-file", str(file))["text"] == "yes"
    for content, message in ((b"\xff", "has the byte 0xff at byte 0"), (b" ", "is empty")):
        file.write_bytes(content)
        assert main(["generate", "-m", pair[0], "-p", "Hello", "--grammar-file", str(file)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("source", ["argument", "stdin", "file", "system", "stop", "grammar"])
def test_text_that_is_not_utf8_is_named(
    source: str,
    pair: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import io

    raw = "é".encode() + b"\xff!"
    argument = os.fsdecode(raw)
    file = tmp_path / "prompt.txt"
    file.write_bytes(raw)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    args, name = {
        "argument": (["-p", argument], "--prompt"),
        "stdin": (["-p", "-"], "the prompt on stdin"),
        "file": (["-f", str(file)], f"the file '{file}'"),
        "system": (["-p", "x", "-sys", argument], "--system-prompt"),
        "stop": (["-p", "x", "--stop", argument], "--stop"),
        "grammar": (["-p", "x", "--grammar", argument], "--grammar"),
    }[source]
    assert main(["generate", "-m", pair[0], *args]) == 2
    assert capsys.readouterr().err == f"dspine-local: {name} has the byte 0xff at byte 2, expected UTF-8\n"


def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for args in ([], ["generate"], ["nonsense"], ["convert"], ["generate", "-t", "x"]):
        with pytest.raises(SystemExit) as exit_info:
            main(args)
        assert exit_info.value.code == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        assert "--help" in printed


def test_a_full_disk_is_no_wrong_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dspine_local.cli.inspect.summarize", full)
    assert main(["inspect", "x"]) == 1
    assert "No space left" in capsys.readouterr().err


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
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


INTERRUPT_AT_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)
from dspine_local.command import main
sys.argv[1:] = ["inspect", "nowhere.gguf"]
sys.exit(main())
"""


@pytest.mark.parametrize(
    "module", ["dspine_local.cli", "dspine_local._native", "numpy", "rich", "jinja2", "dspine_local.cli.train"]
)
def test_an_interrupt_while_modules_load_is_quiet(module: str) -> None:
    script = INTERRUPT_AT_IMPORT.replace("sys.argv[1]", repr(module))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["generate", "--help"],
        ["inspect", "TARGET"],
        ["convert", "--help"],
        ["fit", "-m", "TARGET"],
        ["fit", "-m", "TARGET", "--json"],
        ["doctor"],
    ],
)
def test_a_reader_that_leaves_ends_the_command_quietly(pair: tuple[str, str], command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dspine_local", *(pair[0] if c == "TARGET" else c for c in command)],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_a_reader_that_leaves_ends_an_answer(pair: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "dspine_local", "generate", "-m", pair[0], "-p", "x", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141


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
    assert main(["demo", "--json", "-n", "16", "--n-draft", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["same_text"]
    assert len(result["answers"]) == 3
    for answer in result["answers"]:
        assert answer["plain_text"] == answer["drafted_text"] != ""
        assert answer["drafted"]["drafted"] > 0


@pytest.mark.slow
def test_a_terminated_command_leaves_nothing_half_written(tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from dspine_local import cli
from dspine_local.files import write_whole

def run(_argv=None):
    def write(partial):
        partial.write_text("half")
        print("ready", flush=True)
        time.sleep(60)
    write_whole(Path(sys.argv[1]), write)

cli.main = run
from dspine_local.command import main
sys.exit(main())
"""
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.terminate()
        assert process.wait(20) == 143
    assert list(tmp_path.iterdir()) == []
