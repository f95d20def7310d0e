"""Training stages on a tiny target: seconds on a CPU."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TinyTarget

torch = pytest.importorskip("torch")

from dspine_local import _native  # noqa: E402
from dspine_local.cli import main  # noqa: E402
from dspine_local.convert import convert_checkpoint  # noqa: E402
from dspine_local.errors import BackendError  # noqa: E402
from dspine_local.train.acceptance import greedy_draft  # noqa: E402
from dspine_local.train.data import DataOptions, complete_shards, count_answer_tokens, read_shard  # noqa: E402
from dspine_local.train.export import load_checkpoint  # noqa: E402
from dspine_local.train.features import FeatureReader, FeatureSet  # noqa: E402
from dspine_local.train.losses import Objective  # noqa: E402
from dspine_local.train.model import Drafter  # noqa: E402
from dspine_local.train.options import TrainOptions  # noqa: E402
from dspine_local.train.pipeline import (  # noqa: E402
    DrafterOptions,
    PipelineOptions,
    checkpoint_folder,
    run_data,
    run_features,
    run_training,
)
from dspine_local.train.prompts import read_prompts  # noqa: E402
from dspine_local.train.torch_target import TorchTarget  # noqa: E402
from dspine_local.train.weights import TargetWeights  # noqa: E402

WORDS = ("the", "ring", "on", "there", "when", "other", "words", "about", "what", "can", "they", "said", "how")


def silent(_done: int, _total: int, _label: str) -> None:
    """No progress bar."""


@pytest.fixture(scope="module")
def prepared(tiny_target: Callable[..., TinyTarget], tmp_path_factory: pytest.TempPathFactory) -> PipelineOptions:
    """Data and features of a tiny target."""
    folder = tmp_path_factory.mktemp("train")
    rng = random.Random(0)
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(" ".join(rng.choices(WORDS, k=5)) for _ in range(60)))
    options = PipelineOptions(
        target=tiny_target("llama").path,
        out=folder / "out",
        data=DataOptions(n_tokens=2000, prompts=prompts, max_answer=48, shard_size=40, n_parallel=8),
        drafter=DrafterOptions(n_layers=2, block_size=4, rank=32, message_size=16, top_k=8),
        train=TrainOptions(
            n_steps=30,
            n_sequences=4,
            n_anchors=8,
            warmup=5,
            eval_every=15,
            save_every=10,
            n_held_out=4,
            learning_rate=3e-3,
            l1_from=1.0,
            objective=Objective(n_frequent=256, n_sampled=64),
        ),
    )
    run_data(options, silent)
    run_features(options, silent)
    return options


def losses(options: PipelineOptions) -> list[float]:
    """Losses of the run's log."""
    lines = (options.run_folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def states(options: PipelineOptions) -> dict[str, Any]:
    """The run's saved weights."""
    state: dict[str, Any] = torch.load(options.run_folder / "state.pt", weights_only=True)
    return state


def test_data_has_whole_answers(prepared: PipelineOptions) -> None:
    shards = complete_shards(prepared.out / "data")
    assert len(shards) == 2
    sequences = read_shard(shards[0])
    assert {s.temperature for s in sequences} == {0.0, 0.7}
    assert all(0 < s.n_answer <= 48 for s in sequences)
    assert count_answer_tokens(prepared.out / "data") >= 2000


def test_data_resumes_to_the_same_shards(prepared: PipelineOptions) -> None:
    shard = complete_shards(prepared.out / "data")[1]
    before = shard.read_bytes()
    shard.unlink()
    run_data(prepared, silent)
    assert shard.read_bytes() == before


def test_other_options_are_refused(prepared: PipelineOptions) -> None:
    other = replace(prepared, data=replace(prepared.data, seed=1))
    with pytest.raises(ValueError, match="made with seed = 0, now 1"):
        run_data(other, silent)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_both_feature_readers_agree(tiny_target: Callable[..., TinyTarget], arch: str) -> None:
    path = tiny_target(arch).path
    tokens = list(range(40, 80))
    taps, hidden = FeatureReader(path, [0, 2]).read(tokens)
    for dtype, limit in ((torch.float32, 2e-2), (torch.bfloat16, 5e-2)):
        by_torch = TorchTarget(TargetWeights(path), dtype=dtype).read(torch.tensor([tokens]), [0, 2])
        for a, b in zip((taps, hidden), (rows[0].numpy() for rows in by_torch), strict=True):
            assert np.linalg.norm(a - b) / np.linalg.norm(b) < limit


def test_features_are_of_the_data(prepared: PipelineOptions) -> None:
    features = FeatureSet(prepared.out / "data", prepared.out / "features")
    weights = TargetWeights(prepared.target)
    greedy = next(i for i, s in enumerate(features.sequences) if s.temperature == 0)
    row = features.rows([greedy])[0]
    logits = row.hidden.astype(np.float32) @ weights.head.T
    first = row.sequence.answer_start
    chosen = logits[first - 1 : -1].argmax(axis=1)
    assert (chosen == row.sequence.tokens[first:]).mean() > 0.9
    used = row.taps[first:].astype(np.float32).reshape(-1, len(features.taps), weights.shape("output_norm.weight")[0])
    sizes = np.sqrt((used**2).mean(axis=(0, 2))) / features.scales
    assert np.all((sizes > 0.5) & (sizes < 2))


@pytest.mark.parametrize("kind", ["dspine", "dflash"])
def test_loss_falls(prepared: PipelineOptions, kind: str) -> None:
    options = replace(prepared, drafter=replace(prepared.drafter, kind=kind), run=f"falls-{kind}")
    acceptance = run_training(options, silent)
    assert acceptance is not None
    assert acceptance.length >= 1
    found = losses(options)
    assert found[-1] < found[0] - 0.5
    weights, config = (checkpoint_folder(options) / name for name in ("model.safetensors", "config.json"))
    assert weights.stat().st_mode == config.stat().st_mode  # others may read it


def test_resumed_equals_uninterrupted(prepared: PipelineOptions) -> None:
    whole = replace(prepared, run="whole")
    run_training(whole, silent)
    parts = replace(prepared, run="parts")

    def stop_at_13(done: int, _total: int, _label: str) -> None:
        if done == 13:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_training(parts, stop_at_13)
    assert states(parts)["progress"]["step"] == 13
    run_training(parts, silent)
    a, b = states(whole), states(parts)
    for what in ("drafter", "average"):
        for name, value in a[what].items():
            assert torch.equal(value, b[what][name]), name
    assert a["progress"] == b["progress"]
    assert run_training(parts, silent) is None


def test_resume_with_other_options_is_refused(prepared: PipelineOptions) -> None:
    options = replace(prepared, run="refused", train=replace(prepared.train, n_steps=2))
    run_training(options, silent)
    with pytest.raises(ValueError, match="n_steps = 2, now 3"):
        run_training(replace(options, train=replace(options.train, n_steps=3)), silent)


def test_divergence_keeps_the_last_good_state(prepared: PipelineOptions) -> None:
    options = replace(
        prepared, run="nan", train=replace(prepared.train, save_every=1, eval_every=1, learning_rate=3e-3)
    )

    def poison(done: int, _total: int, _label: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(options, poison)
    good = (options.run_folder / "state.pt").read_bytes()
    features = prepared.out / "features"
    kept = {path: path.read_bytes() for path in features.glob("*.npy")}
    try:
        for path in kept:
            rows = np.load(path)
            np.save(path, np.full_like(rows, np.nan))
        with pytest.raises(BackendError, match="diverged at step 1: loss nan"):
            run_training(options, silent)
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
    assert (options.run_folder / "state.pt").read_bytes() == good
    assert (checkpoint_folder(options) / "model.safetensors").is_file()


def test_torch_backend_gives_answers_with_features(
    prepared: PipelineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A random target's best tokens are close to each other: bfloat16 would choose others.
    monkeypatch.setattr("dspine_local.train.torch_target.fast_dtype", lambda _: torch.float32)
    options = replace(
        prepared, out=tmp_path, backend="torch", data=replace(prepared.data, n_tokens=500, greedy_share=1.0)
    )
    run_data(options, silent)
    features = tmp_path / "features"
    made = {path.name: path.read_bytes() for path in features.glob("*.npy")}
    assert made
    run_features(options, silent)
    native = replace(options, out=tmp_path / "native", backend="native")
    run_data(native, silent)
    ours, theirs = (read_shard(complete_shards(folder / "data")[0]) for folder in (tmp_path, native.out))
    same = [a.tokens[: a.answer_start + 8] == b.tokens[: b.answer_start + 8] for a, b in zip(ours, theirs, strict=True)]
    assert np.mean(same) > 0.8
    row = FeatureSet(tmp_path / "data", features).rows([0])[0]
    reader = FeatureReader(options.target, FeatureSet(tmp_path / "data", features).taps)
    taps, hidden = reader.read(row.sequence.tokens[:-1])
    for a, b in ((row.taps[:-1], taps), (row.hidden[:-1], hidden)):
        assert np.linalg.norm(a.astype(np.float32) - b) / np.linalg.norm(b) < 2e-2
    assert not row.hidden[-1].any()


def test_hidden_states_are_refused_where_there_are_none(tiny_target: Callable[..., TinyTarget]) -> None:
    path = str(tiny_target("llama").path)
    target = _native.Target(path)
    target.decode(0, [1, 2, 3])
    with pytest.raises(ValueError, match="without `hidden`"):
        target.hidden(3)
    target = _native.Target(path, hidden=True)
    logits = target.decode(0, [1, 2, 3], n_outputs=3)
    assert np.allclose(target.hidden(3) @ TargetWeights(Path(path)).head.T, logits, atol=1e-3)
    with pytest.raises(ValueError, match="4 rows wanted, the last decode had 3"):
        target.hidden(4)


def test_live_features_train_alike(prepared: PipelineOptions) -> None:
    stored = replace(prepared, run="stored", train=replace(prepared.train, n_steps=3))
    live = replace(stored, run="live", live_features=True)
    for options in (stored, live):
        run_training(options, silent)
    a, b = losses(stored), losses(live)
    assert np.allclose(a, b, rtol=2e-2)


@pytest.mark.parametrize("kind", ["dspine", "dflash"])
def test_trained_drafter_drafts_alike_in_pytorch_and_natively(
    prepared: PipelineOptions, tmp_path: Path, kind: str
) -> None:
    options = replace(prepared, drafter=replace(prepared.drafter, kind=kind), run=f"alike-{kind}")
    run_training(options, silent)
    path = tmp_path / "drafter.gguf"
    convert_checkpoint(checkpoint_folder(options), path, outtype="f32", target=options.target)
    shape, weights = load_checkpoint(checkpoint_folder(options))
    drafter = Drafter(shape)
    drafter.load_state_dict(weights)
    target = TargetWeights(options.target)
    embedding, head = torch.tensor(target.embedding), torch.tensor(target.head)
    native_target = _native.Target(str(options.target))
    native = _native.Drafter(str(path), native_target.tensors(), n_ctx=512, cache_type="f32")
    reader = FeatureReader(options.target, shape.taps)
    same = []
    for conversation in read_shard(complete_shards(options.out / "data")[0])[:10]:
        taps, _ = reader.read(conversation.tokens)
        with torch.no_grad():
            context = drafter.context(torch.tensor(taps)[None], torch.arange(len(taps))[None])
        native.truncate(0, 0)
        for place in range(conversation.answer_start, len(conversation.tokens), 6):
            native.commit(0, taps[native.length(0) : place])
            anchor = conversation.tokens[place]
            tokens = torch.tensor([anchor])
            with torch.no_grad():
                out = drafter(
                    [(k[:, :place], v[:, :place]) for k, v in context],
                    torch.tensor([[place]]),
                    embedding[tokens][None],
                    embedding[shape.mask_token_id],
                    drafter.code(tokens)[None] if shape.injection else None,
                )
                expected = greedy_draft(drafter, out, head, tokens, shape.block_size - 1)[0]
            found = native.draft([(0, anchor)], shape.block_size - 1)[0].tokens
            same += [a == b for a, b in zip(found, expected.tolist(), strict=True)]
    assert len(same) > 150
    assert np.mean(same) >= 0.99


@pytest.fixture(scope="module")
def arguments(prepared: PipelineOptions) -> list[str]:
    """A command that would go on with ``prepared``'s data and features."""
    d = prepared.data
    return [
        *("train", "--target", str(prepared.target), "--prompts", str(d.prompts), "--max-answer", str(d.max_answer)),
        *("--tokens", str(d.n_tokens), "--shard-size", str(d.shard_size), "--parallel", str(d.n_parallel)),
        *("--layers", "1", "--rank", "16", "--message-size", "8", "--top-k", "4", "--block-size", "4"),
        *("--steps", "2", "--sequences", "2", "--anchors", "4", "--eval-every", "2"),
    ]


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line of a command that ends with exit code 2."""
    capsys.readouterr()
    assert main(list(args)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def tree(folder: Path) -> set[Path]:
    """Everything in a folder."""
    return set(folder.rglob("*"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target", "nowhere.gguf"], "no such file: 'nowhere.gguf'"),
        (["--target", "PROMPTS"], "is not a readable GGUF file"),
        (["--target", "."], "is not a regular file"),
        (["--prompts", "nowhere.txt"], "no such file: 'nowhere.txt'"),
        (["--prompts", "."], "is a folder"),
        (["--tokens", "0"], "--tokens 0, expected an integer from 1 to"),
        (["--max-prompt", "-1"], "--max-prompt -1, expected an integer from 1 to"),
        (["--max-answer", "99999999"], "--max-answer 99999999, expected an integer from 1 to"),
        (["--max-answer", "100000"], "--max-answer 100000, expected an integer from 1 to"),
        (["--shard-size", "0"], "--shard-size 0, expected"),
        (["--parallel", "257"], "--parallel 257, expected an integer from 1 to 256"),
        (["--greedy-share", "nan"], "--greedy-share nan, expected a number from 0 to 1"),
        (["--layers", "0"], "--layers 0, expected an integer from 1 to 128"),
        (["--layers", "99999999"], "--layers 99999999, expected an integer from 1 to 128"),
        (["--block-size", "1"], "--block-size 1, expected an integer from 2 to 64"),
        (["--rank", "-1"], "--rank -1, expected"),
        (["--message-size", "0"], "--message-size 0, expected"),
        (["--top-k", "0"], "--top-k 0, expected an integer from 1 to 256"),
        (["--taps", "-1"], "--taps -1, expected"),
        (["--taps", "1", "1"], "--taps [1, 1], expected 1 to 64 different layers"),
        (["--taps", "99"], "--taps [99], expected layers from 0 to"),
        (["--mask-token", "999999"], "--mask-token 999999, expected an integer from 0 to"),
        (["--steps", "-1"], "--steps -1, expected"),
        (["--lr", "inf"], "--lr inf, expected"),
        (["--lr", "0"], "--lr 0.0, expected a number above 0"),
        (["--seed", "-1"], "--seed -1, expected an integer from 0 to"),
        (["-t", "513"], "--threads 513, expected an integer from 0 to 512"),
        (["--run", "data"], "expected the name of a folder"),
        (["--run", "../elsewhere"], "expected the name of a folder"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    prompts = arguments[arguments.index("--prompts") + 1]
    out = tmp_path / "out"
    given = [prompts if a == "PROMPTS" else a for a in args]
    assert message in refused(capsys, *arguments, "--out", str(out), *given)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"", "has no prompts"),
        ("p.txt", b"\n \n", "has no prompts"),
        ("p.txt", b"good\n\xff\n", "has the byte 0xff at byte 5, expected UTF-8"),
        ("p.jsonl", b"no json\n", "line 1 is not JSON"),
        ("p.jsonl", b'{"prompt": "x"}\n[1]\n', "line 2 has no prompt"),
        ("p.jsonl", b'{"prompt": 5}\n', "line 1 has no prompt"),
        ("p.jsonl", b'{"prompt": " "}\n', "line 1 has no prompt"),
        ("p.jsonl", b'{"prompt": "\\ud800"}\n', "line 1 has the lone surrogate U+D800"),
        ("p.jsonl", b"[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_wrong_prompts_are_named(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    file, out = tmp_path / name, tmp_path / "out"
    file.write_bytes(content)
    error = refused(capsys, *arguments, "--out", str(out), "--prompts", str(file))
    assert message in error
    assert str(file) in error
    assert not out.exists()


def test_a_line_end_inside_json_is_no_line_end(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "one\u2028two\x85three"}\n', encoding="utf-8")
    assert read_prompts(file) == [("p", "one\u2028two\x85three")]


def test_a_shard_whose_prompts_are_too_long_is_left_out(prepared: PipelineOptions, tmp_path: Path) -> None:
    """It used to be the end of the data."""
    file = tmp_path / "p.txt"
    long = "\n".join(["word " * 400] * 20)
    file.write_text(f"{long}\n" + "\n".join(f"short prompt {i}" for i in range(20)))
    data = replace(prepared.data, prompts=file, shard_size=20, n_tokens=100)
    assert run_data(replace(prepared, out=tmp_path / "out", data=data), silent) >= 100
    assert [path.name for path in complete_shards(tmp_path / "out" / "data")] == ["shard-00001.jsonl"]
    file.write_text(long)
    with pytest.raises(ValueError, match="has at most 160 tokens"):
        run_data(replace(prepared, out=tmp_path / "none", data=data), silent)


@pytest.mark.parametrize("kind", ["file", "below a file", "fifo", "link to nothing"])
def test_an_output_that_is_no_folder_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    out = tmp_path / "out"
    if kind == "fifo":
        os.mkfifo(out)
    elif kind == "link to nothing":
        out.symlink_to("nothing")
    else:
        out.write_text("precious")
    before = tree(tmp_path)
    given = out / "sub" if kind == "below a file" else out
    assert f"'{out}' is not a folder" in refused(capsys, *arguments, "--out", str(given))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("stage", ["data", "features", "train"])
def test_a_folder_of_another_target_is_refused(
    arguments: list[str],
    prepared: PipelineOptions,
    tiny_target: Callable[..., TinyTarget],
    capsys: pytest.CaptureFixture[str],
    stage: str,
) -> None:
    other = str(tiny_target("qwen3").path)
    before = tree(prepared.out)
    error = refused(capsys, *arguments, "--out", str(prepared.out), "--target", other, "--stage", stage)
    assert "was made with target = " in error
    assert tree(prepared.out) == before


@pytest.mark.parametrize("content", ["empty", "garbage", "cut", "folder", "list"])
@pytest.mark.parametrize(
    "name",
    [
        "run/state.pt",
        "data/options.json",
        "features/options.json",
        "features/scales.json",
        "data/shard-00000.jsonl",
        "features/shard-00000.npy",
    ],
)
def test_damaged_files_are_named(
    arguments: list[str],
    prepared: PipelineOptions,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str,
) -> None:
    out = tmp_path / "out"
    shutil.copytree(prepared.out, out, ignore=lambda folder, names: [] if Path(folder) != prepared.out else
                    [n for n in names if n not in ("data", "features")])  # fmt: skip
    command = [*arguments, "--out", str(out), "--run", "run"]
    if name == "run/state.pt":
        assert main(command) == 0
    path = out / name
    kept = path.read_bytes()
    path.unlink()
    if content == "folder":
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "garbage": b"\x80garbage", "cut": kept[:-50], "list": b"[1]"}[content])
    if (name, content) == ("data/shard-00000.jsonl", "empty"):  # a shard without conversations: the features differ
        assert "its data has 0 tokens" in refused(capsys, *command)
        return
    error = refused(capsys, *command)
    assert str(path) in error
    assert len(error) < 500


def test_tokens_of_another_vocabulary_are_named(
    arguments: list[str], prepared: PipelineOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(prepared.out / "data", out / "data")
    with (out / "data" / "shard-00001.jsonl").open("a") as file:
        file.write('{"kind":"x","temperature":0.0,"answer_start":1,"tokens":[1,999999,3]}\n')
    assert "outside the vocabulary" in refused(capsys, *arguments, "--out", str(out))


def test_answers_longer_than_the_usual_context_have_features(prepared: PipelineOptions, tmp_path: Path) -> None:
    data = tmp_path / "out" / "data"
    shutil.copytree(prepared.out / "data", data)
    (data / "options.json").unlink()
    conversation = {"kind": "x", "temperature": 0.0, "answer_start": 5, "tokens": [7] * 1500}
    (data / "shard-00000.jsonl").write_text(json.dumps(conversation) + "\n")
    options = replace(prepared, out=tmp_path / "out", data=replace(prepared.data, max_answer=1500))
    assert run_features(options, silent) == 2
    assert np.load(tmp_path / "out" / "features" / "shard-00000.npy", mmap_mode="r").shape[0] == 1500


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["data", "features", "train"])
def test_an_interrupt_leaves_whole_files_only(arguments: list[str], tmp_path: Path, stage: str) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "dspine_local", *arguments, "--out", str(out), "-t", "1"]
    if stage != "data":
        assert subprocess.run([*command, "--stage", "data"], check=False, timeout=120).returncode == 0
    if stage == "train":
        assert subprocess.run([*command, "--stage", "features"], check=False, timeout=120).returncode == 0
    more = {"data": ["--tokens", "1000000"], "features": [], "train": ["--steps", "100000", "--eval-every", "100000"]}
    sign = {"data": "data/options.json", "features": "features/options.json", "train": "dspine/log.jsonl"}[stage]
    with subprocess.Popen(
        [*command, *more[stage], "--stage", stage],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    ) as process:
        while not (out / sign).exists():
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    # Few features may be ready before the signal arrives.
    assert (process.returncode, error) in [(130, "\ninterrupted\n")] + ([(0, "")] if stage == "features" else [])
    assert not list(out.rglob("*.tmp"))
