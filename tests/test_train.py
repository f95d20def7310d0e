"""Training stages on a tiny target: seconds on a CPU."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TinyTarget

torch = pytest.importorskip("torch")

from dspine_local import _native  # noqa: E402
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
    torch_taps, torch_hidden = TorchTarget(TargetWeights(path)).read(torch.tensor([tokens]), [0, 2])
    for a, b in ((taps, torch_taps[0].numpy()), (hidden, torch_hidden[0].numpy())):
        assert np.linalg.norm(a - b) / np.linalg.norm(b) < 2e-2


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
    assert (checkpoint_folder(options) / "model.safetensors").is_file()


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


def test_torch_backend_gives_answers_with_features(prepared: PipelineOptions, tmp_path: Path) -> None:
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
